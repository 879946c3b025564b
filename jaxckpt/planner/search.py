"""The fastest plan whose predicted peak is no more than a goal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from jaxckpt import _jax
from jaxckpt.devices import Device, get_device, use
from jaxckpt.graph.gradient import is_inexact
from jaxckpt.memory import Prediction
from jaxckpt.plan import Plan
from jaxckpt.planner.links import LinkSolver
from jaxckpt.planner.loops import LoopSolver, Solved, Solver, WorkBytes
from jaxckpt.planner.program import PlannedStack, read_stacks
from jaxckpt.planner.target import Target
from jaxckpt.planner.work import work_bytes
from jaxckpt.schedule import full

_CLOSE = 0.004
"""A prediction by this share below the goal is close enough."""
_MOST_STEPS = 8


@dataclass(frozen=True)
class Found:
    """A plan within a goal.

    Attributes:
        plan: The plan.
        predicted_bytes: Its predicted peak.
        seconds: What runs again, by the planner's model.
    """

    plan: Plan
    predicted_bytes: int
    seconds: float


class Search:
    """Finds plans for a target: the planner's model, set right by the memory model.

    The planner counts what is kept, gradients and a constant for the work of a layer
    and of the head. What else there is comes from the prediction of whole steps: of the
    fully rematerialised one at first, then of each plan that was tried.

    Args:
        target: The step.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        device = _with_rates(target.device)
        with use(target.device):
            self.stacks = read_stacks(target.graph, device)
        self.least = target.uniform(full())
        prediction = target.predict(self.least)
        self._there = prediction.argument_bytes + self._other_gradients()
        work, head = self._works(prediction)
        self.solver = self._solver(work, head)
        self._offset = 0

    def plan(self, goal_bytes: int) -> Found | None:
        """Return the fastest plan of at most so many predicted bytes."""
        best: Found | None = None
        low, high = None, None
        free = goal_bytes - self._there - self._offset
        for _ in range(_MOST_STEPS):
            solved = self.solver.solve(max(0, free)) if free > 0 else None
            if solved is None:
                low = free
            else:
                found = self._found(solved)
                miss = found.predicted_bytes - goal_bytes
                self._offset = found.predicted_bytes - self._there - solved.peak_bytes
                if miss <= 0:
                    low = free
                    if best is None or found.seconds < best.seconds:
                        best = found
                    if miss > -_CLOSE * goal_bytes:
                        break
                else:
                    high = free
            following = goal_bytes - self._there - self._offset
            if (low is not None and following <= low) or (
                high is not None and following >= high
            ):
                if low is None or high is None:
                    break
                following = (low + high) // 2
            if high is not None and low is not None and high - low < _CLOSE * free / 4:
                break
            free = following
        return best

    def bound_seconds(self, goal_bytes: int) -> float | None:
        """Return less than what runs again in any plan of a goal, by the model."""
        solved = self.solver.solve(goal_bytes - self._there - self._offset)
        return None if solved is None else solved.bound_seconds

    def _found(self, solved: Solved) -> Found:
        plan = self.target.plan(solved.rules)
        peak = self.target.predict(plan).peak_bytes
        return Found(plan, peak, solved.seconds)

    def smallest(self) -> Iterator[Plan]:
        """Yield the plans of the fewest bytes, by the planner's model."""
        most = max(1, sum(self._most_of(stack) for stack in self.stacks))
        low, high = 0, 2 * most
        smallest = self.solver.solve(high)
        while smallest is not None and high - low > most // 2000:
            middle = (low + high) // 2
            solved = self.solver.solve(middle)
            if solved is None:
                low = middle
            else:
                smallest, high = solved, min(middle, solved.peak_bytes)
        if smallest is not None:
            yield self.target.plan(smallest.rules)
        yield self.least

    def _solver(self, work: int, head: int) -> Solver:
        if len(self.stacks) == 1 and not self.stacks[0].scanned:
            most = 2 * (self._most_of(self.stacks[0]) + work + head)
            return LinkSolver(self.stacks[0], work, head, most)
        return LoopSolver(self.stacks, self._loop_works(work), head)

    def _loop_works(self, work: int) -> dict[int, WorkBytes]:
        found: dict[int, WorkBytes] = {}
        for stack in self.stacks:
            for layer in stack.layers:
                if layer.kind not in found:
                    device = self.target.device
                    found[layer.kind] = (
                        work_bytes(layer, device) if stack.scanned else lambda _: work
                    )
        return found

    def _most_of(self, stack: PlannedStack) -> int:
        return sum(
            layer.input_bytes
            + layer.gradient_bytes
            + layer.costs.stage.bytes(layer.costs.stage.residuals)
            for layer in stack.layers
        )

    def _other_gradients(self) -> int:
        params = jax.tree.leaves(self.target.graph.args[0])
        total = sum(_jax.nbytes(jax.typeof(x)) for x in params if is_inexact(x))
        inside = sum(x.gradient_bytes for s in self.stacks for x in s.layers)
        return max(0, total - inside)

    def _works(self, prediction: Prediction) -> tuple[int, int]:
        """Return what the backward pass of a layer holds, and what the head does."""
        kept = sum(layer.input_bytes for s in self.stacks for layer in s.layers)
        gradients = sum(x.gradient_bytes for s in self.stacks for x in s.layers)
        phases = [phase.bytes for phase in prediction.phases]
        if len(phases) < 2 or not any(stack.scanned for stack in self.stacks):
            work = max(1, prediction.peak_bytes - self._there - kept)
            return work, work
        work = max(1, phases[-1] - self._there - kept - gradients)
        between = phases[1:-1] or [phases[-1]]
        return work, max(0, max(between) - self._there - kept)


def _with_rates(device: Device) -> Device:
    """Return a device with rates; those of an H100 where none are known."""
    if None in (device.peak_flops_per_second, device.memory_bytes_per_second):
        known = get_device("h100-80gb")
        return dataclasses.replace(known, name=device.name)
    return device
