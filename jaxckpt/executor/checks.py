"""Checks of what the executor is given: each raises one clear message."""

from __future__ import annotations

import numbers
from typing import Any

from jaxckpt.errors import ScheduleError, did_you_mean

STORAGES = ("device", "host", "disk")
"""Where a slot can be. Only the device's are read and written at no cost."""


def check_storage(storage: object) -> None:
    """Raise `ScheduleError` for a storage that there is not."""
    if storage not in STORAGES:
        hint = did_you_mean(str(storage), STORAGES)
        raise ScheduleError(f"`storage={storage!r}` is not known. {hint}")


def check_number(value: Any, name: str, *, least: int) -> None:
    """Raise `ScheduleError` unless a value is a whole number of at least `least`."""
    is_number = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_number or value < least:
        raise ScheduleError(
            f"`{name}={value!r}` is not a whole number of at least {least}."
        )


def check_cost(value: Any, name: str) -> None:
    """Raise `ScheduleError` unless a value is a finite number of at least 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value < float("inf"):
        raise ScheduleError(
            f"`{name}={value!r}` is not a cost. Use a finite number of at least 0."
        )
