"""Budgets as users write them: bytes, or a share of a device's usable memory."""

from __future__ import annotations

import math
import re

from jaxckpt.devices import Device
from jaxckpt.errors import BudgetError
from jaxckpt.units import parse_bytes

RESERVE_BYTES = 2**30
"""What a process takes of a GPU besides its arrays: the CUDA context, cuBLAS and cuDNN
workspaces, NCCL's buffers. Between half and one GiB on current chips."""


def usable_bytes(device: Device) -> int | None:
    """Return a device's memory without the reserve; None where it is not known."""
    if device.memory_bytes is None:
        return None
    return max(0, device.memory_bytes - RESERVE_BYTES)


def parse_budget(budget: str | int, device: Device) -> int:
    """Return a budget in bytes.

    Args:
        budget: Bytes, text with a unit, or a percentage of the usable memory.
        device: The device.

    Raises:
        BudgetError: It is no amount, or a percentage of what is not known.

    Example:
        >>> from jaxckpt.devices import get_device
        >>> parse_budget("50%", get_device("h100-80gb"))
        41934618624
        >>> parse_budget("70GiB", get_device("h100-80gb")) == 70 * 2**30
        True
    """
    text = budget if isinstance(budget, str) else ""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if match is None:
        try:
            return parse_bytes(budget, argument="budget")
        except ValueError as error:
            raise BudgetError(f"{error} Or a percentage, as in `90%`.") from None
    share = float(match.group(1)) / 100
    if not 0 < share <= 1:
        raise BudgetError(
            f"`budget={budget}` is not a share of the device's memory. Use more than "
            "0% and at most 100%."
        )
    usable = usable_bytes(device)
    if usable is None:
        raise BudgetError(
            f"`budget={budget}` is a share of the memory of `{device.name}`, which is "
            "not known. Give bytes, as in `70GiB`."
        )
    return int(usable * share)


def parse_host_budget(budget: str | int) -> int:
    """Return a budget of host memory in bytes.

    Example:
        >>> parse_host_budget("100GiB") == 100 * 2**30
        True

    Raises:
        BudgetError: It is no amount.
    """
    try:
        return parse_bytes(budget, argument="host_budget")
    except ValueError as error:
        raise BudgetError(str(error)) from None


def memory_fraction(peak_bytes: int, device: Device) -> float | None:
    """Return the `XLA_PYTHON_CLIENT_MEM_FRACTION` that a step of a peak needs.

    JAX takes this share of the device's memory when it starts, 0.75 by default. Two in
    a hundred are added for what the allocator cannot use; None above all memory.

    Example:
        >>> from jaxckpt.devices import get_device
        >>> memory_fraction(70 * 2**30, get_device("h100-80gb"))
        0.91
    """
    if not device.memory_bytes:
        return None
    fraction = math.ceil(100 * 1.02 * peak_bytes / device.memory_bytes) / 100
    return fraction if fraction <= 1 else None
