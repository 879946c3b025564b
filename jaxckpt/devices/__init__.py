"""Chips: their numbers, the one in use, and compiling for those that are not here."""

from jaxckpt.devices.context import active_device as active_device
from jaxckpt.devices.context import use as use
from jaxckpt.devices.device import ATTACHED as ATTACHED
from jaxckpt.devices.device import Device as Device
from jaxckpt.devices.device import Target as Target
from jaxckpt.devices.device import catalog as catalog
from jaxckpt.devices.device import get_device as get_device
from jaxckpt.devices.target import can_compile as can_compile
from jaxckpt.devices.target import has_cudnn_wheels as has_cudnn_wheels
from jaxckpt.devices.target import plugin_version as plugin_version
from jaxckpt.devices.target import target_config as target_config
from jaxckpt.devices.target import topology_devices as topology_devices
