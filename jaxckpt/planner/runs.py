"""Across the equal layers of loops: how many take which option, in which runs.

A loop holds what all its layers keep until the last of them is reversed, and the
gradients of all of them from the first on. So the peak of a step is that of its phases:
the head, with everything kept, and the backward pass of each run r,

    W(r) + kept of the runs up to r + gradients of the runs from r on  <=  free bytes.

For one stack all answers of up to three runs are tried (`three.py`). For several, and
for more runs, with y_ro = 1 where run r takes option o and n_ro the number of its
parts, it is a small MILP for HiGHS (`scipy.optimize.milp`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from jaxckpt.planner.three import Table

_GAP = 2e-4
_SECONDS = 20.0
_TOLERANCE = 1e-5
"""HiGHS may exceed a bound by a millionth: so much is left free."""


@dataclass(frozen=True)
class Choice:
    """What can become of some layers of a stack.

    Attributes:
        bytes: What stays of them until they are reversed.
        seconds: What runs again.
        work_bytes: What their second run and backward pass hold besides.
        layers: How many layers they are.
        host_bytes: What stays of them in host memory.
    """

    bytes: int
    seconds: float
    work_bytes: int
    layers: int = 1
    host_bytes: int = 0


@dataclass(frozen=True)
class Layers:
    """A stack of equal layers.

    Attributes:
        count: How many.
        choices: What can become of them.
        gradient_bytes: Of the parameters of one layer.
        runs: Among how many runs they are shared at most, by `more_runs`.
        joining_seconds: What it takes to join the gradients of several runs.
    """

    count: int
    choices: tuple[Choice, ...]
    gradient_bytes: int = 0
    runs: int = 2
    joining_seconds: float = 0.0


@dataclass(frozen=True)
class Taken:
    """A run: the number of a choice, and how many parts take it."""

    choice: int
    parts: int


@dataclass(frozen=True)
class RunsAnswer:
    """The best use of a budget.

    Attributes:
        runs: The runs of each stack, in order.
        seconds: What runs again.
    """

    runs: tuple[tuple[Taken, ...], ...]
    seconds: float


def peak_bytes(
    stacks: Sequence[Layers], runs: Sequence[Sequence[Taken]], head_bytes: int
) -> int:
    """Return the most bytes that runs hold in any phase, as the module says."""
    slots = [
        (layers.choices[t.choice], t.parts, layers.gradient_bytes)
        for layers, taken in zip(stacks, runs, strict=True)
        for t in taken
    ]
    kept = np.cumsum([parts * c.bytes for c, parts, _ in slots])
    made = np.array([parts * c.layers * g for c, parts, g in slots])
    gradients = np.cumsum(made[::-1])[::-1]
    work = [c.work_bytes for c, _, _ in slots]
    head = int(kept[-1]) + head_bytes
    return max(head, *(map(int, work + kept + gradients)))


def best_runs(
    stacks: Sequence[Layers],
    free_bytes: int,
    head_bytes: int = 0,
    host_bytes: int = 0,
) -> RunsAnswer | None:
    """Return the least seconds that fit, or None where nothing does.

    Args:
        stacks: The stacks of a program, in order.
        free_bytes: For what is kept, gradients and work at once.
        head_bytes: What is held where everything is kept: by the head, say.
        host_bytes: For what is kept in host memory.

    Example:
        >>> light, heavy = Choice(1, 2.0, 1), Choice(3, 0.0, 1)
        >>> answer = best_runs([Layers(4, (light, heavy))], free_bytes=9)
        >>> answer.seconds, answer.runs
        (4.0, ((Taken(choice=0, parts=2), Taken(choice=1, parts=2)),))
    """
    if len(stacks) > 1:
        return more_runs(stacks, free_bytes, head_bytes, host_bytes)
    (layers,) = stacks
    found = _table(layers).best(free_bytes, head_bytes, host_bytes)
    if found is None:
        return None
    runs = tuple(Taken(choice, parts) for choice, parts in found)
    return RunsAnswer((runs,), _seconds(layers, runs))


def more_runs(
    stacks: Sequence[Layers],
    free_bytes: int,
    head_bytes: int = 0,
    host_bytes: int = 0,
    time_limit: float = _SECONDS,
) -> RunsAnswer | None:
    """Return the least seconds that fit, in as many runs as each stack may have.

    Args:
        stacks: As of `best_runs`.
        free_bytes: As there.
        head_bytes: As there.
        host_bytes: As there.
        time_limit: After so many seconds HiGHS ends with the best that it has.
    """
    return _Problem(stacks, free_bytes, head_bytes, host_bytes).solve(time_limit)


def _seconds(layers: Layers, runs: Sequence[Taken]) -> float:
    joining = layers.joining_seconds if len(runs) > 1 else 0.0
    return joining + sum(layers.choices[t.choice].seconds * t.parts for t in runs)


@functools.lru_cache(maxsize=16)
def _table(layers: Layers) -> Table:
    return Table(
        layers.count,
        np.array([c.bytes for c in layers.choices]),
        np.array([c.seconds for c in layers.choices]),
        np.array([c.work_bytes for c in layers.choices]),
        np.array([c.layers for c in layers.choices]),
        np.array([c.host_bytes for c in layers.choices]),
        layers.gradient_bytes,
        layers.joining_seconds,
    )


def _up_to(most: Sequence[float]) -> Bounds:
    """Return bounds of columns from 0 on; SciPy's types know numbers only."""
    upper: Any = np.asarray(most)
    return Bounds(0.0, upper)


class _Problem:
    """The MILP: columns n and y for each stack, run and choice, in this order."""

    def __init__(
        self,
        stacks: Sequence[Layers],
        free_bytes: int,
        head_bytes: int,
        host_bytes: int,
    ) -> None:
        self.stacks = stacks
        self.free = free_bytes
        self.head = head_bytes
        self.host = host_bytes
        self.slots = [
            (number, run) for number, s in enumerate(stacks) for run in range(s.runs)
        ]
        self.columns = [
            (slot, choice)
            for slot, (number, _) in enumerate(self.slots)
            for choice in range(len(stacks[number].choices))
        ]
        self.count = len(self.columns)
        self._scale = max(1.0, float(free_bytes))
        self._rows: list[tuple[dict[int, float], float, float]] = []

    def _choice(self, column: int) -> Choice:
        slot, choice = self.columns[column]
        return self.stacks[self.slots[slot][0]].choices[choice]

    def _layers(self, column: int) -> Layers:
        return self.stacks[self.slots[self.columns[column][0]][0]]

    def solve(self, time_limit: float) -> RunsAnswer | None:
        """Return the answer, None where there is none."""
        self._all_layers()
        self._one_choice_a_run()
        self._phases()
        seconds = np.array([self._choice(i).seconds for i in range(self.count)])
        longest = seconds.max(initial=0.0) or 1.0
        # A run more joins gradients once more; of equal answers the one in fewer runs.
        runs = np.array([self._layers(i).joining_seconds for i in range(self.count)])
        cost = np.concatenate([seconds, runs + 1e-6 * longest]) / longest
        most = [self._most(i) for i in range(self.count)]
        found = milp(
            cost,
            integrality=np.ones(2 * self.count),
            bounds=_up_to([*most, *[1] * self.count]),
            constraints=self._constraints(),
            options={"mip_rel_gap": _GAP, "time_limit": time_limit},
        )
        if found.x is None:
            return None
        return self._answer(found.x)

    def _answer(self, columns: np.ndarray) -> RunsAnswer:
        parts = columns[: self.count].round().astype(int)
        runs: list[list[Taken]] = [[] for _ in self.stacks]
        for i, n in enumerate(parts):
            if n:
                slot, choice = self.columns[i]
                runs[self.slots[slot][0]].append(Taken(choice, int(n)))
        pairs = zip(self.stacks, runs, strict=True)
        total = sum(_seconds(layers, taken) for layers, taken in pairs)
        return RunsAnswer(tuple(map(tuple, runs)), total)

    def _most(self, column: int) -> int:
        return self._layers(column).count // self._choice(column).layers

    def _all_layers(self) -> None:
        for number, layers in enumerate(self.stacks):
            row = {
                i: float(self._choice(i).layers)
                for i, (slot, _) in enumerate(self.columns)
                if self.slots[slot][0] == number
            }
            self._rows.append((row, layers.count, layers.count))

    def _one_choice_a_run(self) -> None:
        for i in range(self.count):
            most = float(self._most(i))
            self._rows.append(({i: 1.0, self.count + i: -most}, -np.inf, 0.0))
            least = min(2.0, most)  # as in `three.Table`
            self._rows.append(({i: 1.0, self.count + i: -least}, 0.0, np.inf))
        for number, layers in enumerate(self.stacks):
            for choice in range(len(layers.choices)):
                # Neighbours of one choice would be one run.
                row = {
                    self.count + i: 1.0
                    for i, (slot, other) in enumerate(self.columns)
                    if other == choice and self.slots[slot][0] == number
                }
                self._rows.append((row, -np.inf, 1.0))
        for slot in range(len(self.slots)):
            row = {
                self.count + i: 1.0
                for i, (s, _) in enumerate(self.columns)
                if s == slot
            }
            self._rows.append((row, -np.inf, 1.0))

    def _phases(self) -> None:
        kept = {i: self._choice(i).bytes / self._scale for i in range(self.count)}
        limit = self.free / self._scale * (1 - _TOLERANCE)
        self._rows.append((kept, -np.inf, limit - self.head / self._scale))
        there = {i: self._choice(i).host_bytes / self._scale for i in range(self.count)}
        if any(there.values()):
            self._rows.append((there, -np.inf, self.host / self._scale))
        for slot in range(len(self.slots)):
            row: dict[int, float] = {}
            for i, (other, _) in enumerate(self.columns):
                choice = self._choice(i)
                size = choice.bytes if other <= slot else 0
                if other >= slot:
                    size += choice.layers * self._layers(i).gradient_bytes
                row[i] = size / self._scale
                if other == slot:
                    row[self.count + i] = choice.work_bytes / self._scale
            self._rows.append((row, -np.inf, limit))

    def _constraints(self) -> LinearConstraint:
        entries = [
            (number, column, value)
            for number, (row, _, _) in enumerate(self._rows)
            for column, value in row.items()
        ]
        rows, columns, values = map(np.array, zip(*entries, strict=True))
        shape = len(self._rows), 2 * self.count
        matrix = sparse.csr_array((values, (rows, columns)), shape=shape)
        lower: Any = np.array([low for _, low, _ in self._rows])
        upper: Any = np.array([high for _, _, high in self._rows])
        return LinearConstraint(matrix, lower, upper)
