"""How fast runs can be at best: any number of them, in any order.

A MILP for HiGHS without the order of runs. With n_c parts of choice c, taken or not as
y_c says, whatever the order may be:

- the head holds all that is kept;
- the run that is reversed first holds all that is kept, its work and its gradients;
- the run that is reversed last holds all gradients, its work and what it kept;
- a run of choice c holds its work, what it kept, its gradients, and of every other run
  either what that one kept or its gradients, whichever is less.

So every plan keeps within these limits, but what keeps within them may be no plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from jaxckpt.planner.runs import Choice, Layers

_GAP = 2e-4
_SECONDS = 20.0


def least_seconds(
    stacks: Sequence[Layers],
    free_bytes: int,
    head_bytes: int = 0,
    host_bytes: int = 0,
) -> float:
    """Return a bound: no runs that take one choice each and fit are faster.

    Args:
        stacks: The stacks, in order.
        free_bytes: For what is kept, gradients and work at once.
        head_bytes: What is held where everything is kept.
        host_bytes: For what is kept in host memory.

    Example:
        >>> light, heavy = Choice(1, 2.0, 1), Choice(3, 0.0, 1)
        >>> least_seconds([Layers(4, (light, heavy))], free_bytes=9)
        4.0
    """
    several = _Bound(stacks, free_bytes, head_bytes, host_bytes).seconds()
    if len(stacks) > 1:
        return several
    (layers,) = stacks
    one_run = (
        parts * choice.seconds
        for choice in layers.choices
        if (parts := layers.count // choice.layers) * choice.layers == layers.count
        and _alone(layers, choice) <= free_bytes
        and parts * choice.bytes + head_bytes <= free_bytes
        and parts * choice.host_bytes <= host_bytes
    )
    return min(several + layers.joining_seconds, *one_run, math.inf)


def _alone(layers: Layers, choice: Choice) -> int:
    """Return what one run of all layers holds while it is reversed."""
    parts = layers.count // choice.layers
    gradients = layers.count * layers.gradient_bytes
    return parts * choice.bytes + gradients + choice.work_bytes


class _Bound:
    """Columns: parts of every choice, whether it is taken, is first, and is last."""

    def __init__(
        self,
        stacks: Sequence[Layers],
        free_bytes: int,
        head_bytes: int,
        host_bytes: int,
    ) -> None:
        self.stacks = stacks
        pairs = [(c, i) for i, layers in enumerate(stacks) for c in layers.choices]
        self._pairs = pairs
        self._of_stack = np.array([i for _, i in pairs])
        self._layers = np.array([c.layers for c, _ in pairs])
        self._most = np.array([stacks[i].count // c.layers for c, i in pairs], float)
        self._least = np.minimum(2.0, self._most)  # as in `three.Table`
        self._scale = max(1.0, float(free_bytes))
        self._free, self._head = free_bytes / self._scale, head_bytes / self._scale
        self._kept = np.array([c.bytes for c, _ in pairs]) / self._scale
        self._work = np.array([c.work_bytes for c, _ in pairs]) / self._scale
        self._there = np.array([c.host_bytes for c, _ in pairs]) / self._scale
        self._host = host_bytes / self._scale
        gradients = np.array([stacks[i].gradient_bytes for _, i in pairs])
        self._made = gradients * self._layers / self._scale

    def seconds(self) -> float:
        """Return the least seconds; 0 where HiGHS has no bound."""
        zeros = np.zeros(len(self._pairs))
        seconds = np.array([choice.seconds for choice, _ in self._pairs])
        most: Any = np.concatenate([self._most, np.ones(3 * len(zeros))])
        found = milp(
            np.concatenate([seconds, zeros, zeros, zeros]),
            integrality=np.ones(4 * len(zeros)),
            bounds=Bounds(0.0, most),
            constraints=[*self._counts(), *self._phases()],
            options={"mip_rel_gap": _GAP, "time_limit": _SECONDS},
        )
        bound = found.mip_dual_bound
        return 0.0 if found.status not in (0, 1) or bound is None else max(0.0, bound)

    def _counts(self) -> list[LinearConstraint]:
        """All layers are in a run; of its parts there are two at least."""
        count = len(self._pairs)
        one, none = np.eye(count), np.zeros((count, count))
        all_layers = np.zeros((len(self.stacks), 4 * count))
        all_layers[self._of_stack, np.arange(count)] = self._layers
        depth: Any = np.array([layers.count for layers in self.stacks])
        ends = np.zeros((2, 4 * count))
        ends[0, 2 * count : 3 * count] = self._of_stack == 0
        ends[1, 3 * count :] = self._of_stack == len(self.stacks) - 1
        return [
            LinearConstraint(all_layers, depth, depth),
            _below(np.hstack([one, -np.diag(self._most), none, none])),
            _below(np.hstack([-one, np.diag(self._least), none, none])),
            _below(np.hstack([none, -one, one, none])),
            _below(np.hstack([none, -one, none, one])),
            LinearConstraint(ends, 1.0, 1.0),
        ]

    def _phases(self) -> list[LinearConstraint]:
        """Return what is held while a run is reversed, in any order of the runs."""
        zeros = np.zeros(len(self._pairs))
        first = self._work + self._least * self._kept
        last = self._work + self._least * self._made
        rows = [
            np.concatenate([self._kept, zeros, zeros, zeros]),
            np.concatenate([self._made, zeros, first, zeros]),
            np.concatenate([self._kept, zeros, zeros, last]),
        ]
        least = np.minimum(self._kept, self._made)
        for number, of_stack in enumerate(self._of_stack):
            held = np.where(self._of_stack < of_stack, self._kept, self._made)
            held = np.where(self._of_stack == of_stack, least, held)
            held[number] = self._kept[number] + self._made[number]
            work = zeros.copy()
            work[number] = self._work[number]
            rows.append(np.concatenate([held, work, zeros, zeros]))
        rows.append(np.concatenate([self._there, zeros, zeros, zeros]))
        limits: Any = np.full(len(rows), self._free)
        limits[0] -= self._head
        limits[-1] = self._host
        return [LinearConstraint(np.array(rows), -np.inf, limits)]


def _below(matrix: np.ndarray) -> LinearConstraint:
    """Return rows that are 0 at most."""
    return LinearConstraint(matrix, -np.inf, 0.0)
