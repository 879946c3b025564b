"""Across stages: the best use of a budget for a chain, by dynamic programming.

V(i, j, m) is the least time that stages i to j - 1 take besides one forward and one
backward pass, where x_i is at hand and m bytes are free: the gradients of stages from j
on exist by then and are not counted in m. The last stage is reversed at once:
V(i, i + 1, m) = 0 where its work fits in m. Else stage i keeps what one of its options
says, or its input stays alone and everything up to stage k runs again:

    V(i, j, m) = min( min_o  seconds_o + V(i + 1, j, m - bytes_o),
                      min_k  forward_i..k + V(k, j, m - input_i) + V(i, k, m - G_kj) )

where G_kj are the gradients of stages k to j - 1, and with the work of each stage
fitting beside all that is kept while it runs. This is the family of Beaumont et al.
("Optimal checkpointing for heterogeneous chains", 2019), with any number of options for
a stage. With none it is Griewank and Walther's optimum; with one of the size of the
input, that of states and tapes in equal slots.

Bytes are counted in units, every size rounded up. What an answer holds is then taken
again from its true sizes, so that an answer fits the budget to the byte and may need
more units than the budget has. Rounding adds at most E bytes to what is held at any
moment, so V with B + E bytes is a lower bound on the time of all answers within B.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxckpt.planner.chain_links import Decision as Decision
from jaxckpt.planner.chain_links import KeepOption as KeepOption
from jaxckpt.planner.chain_links import Link as Link
from jaxckpt.planner.chain_links import Option as Option
from jaxckpt.planner.chain_links import ReverseNow as ReverseNow
from jaxckpt.planner.chain_links import RunAgain as RunAgain
from jaxckpt.planner.chain_links import peak_bytes
from jaxckpt.planner.chain_table import ChainTable, Intervals

MOST_UNITS = 2**14
"""In how many units the bytes that a chain has use for are counted at most."""
_SHARED = 4
"""Budgets that differ by less are counted in the same units."""
_NOTABLE = 2.0**-11
"""Answers that differ by a smaller part of a forward pass are not told apart."""
_MOST_UPDATES = 2**32
"""How many entries of a table are computed at most: some ten seconds."""
_MOST_ENTRIES = 2**28
"""How many entries a table has at most: 2 GiB."""


@dataclass(frozen=True)
class ChainAnswer:
    """The best use of a budget.

    Attributes:
        decisions: What becomes of the stages, in order.
        seconds: The time besides one forward and one backward pass.
        bound_seconds: No answer within the budget takes less.
        peak_bytes: The most that is held at once.
    """

    decisions: tuple[Decision, ...]
    seconds: float
    bound_seconds: float
    peak_bytes: int


class ChainSolver:
    """The best use of any budget up to one.

    A larger budget never gets an answer that takes more seconds: neither from one
    solver nor from two of one chain whose `grain_bytes` are equal, as they are for all
    `most_bytes` from a fourth of what the chain has use for. Else rounding stands
    between two: what always holds is that `bound_seconds` for a larger budget is no
    more than `seconds` for a smaller one.

    Args:
        links: The stages.
        most_bytes: The largest budget that is asked about: for all that is kept and
            worked with at once.
        units: In how many units all bytes of use are counted: the more, the closer to
            the bound. If None, as many as some seconds allow.

    Example:
        >>> link = Link(input_bytes=1, forward_seconds=1.0, work_bytes=0)
        >>> solver = ChainSolver([link] * 10, most_bytes=4)
        >>> [solver.solve(slots).seconds for slots in (2, 3, 4)]  # t(10, slots)
        [20.0, 15.0, 14.0]
    """

    def __init__(
        self, links: Sequence[Link], most_bytes: int, *, units: int | None = None
    ) -> None:
        self._links = tuple(links)
        self._most_bytes = most_bytes
        intervals = Intervals(self._links)
        if units is None:
            units = _affordable_units(self._links, intervals)
        use, step = _bytes_of_use(self._links), math.gcd(*_sizes(self._links)) or 1
        self.grain_bytes = _grain(use, most_bytes, step, units)
        self._rounding = _most_rounding(self._links, self.grain_bytes, step)
        size = max(0, self._reach(min(most_bytes, use))) + 1
        self._table = ChainTable(
            self._links, intervals, grain=self.grain_bytes, size=size
        )
        self._costs = self._table.costs()
        self._steps = self._notable_steps()
        self._plans: dict[int, tuple[tuple[Decision, ...], int]] = {}

    @cached_property
    def least_bytes(self) -> int | None:
        """The fewest bytes with an answer; None where `most_bytes` has none."""
        least = None
        for free in self._steps:
            if least is not None and free > self._reach(least - 1):
                break
            peak = self._plan(free)[1]
            least = peak if least is None else min(least, peak)
        return least if least is not None and least <= self._most_bytes else None

    def solve(self, budget_bytes: int) -> ChainAnswer | None:
        """Return the best use of a budget; None below `least_bytes`.

        Raises:
            ValueError: A budget above `most_bytes`.
        """
        if budget_bytes > self._most_bytes:
            raise ValueError(
                f"`budget_bytes={budget_bytes}` is above `most_bytes="
                f"{self._most_bytes}` of this solver. Build it with a larger one."
            )
        reach = min(self._reach(budget_bytes), len(self._costs) - 1)
        for free in self._candidates(budget_bytes, reach):
            decisions, peak = self._plan(free)
            if peak <= budget_bytes:
                seconds, bound = float(self._costs[free]), float(self._costs[reach])
                return ChainAnswer(decisions, seconds, bound, peak)
        return None

    def _reach(self, budget_bytes: int) -> int:
        """Return how many units an answer within a budget can need."""
        return (budget_bytes + self._rounding) // self.grain_bytes

    def _candidates(self, budget_bytes: int, reach: int) -> Iterator[int]:
        """Yield free units whose answers may fit, the fastest first."""
        sure = min(budget_bytes // self.grain_bytes, reach)
        yield from (free for free in reversed(self._steps) if sure < free <= reach)
        if sure >= 0 and math.isfinite(self._costs[sure]):
            yield sure

    def _notable_steps(self) -> list[int]:
        """Return the free units at which the cost has fallen enough since the last."""
        enough = _NOTABLE * sum(link.forward_seconds for link in self._links)
        steps: list[int] = []
        before = np.concatenate([[np.inf], self._costs[:-1]])
        for free in np.flatnonzero(self._costs < before).tolist():
            if not steps or self._costs[free] <= self._costs[steps[-1]] - enough:
                steps.append(free)
        return steps

    def _plan(self, free: int) -> tuple[tuple[Decision, ...], int]:
        if free not in self._plans:
            decisions = self._table.decisions(free)
            self._plans[free] = decisions, peak_bytes(self._links, decisions)
        return self._plans[free]


def _sizes(links: Sequence[Link]) -> Iterator[int]:
    for link in set(links):
        yield from (link.input_bytes, link.work_bytes, link.run_bytes)
        yield link.gradient_bytes
        for option in link.options:
            yield from (option.bytes, option.work_bytes)


def _kept_sizes(link: Link) -> list[int]:
    return [link.input_bytes, *(option.bytes for option in link.options)]


def _bytes_of_use(links: Sequence[Link]) -> int:
    """Return bytes beyond which more change nothing."""
    stays = sum(max(_kept_sizes(link)) + link.gradient_bytes for link in links)
    work = [link.work_bytes + link.run_bytes for link in links]
    work += [option.work_bytes for link in links for option in link.options]
    return stays + max(work)


def _affordable_units(links: Sequence[Link], intervals: Intervals) -> int:
    ends = intervals.shortest_first
    ways = sum(len(links[i].options) + j - i for i, j in ends)
    units = min(_MOST_UPDATES // ways, _MOST_ENTRIES // len(intervals))
    return max(1, min(units, MOST_UNITS))


def _grain(use: int, most_bytes: int, step: int, units: int) -> int:
    """Return the bytes of a unit: those of use in units, or a half, a fourth..."""
    parts = units
    while most_bytes * parts < use * units // _SHARED and parts * step < use:
        parts *= 2
    return step * max(1, -(-use // (step * parts)))


def _most_rounding(links: Sequence[Link], grain: int, step: int) -> int:
    """Return by how many bytes rounding raises what is held at a moment, at most.

    Held are, each rounded by itself: one kept thing of each stage before; sums of
    gradients of stages behind, no stage in two of them; and the stage at work.
    """

    def of_stage(link: Link) -> int:
        if link.gradient_bytes:
            return grain - step
        return max(-size % grain for size in _kept_sizes(link))

    return sum(of_stage(link) for link in links) + grain - step
