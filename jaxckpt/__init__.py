"""Gradient checkpointing for JAX: what to keep, what to compute again, and the proof."""

from .errors import CompileError as CompileError
from .errors import DeviceError as DeviceError
from .errors import JaxckptError as JaxckptError
from .errors import PolicyError as PolicyError
from .errors import WorkloadError as WorkloadError
from .graph.trace import Graph as Graph
from .graph.trace import trace as trace
from .policy import Decision as Decision
from .policy import Policy as Policy
from .policy import offload as offload
from .policy import offload_dots as offload_dots
from .policy import parse_policy as parse_policy
from .policy import recompute as recompute
from .policy import save as save
from .policy import save_dots as save_dots
from .policy import save_everything as save_everything
from .policy import save_larger_than as save_larger_than
from .policy import save_nothing as save_nothing
from .policy_text import recipe as recipe
from .policy_text import recipe_names as recipe_names
from .remat import remat as remat
from .workload import Workload as Workload
