"""The active device context: which device the program being traced is for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from jaxckpt.devices.device import Device, get_device

# A JAX user context is part of the key of every trace and compile cache, so a jitted
# function that looks at the device while it is traced is traced again for another one.
_active = jax.make_user_context(None)


@contextlib.contextmanager
def use(device: Device | str) -> Iterator[Device]:
    """Make `device` the one that programs traced inside are meant for.

    Model code asks `active_device()` while it is traced, for instance to choose an
    attention kernel that the device has.

    Args:
        device: A device or the name of one.

    Raises:
        DeviceError: No such device.

    Example:
        >>> with use("h200"):
        ...     active_device().name
        'h200'
        >>> active_device() is None
        True
    """
    device = get_device(device)
    with _active(device):
        yield device


def active_device() -> Device | None:
    """Return the device of the innermost `use`, or None outside of any."""
    return _active.value
