"""What the planner knows of one stage: values, and the operations that make them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Operation:
    """What a recomputation runs as a whole.

    Attributes:
        seconds: What running it once takes; 0 for views and what is fused for nothing.
        reads: Values that it reads. What is there anyway (the stage's input,
            parameters) is no value.
        writes: Values that it makes.
    """

    seconds: float
    reads: tuple[int, ...]
    writes: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.seconds >= 0 and math.isfinite(self.seconds)


@dataclass(frozen=True)
class StageCosts:
    """One stage as a graph. Values are numbers, in the order in which they are made.

    Attributes:
        sizes: Bytes of each value on one device.
        operations: Each after those that make what it reads.
        residuals: The values that the backward pass reads.
        fixed: Values that cannot be kept (they have no name, say).
        keeping: Seconds that keeping a value takes: to write it apart, and to read it
            from there. Empty for none.
        together: Values that can only be kept all or none, such as those of one name.
    """

    sizes: tuple[int, ...]
    operations: tuple[Operation, ...]
    residuals: frozenset[int]
    fixed: frozenset[int] = frozenset()
    keeping: tuple[float, ...] = ()
    together: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def maker(self) -> dict[int, int]:
        """The number of the operation that makes a value."""
        return {v: i for i, op in enumerate(self.operations) for v in op.writes}

    def run_again(self, saved: Iterable[int]) -> frozenset[int]:
        """Return the operations that run again when these values are saved."""
        there, again = set(saved), set()
        todo = [v for v in self.residuals if v not in there]
        while todo:
            number = self.maker[todo.pop()]
            if number not in again:
                again.add(number)
                reads = self.operations[number].reads
                todo += [v for v in reads if v not in there]
        return frozenset(again)

    def seconds(self, saved: Iterable[int]) -> float:
        """Return what running again takes, and keeping, when these values are saved."""
        saved = sorted(saved)
        again = sorted(self.run_again(saved))
        kept = [self.keeping[v] for v in saved] if self.keeping else []
        return math.fsum([*(self.operations[i].seconds for i in again), *kept])

    def bytes(self, saved: Iterable[int]) -> int:
        """Return the bytes of these values."""
        return sum(self.sizes[v] for v in saved)
