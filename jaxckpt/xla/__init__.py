"""What XLA makes of a program: bytes, optimized HLO, and seconds from it."""

from jaxckpt.xla.attached import StepTime as StepTime
from jaxckpt.xla.attached import time_step as time_step
from jaxckpt.xla.compile import XLA_FLAGS_USED as XLA_FLAGS_USED
from jaxckpt.xla.compile import Compilation as Compilation
from jaxckpt.xla.compile import compile_for as compile_for
from jaxckpt.xla.compile import toolchain_versions as toolchain_versions
from jaxckpt.xla.footprint import Footprint as Footprint
from jaxckpt.xla.hlo import HloError as HloError
from jaxckpt.xla.hlo import parse_hlo as parse_hlo
from jaxckpt.xla.peak import Holder as Holder
from jaxckpt.xla.peak import holders as holders
from jaxckpt.xla.roofline import StepSeconds as StepSeconds
from jaxckpt.xla.roofline import step_seconds as step_seconds
