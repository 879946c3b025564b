"""Inside a stage: the exact frontier of bytes saved against seconds run again.

With saved_v in {0, 1} for a value and again_o in [0, 1] for an operation:

    minimise    sum_o seconds_o again_o + sum_v keeping_v saved_v
    subject to  saved_v + again_maker(v) >= 1                for each residual v
                saved_u + again_maker(u) >= again_o          for each u that o reads
                saved_u = saved_v                            for u, v of one name
                sum_v bytes_v saved_v <= budget

With binary saved_v the least again_o are 0 or 1 by themselves. The budget walks down
from what the fastest choice needs, each solution one point below the last; HiGHS solves
each (`scipy.optimize.milp`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from jaxckpt.planner.stage import StageCosts

_UNITS = 2**20
"""In how many units the sum of all sizes is counted at most; sizes round up."""
_RELATIVE = 1e-9


@dataclass(frozen=True)
class Point:
    """A choice that no other one beats in bytes and seconds at once.

    Attributes:
        saved: The values that stay.
        bytes: Their bytes on the device.
        seconds: What runs again takes, and keeping the values.
        offloaded: Those of them that stay in host memory (`planner/offload.py`).
        host_bytes: Their bytes there.
    """

    saved: frozenset[int]
    bytes: int
    seconds: float
    offloaded: frozenset[int] = frozenset()
    host_bytes: int = 0


@functools.lru_cache(maxsize=256)
def frontier(stage: StageCosts) -> tuple[Point, ...]:
    """Return the frontier of a stage, from nothing saved to the fastest choice.

    Bytes rise and seconds fall from point to point. Where all sizes together are above
    2**20 bytes they are rounded up to a millionth of the sum, so that points closer
    than that may be left out. Equal stages share one answer.

    Example:
        >>> from jaxckpt.planner.stage import Operation
        >>> product, sine = Operation(3.0, (), (0,)), Operation(1.0, (0,), (1,))
        >>> stage = StageCosts((8, 8), (product, sine), frozenset((0, 1)))
        >>> [(sorted(p.saved), p.bytes, p.seconds) for p in frontier(stage)]
        [([], 0, 4.0), ([0], 8, 1.0), ([0, 1], 16, 0.0)]
    """
    problem = _Problem(stage)
    points: list[Point] = []
    budget = math.inf
    while budget >= 0:
        saved = problem.solve(budget)
        points.append(Point(saved, stage.bytes(saved), stage.seconds(saved)))
        budget = problem.units_of(saved) - 1
    return tuple(reversed(points))


class _Problem:
    """The MILP of a stage; the budget is given for each solution."""

    def __init__(self, stage: StageCosts) -> None:
        self.stage = stage
        self.kept = worth_saving(stage)
        self.operations = sorted(stage.run_again(()))
        total = stage.bytes(self.kept)
        grain = max(1, math.ceil(total / _UNITS))
        self.units = np.array([math.ceil(stage.sizes[v] / grain) for v in self.kept])
        keeping = [stage.keeping[v] if stage.keeping else 0.0 for v in self.kept]
        again = [stage.operations[o].seconds for o in self.operations]
        seconds = np.array([*keeping, *again])
        self.seconds = seconds / (seconds.max(initial=0.0) or 1.0)
        self._rules = self._constraints()

    def units_of(self, saved: frozenset[int]) -> int:
        """Return the units of values."""
        pairs = zip(self.kept, self.units, strict=True)
        return sum(int(units) for value, units in pairs if value in saved)

    def solve(self, budget: float) -> frozenset[int]:
        """Return the smallest of the fastest choices within a budget of units."""
        if not self.kept:
            return frozenset()
        size = np.concatenate([self.units, np.zeros(len(self.operations))])
        speed = self.seconds
        fits = LinearConstraint(size, -np.inf, budget)
        fastest = self._best(speed, [fits])
        within = speed @ fastest * (1 + _RELATIVE) + _RELATIVE
        chosen = self._best(
            size, [fits, LinearConstraint(speed, -np.inf, float(within))]
        )
        flags = chosen[: len(self.kept)]
        pairs = zip(self.kept, flags, strict=True)
        return frozenset(value for value, flag in pairs if flag > 0.5)

    def _best(self, cost: np.ndarray, more: list[LinearConstraint]) -> np.ndarray:
        binary = np.arange(len(cost)) < len(self.kept)
        found = milp(
            cost,
            integrality=binary,
            bounds=Bounds(0, 1),
            constraints=[*self._rules, *more],
            options={"mip_rel_gap": 0.0},
        )
        assert found.x is not None, found.message  # to save nothing is always allowed
        return np.concatenate([found.x[binary].round(), found.x[~binary]])

    def _constraints(self) -> list[LinearConstraint]:
        """Return the rules as rows `saved + again [- again] >= bound`."""
        columns = {v: i for i, v in enumerate(self.kept)}
        first = len(self.kept)
        again = {o: first + i for i, o in enumerate(self.operations)}
        entries: list[tuple[int, int, float]] = []
        bounds: list[float] = []

        def add(value: int, reader: int | None) -> None:
            row = len(bounds)
            bounds.append(1.0 if reader is None else 0.0)
            if value in columns:
                entries.append((row, columns[value], 1.0))
            entries.append((row, again[self.stage.maker[value]], 1.0))
            if reader is not None:
                entries.append((row, again[reader], -1.0))

        for value in sorted(self.stage.residuals):
            add(value, None)
        for number in self.operations:
            for value in self.stage.operations[number].reads:
                add(value, number)
        for group in self.stage.together:
            members = [columns[v] for v in group if v in columns]
            for one, other in zip(members, members[1:] + members[:1], strict=True):
                if one != other:
                    entries += [(len(bounds), one, 1.0), (len(bounds), other, -1.0)]
                    bounds.append(0.0)
        if not bounds:
            return []
        rows, cols, numbers = map(np.array, zip(*entries, strict=True))
        shape = len(bounds), first + len(again)
        matrix = sparse.csr_array((numbers, (rows, cols)), shape=shape)
        lower: Any = np.array(bounds)
        return [LinearConstraint(matrix, lower)]


def worth_saving(stage: StageCosts) -> list[int]:
    """Return the values that some choice without equal has to save.

    Not those that nothing reads which runs again; nor one that costs nothing to have
    again from a single value that is no larger and can be saved instead.
    """
    again = stage.run_again(())
    read = set(stage.residuals)
    read.update(v for o in again for v in stage.operations[o].reads)
    return [v for v in sorted(read - stage.fixed) if not _is_view(stage, v)]


def _is_view(stage: StageCosts, value: int) -> bool:
    """Return whether a value costs nothing to have again from one that can be saved."""
    operation = stage.operations[stage.maker[value]]
    if operation.seconds or len(operation.writes) != 1 or len(operation.reads) > 1:
        return False
    return all(
        stage.sizes[v] <= stage.sizes[value]
        and (v not in stage.fixed or _is_view(stage, v))
        for v in operation.reads
    )
