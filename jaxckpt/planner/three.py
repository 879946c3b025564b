"""The best of up to three runs of one stack, by trying all of them.

Exact for the model of `jaxckpt.planner.runs` and quicker than its MILP where there is
one stack: of K choices and L layers it looks at K^3 L^2 triples of runs at most. Of
deep stacks not every length of the last run is tried; the first two share the rest in
every way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

_FINE = 40
"""In deeper stacks the last run has a number of parts out of about so many."""
_RUN_PENALTY = 1e-6
"""Of answers that differ by a smaller share the one in fewer runs is taken."""


@dataclass(frozen=True)
class Table:
    """The choices of a stack as arrays `[choices]`.

    Attributes:
        count: How many layers there are.
        bytes: What stays of one part.
        seconds: What runs again of it.
        work: What its second run and backward pass hold.
        layers: How many layers a part is.
        host: What stays of one part in host memory.
        gradient: Bytes of one layer's gradients.
        joining: Seconds that more than one run takes besides.
    """

    count: int
    bytes: np.ndarray
    seconds: np.ndarray
    work: np.ndarray
    layers: np.ndarray
    host: np.ndarray
    gradient: int
    joining: float = 0.0

    @cached_property
    def _pairs(self) -> tuple[np.ndarray, ...]:
        """Parts of the first run `[first, 1, parts]`, and layers that they leave."""
        parts = np.arange(self.count + 1)[None, None, :]
        layers = self.layers[:, None, None]
        return parts, self.count - parts * layers

    @cached_property
    def _differ(self) -> np.ndarray:
        return ~np.eye(len(self.bytes), dtype=bool)[:, :, None]

    @property
    def _least(self) -> np.ndarray:
        """The fewest parts of a run.

        A part alone is no loop, and the compiler does not free it as one: of
        Llama-3-1b (batch 8 x 8192) a single layer takes 1.6 GiB more, a single segment
        2 GiB (jax 0.10.2).
        """
        return np.minimum(2, self.count // self.layers)

    def best(
        self, free: int, head: int, free_host: int = 0
    ) -> list[tuple[int, int]] | None:
        """Return (choice, parts) of the fastest runs that fit; None where none do."""
        best, runs = math.inf, None
        for last, parts in self._last_runs():
            cost, first, second, n_first, n_second = self._best_two(
                last, parts, free, head, free_host, best
            )
            if cost < best:
                best = cost
                found = [(first, n_first), (second, n_second), (last, parts)]
                runs = [run for run in found if run[1]]
        return runs

    def _last_runs(self) -> Iterator[tuple[int, int]]:
        yield 0, 0
        step = max(1, self.count // _FINE)
        for choice in range(len(self.bytes)):
            most = self.count // self.layers[choice]
            for parts in range(self._least[choice], most + 1, step):
                yield choice, parts

    def _best_two(
        self,
        last: int,
        parts: int,
        free: int,
        head: int,
        free_host: int,
        limit: float,
    ) -> tuple[float, int, int, int, int]:
        """Return cost and choices of the best two runs before a given last one."""
        nothing = math.inf, 0, 0, 0, 0
        behind = parts * int(self.layers[last])
        cost_last = parts * float(self.seconds[last])
        kept_last = parts * int(self.bytes[last])
        if cost_last >= limit or kept_last + head > free:
            return nothing
        n_first, left = self._pairs
        left = left - behind
        layers = self.layers[None, :, None]
        n_second = left // layers
        least = self._least
        allowed = (left >= 0) & (n_second * layers == left)
        # Neighbours of one choice would be one run.
        allowed &= (n_first == 0) | (n_second == 0) | self._differ
        if parts:
            of_last = np.arange(len(self.bytes)) == last
            allowed &= (n_first == 0) | ~of_last[:, None, None]
            allowed &= (n_second == 0) | ~of_last[None, :, None]
        allowed &= (n_first == 0) | (n_first >= least[:, None, None])
        allowed &= (n_second == 0) | (n_second >= least[None, :, None])
        if self.host.any():
            host = n_first * self.host[:, None, None]
            host = host + n_second * self.host[None, :, None] + parts * self.host[last]
            allowed &= host <= free_host
        seconds = n_first * self.seconds[:, None, None]
        cost = seconds + n_second * self.seconds[None, :, None] + cost_last
        runs = (n_first > 0).astype(int) + (n_second > 0) + (parts > 0)
        cost = cost * (1 + _RUN_PENALTY * runs) + self.joining * (runs > 1)
        first = n_first * self.bytes[:, None, None]
        kept = first + n_second * self.bytes[None, :, None]
        gradients = self.count * self.gradient
        peak = kept + kept_last + head
        in_first = first + gradients + self.work[:, None, None]
        peak = np.maximum(peak, np.where(n_first > 0, in_first, 0))
        made = self.gradient * (n_second * layers + behind)
        in_second = kept + made + self.work[None, :, None]
        peak = np.maximum(peak, np.where(n_second > 0, in_second, 0))
        if parts:
            in_last = kept + kept_last + self.gradient * behind + self.work[last]
            peak = np.maximum(peak, in_last)
        cost = np.where(allowed & (peak <= free), cost, math.inf)
        place = int(np.argmin(cost))
        one, two, number = np.unravel_index(place, cost.shape)
        return (
            float(cost.flat[place]),
            int(one),
            int(two),
            int(number),
            int(n_second[one, two, number]),
        )
