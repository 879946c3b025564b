"""Across stages: the best use of a budget for a chain, by dynamic programming.

V(i, j, m) is the least time that stages i to j - 1 take besides one forward and one
backward pass, where x_i is at hand and m bytes are free. The last stage is reversed at
once: V(i, i + 1, m) = 0 where its work fits in m. Else stage i keeps what one of its
options says, or its input stays alone and everything up to stage k runs again:

    V(i, j, m) = min( min_o  seconds_o + V(i + 1, j, m - bytes_o),
                      min_k  forward_i..k + V(k, j, m - input_i) + V(i, k, m) )

with the work of each stage fitting beside what is kept while it runs. This is the
family of Beaumont et al. ("Optimal checkpointing for heterogeneous chains", 2019), with
any number of options for a stage. With none it is Griewank and Walther's optimum; with
one of the size of the input, that of states and tapes in equal slots.

Bytes are counted in units, sizes rounded up, so that an answer is never over the
budget. The same with sizes rounded down is a lower bound on the time of any answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

UNITS = 512
"""In how many units a budget is counted."""


@dataclass(frozen=True)
class Option:
    """One way to keep something of a stage.

    Attributes:
        bytes: What is kept, its input with it where that is read again.
        seconds: What runs again for its backward pass.
        work_bytes: What that and the backward pass hold besides.
    """

    bytes: int
    seconds: float
    work_bytes: int = 0


@dataclass(frozen=True)
class Link:
    """One stage of a chain.

    Attributes:
        input_bytes: Of its input.
        forward_seconds: What one forward run takes.
        work_bytes: What its backward pass holds where it is reversed right after its
            forward run: its residuals, its input with them, and scratch.
        run_bytes: What a forward run holds besides.
        options: What can be kept of it besides its input alone.
    """

    input_bytes: int
    forward_seconds: float
    work_bytes: int
    run_bytes: int = 0
    options: tuple[Option, ...] = ()


@dataclass(frozen=True)
class KeepOption:
    """A stage that keeps what an option says.

    Attributes:
        stage: Its number.
        option: The number of the option.
    """

    stage: int
    option: int


@dataclass(frozen=True)
class ReverseNow:
    """A stage that is reversed right after its forward run.

    Attributes:
        stage: Its number.
    """

    stage: int


@dataclass(frozen=True)
class RunAgain:
    """Stages of which the first one's input stays; they run again as `children` say.

    Attributes:
        start: The first stage.
        stop: The stage behind the last.
        children: What becomes of them in the second run.
    """

    start: int
    stop: int
    children: tuple[Decision, ...]


Decision = KeepOption | ReverseNow | RunAgain


@dataclass(frozen=True)
class ChainAnswer:
    """The best use of a budget.

    Attributes:
        decisions: What becomes of the stages, in order.
        seconds: The time besides one forward and one backward pass.
        bound_seconds: No answer takes less.
    """

    decisions: tuple[Decision, ...]
    seconds: float
    bound_seconds: float


class ChainSolver:
    """The best use of any budget up to one.

    Args:
        links: The stages.
        most_bytes: The largest budget that is asked about: for all that is kept and
            worked with at once.
        units: In how many units it is counted: the more, the closer to the bound.

    Example:
        >>> link = Link(input_bytes=1, forward_seconds=1.0, work_bytes=0)
        >>> solver = ChainSolver([link] * 10, most_bytes=4)
        >>> [solver.solve(slots).seconds for slots in (2, 3, 4)]  # t(10, slots)
        [20.0, 15.0, 14.0]
    """

    def __init__(
        self, links: Sequence[Link], most_bytes: int, *, units: int = UNITS
    ) -> None:
        self._links = tuple(links)
        self._grain = max(1.0, most_bytes / units)
        budget = int(most_bytes / self._grain)
        self._table = _Table(self._links, budget, self._grain, up=True)
        self._optimistic = self._table
        if self._grain > 1:
            self._optimistic = _Table(self._links, budget, self._grain, up=False)

    @property
    def least_bytes(self) -> int | None:
        """The fewest bytes that have an answer; None where there is none."""
        feasible = np.flatnonzero(np.isfinite(self._costs(self._table)))
        return math.ceil(feasible[0] * self._grain) if feasible.size else None

    def solve(self, budget_bytes: int) -> ChainAnswer | None:
        """Return the best use of a budget; None where there is none."""
        free = int(budget_bytes / self._grain)
        seconds = float(self._costs(self._table)[free])
        if not math.isfinite(seconds):
            return None
        bound = min(seconds, float(self._costs(self._optimistic)[free]))
        decisions = self._table.decisions(0, len(self._links), free)
        return ChainAnswer(tuple(decisions), seconds, bound)

    def _costs(self, table: _Table) -> np.ndarray:
        return table.least(0, len(self._links))


class _Table:
    """V for all intervals of a chain, each an array over free units.

    Intervals of equal stages share one: a chain of equal layers has as many as layers.
    """

    def __init__(
        self, links: Sequence[Link], budget: int, grain: float, *, up: bool
    ) -> None:
        self.links = links
        self.budget = budget
        self._rounded = np.ceil if up else np.floor
        self._grain = grain
        classes = {link: i for i, link in enumerate(dict.fromkeys(links))}
        self._classes = tuple(classes[link] for link in links)
        self._found: dict[tuple[int, ...], np.ndarray] = {}
        self._fill()

    def least(self, start: int, stop: int) -> np.ndarray:
        """Return V of an interval, for 0 to `budget` units."""
        return self._found[self._classes[start:stop]]

    def decisions(self, start: int, stop: int, free: int) -> Iterator[Decision]:
        """Yield what becomes of the stages of an interval."""
        while stop - start > 1:
            choices = (
                (float(c[free]), choice) for choice, c in self._choices(start, stop)
            )
            _, choice = min(choices, key=lambda pair: pair[0])
            if isinstance(choice, KeepOption):
                yield choice
                option = self.links[start].options[choice.option]
                free -= self._units(option.bytes)
                start += 1
            else:
                again = self.decisions(start, choice.stop, free)
                yield RunAgain(start, choice.stop, tuple(again))
                free -= self._units(self.links[start].input_bytes)
                start = choice.stop
        yield ReverseNow(start)

    def _fill(self) -> None:
        count = len(self.links)
        for length in range(1, count + 1):
            for start in range(count - length + 1):
                key = self._classes[start : start + length]
                if key not in self._found:
                    self._found[key] = self._solve(start, start + length)

    def _solve(self, start: int, stop: int) -> np.ndarray:
        if stop - start == 1:
            return self._where_free(np.zeros(self.budget + 1), self._work(start))
        best = np.full(self.budget + 1, np.inf)
        for _, cost in self._choices(start, stop):
            np.minimum(best, cost, out=best)
        return best

    def _choices(
        self, start: int, stop: int
    ) -> Iterator[tuple[KeepOption | RunAgain, np.ndarray]]:
        """Yield what can become of the first stage, with V if it does."""
        link, running = self.links[start], self._running(start)
        for number, option in enumerate(link.options):
            kept = self._units(option.bytes)
            behind = self._shifted(self.least(start + 1, stop), kept)
            work = max(running, self._units(option.work_bytes))
            cost = self._where_free(behind + option.seconds, kept + work)
            yield KeepOption(start, number), cost
        kept, forward = self._units(link.input_bytes), 0.0
        for middle in range(start + 1, stop):
            forward += self.links[middle - 1].forward_seconds
            running = max(running, self._running(middle - 1))
            cost = self._shifted(self.least(middle, stop), kept)
            cost = cost + self.least(start, middle) + forward
            yield RunAgain(start, middle, ()), self._where_free(cost, kept + running)

    def _units(self, size: int) -> int:
        return int(self._rounded(size / self._grain))

    def _work(self, stage: int) -> int:
        return self._units(self.links[stage].work_bytes)

    def _running(self, stage: int) -> int:
        return self._units(self.links[stage].run_bytes)

    def _shifted(self, costs: np.ndarray, units: int) -> np.ndarray:
        """Return costs where so many units less are free."""
        if units == 0:
            return costs
        return np.concatenate([np.full(min(units, len(costs)), np.inf), costs[:-units]])

    @staticmethod
    def _where_free(costs: np.ndarray, units: int) -> np.ndarray:
        """Return costs, infinite where fewer units are free."""
        if units > 0:
            costs = costs.copy()
            costs[:units] = np.inf
        return costs
