"""What repeats in a row of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MOST = 64
"""How many repeats are looked at before a program counts as one without any."""


@dataclass(frozen=True)
class Repeat:
    """Equal neighbours in a row.

    Attributes:
        start: Where the first begins.
        period: How many numbers one of them has.
        length: How many numbers repeat, those of an unfinished last one included.
    """

    start: int
    period: int
    length: int

    @property
    def times(self) -> int:
        """How many whole ones there are."""
        return self.length // self.period


def find_repeats(row: Sequence[int]) -> list[Repeat]:
    """Return what repeats, what covers most first, shortest first among equals.

    Example:
        >>> find_repeats([7, 1, 1, 2, 1, 1, 2, 1, 1, 2, 9])[0]
        Repeat(start=1, period=3, length=9)
    """
    numbers = np.asarray(row)
    found: list[Repeat] = []
    for period in range(1, len(row) // 2 + 1):
        same = np.flatnonzero(numbers[:-period] != numbers[period:])
        ends = np.concatenate([[-1], same, [len(row) - period]])
        lengths = np.diff(ends) - 1
        found += [
            Repeat(int(ends[i]) + 1, period, int(lengths[i]) + period)
            for i in np.flatnonzero(lengths >= period)
        ]
    found.sort(key=lambda r: (-r.times * r.period, r.period))
    return found[:_MOST]
