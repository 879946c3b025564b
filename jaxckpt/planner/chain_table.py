"""The dynamic programme behind `chain.py`: V(i, j, m) for all intervals of a chain.

    V(i, j, m) = min( min_o  seconds_o + V(i + 1, j, m - bytes_o),
                      min_k  forward_i..k + V(k, j, m - input_i) + V(i, k, m - G_kj) )

with m in units of `grain` bytes and every size rounded up to units. Values of V never
rise with m. So a way whose cost with all memory is f is of use only for m where the
best so far is above f: ways are tried by f, each for those m alone.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxckpt.planner.chain_links import (
    Decision,
    KeepOption,
    Link,
    ReverseNow,
    RunAgain,
)


class Intervals:
    """All intervals of a chain, numbered; those of equal stages have one number.

    A chain of equal layers has as many as layers.

    Attributes:
        numbers: `numbers[start, stop]`, for start < stop.
        shortest_first: A (start, stop) of each number, shorter intervals first.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        count = len(links)
        classes = {link: i for i, link in enumerate(dict.fromkeys(links))}
        kinds = [classes[link] for link in links]
        known: dict[tuple[int, int], int] = {}
        found: list[tuple[int, int]] = []
        self.numbers = np.full((count, count + 1), -1)
        for start in range(count):
            number = -1
            for stop in range(start + 1, count + 1):
                number = known.setdefault((number, kinds[stop - 1]), len(known))
                self.numbers[start, stop] = number
                if number == len(found):
                    found.append((start, stop))
        self.shortest_first = sorted(found, key=lambda ends: ends[1] - ends[0])

    def __len__(self) -> int:
        """Return how many differ."""
        return len(self.shortest_first)


@dataclass(frozen=True)
class _Ways:
    """What can become of the first stage of an interval: its options, then middles.

    Each costs `V[behind, m - kept] + seconds + V[again, m - gradients]` from `least`
    units on; nothing runs again for an option, of which `again` is -1.
    """

    behind: np.ndarray
    kept: np.ndarray
    again: np.ndarray
    gradients: np.ndarray
    seconds: np.ndarray
    least: np.ndarray


class ChainTable:
    """V for all intervals of a chain, for 0 to `size - 1` free units.

    Args:
        links: The stages.
        intervals: Their intervals.
        grain: Bytes of a unit.
        size: For how many numbers of free units.
    """

    def __init__(
        self, links: Sequence[Link], intervals: Intervals, *, grain: int, size: int
    ) -> None:
        self._links = links
        self._grain = grain
        self._numbers = intervals.numbers
        self._gradients = np.cumsum([0, *(link.gradient_bytes for link in links)])
        self._forward = np.array([link.forward_seconds for link in links])
        self._running = np.array([link.run_bytes for link in links])
        self._options = {link: _OptionArrays(link) for link in set(links)}
        self._ways: dict[int, _Ways] = {}
        self._rows = np.full((len(intervals) + 1, size), np.inf)
        self._rows[-1] = 0.0  # where nothing runs again
        self._first = np.zeros(len(self._rows), int)  # where a row is finite from
        self._scratch = np.empty(size)
        for start, stop in intervals.shortest_first:
            self._fill(start, stop)

    def costs(self) -> np.ndarray:
        """Return V of the whole chain, by free units."""
        return self._rows[self._numbers[0, len(self._links)]]

    def decisions(self, free: int) -> tuple[Decision, ...]:
        """Return what becomes of all stages with so many units free."""
        return self._decide(0, len(self._links), free)

    def _fill(self, start: int, stop: int) -> None:
        number = self._numbers[start, stop]
        row = self._rows[number]
        if stop - start == 1:
            row[self._units(self._links[start].backward_bytes) :] = 0.0
        else:
            self._ways[number] = self._all_ways(start, stop)
            self._minimise(row, self._ways[number])
        self._first[number] = np.count_nonzero(np.isinf(row))

    def _minimise(self, row: np.ndarray, ways: _Ways) -> None:
        last = len(row) - 1
        floors = self._costs_at(ways, last)
        least = np.maximum(ways.least, ways.kept + self._first[ways.behind])
        least = np.maximum(least, ways.gradients + self._first[ways.again])
        options = np.count_nonzero(ways.again < 0)
        for some in (np.arange(options), np.arange(options, len(floors))):
            useful = some[floors[some] < row[np.minimum(least[some], last)]]
            fastest_first = useful[np.argsort(floors[useful])]
            self._lower(row, ways, fastest_first, least, floors)

    def _lower(
        self,
        row: np.ndarray,
        ways: _Ways,
        some: np.ndarray,
        least: np.ndarray,
        floors: np.ndarray,
    ) -> None:
        """Lower a row to the costs of some ways, each where it is above its floor."""
        columns = ways.behind, ways.kept, ways.again, ways.gradients, ways.seconds
        numbers = [column[some].tolist() for column in (*columns, least, floors)]
        rows = self._rows
        for behind, kept, again, gradients, seconds, low, floor in zip(
            *numbers, strict=True
        ):
            high = bisect_left(row, -floor, lo=low, key=operator.neg)
            if high <= low:
                continue
            cost = self._scratch[: high - low]
            np.add(rows[behind, low - kept : high - kept], seconds, out=cost)
            if again >= 0:
                cost += rows[again, low - gradients : high - gradients]
            part = row[low:high]
            np.minimum(part, cost, out=part)

    def _all_ways(self, start: int, stop: int) -> _Ways:
        link = self._links[start]
        options, middles = self._options[link], np.arange(start + 1, stop)
        gradients = self._gradients[stop] - self._gradients[middles]
        running = np.maximum.accumulate(self._running[start : stop - 1])
        nothing = np.zeros(len(options.kept), int)
        keeping = np.maximum(options.running, options.backward + gradients[0])
        again = np.maximum(link.input_bytes + running, gradients)
        input_units = np.full(len(middles), self._units(link.input_bytes))
        behind = nothing + self._numbers[start + 1, stop]
        return _Ways(
            behind=np.concatenate([behind, self._numbers[middles, stop]]),
            kept=np.concatenate([self._units(options.kept), input_units]),
            again=np.concatenate([nothing - 1, self._numbers[start, middles]]),
            gradients=np.concatenate([nothing, self._units(gradients)]),
            seconds=np.concatenate(
                [options.seconds, np.cumsum(self._forward[start : stop - 1])]
            ),
            least=self._units(np.concatenate([keeping, again])),
        )

    def _costs_at(self, ways: _Ways, free: int) -> np.ndarray:
        """Return what each way costs with so many units free."""
        costs = np.full(len(ways.least), np.inf)
        fits = np.flatnonzero(ways.least <= free)
        behind = self._rows[ways.behind[fits], free - ways.kept[fits]]
        again = self._rows[ways.again[fits], free - ways.gradients[fits]]
        costs[fits] = behind + ways.seconds[fits] + again
        return costs

    def _decide(self, start: int, stop: int, free: int) -> tuple[Decision, ...]:
        done: list[Decision] = []
        while stop - start > 1:
            ways = self._ways[self._numbers[start, stop]]
            way = int(np.argmin(self._costs_at(ways, free)))
            number = way - len(self._links[start].options)
            if number < 0:
                done.append(KeepOption(start, way))
                start += 1
            else:
                middle = start + 1 + number
                left = free - int(ways.gradients[way])
                done.append(RunAgain(start, middle, self._decide(start, middle, left)))
                start = middle
            free -= int(ways.kept[way])
        return (*done, ReverseNow(start))

    def _units(self, size: Any) -> Any:
        """Return bytes, a number or an array of them, in units."""
        return -(-size // self._grain)


class _OptionArrays:
    """The options of a stage: bytes kept, and those with its two runs beside them."""

    def __init__(self, link: Link) -> None:
        options = link.options
        self.kept = np.array([o.bytes for o in options], dtype=np.int64)
        self.seconds = np.array([o.seconds for o in options])
        self.running = self.kept + link.run_bytes
        work = [link.option_backward_bytes(o) for o in options]
        self.backward = self.kept + np.array(work, dtype=np.int64)
