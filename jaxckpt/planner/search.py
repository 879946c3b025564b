"""The fastest plan whose predicted peak is no more than a goal."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax

from jaxckpt import _jax
from jaxckpt.devices import Device, get_device, use
from jaxckpt.errors import PlanError
from jaxckpt.graph.gradient import is_inexact
from jaxckpt.memory import Prediction
from jaxckpt.plan import Plan
from jaxckpt.planner.links import LinkSolver
from jaxckpt.planner.loops import LoopSolver, Solved, Solver, WorkBytes
from jaxckpt.planner.offload import HostLink
from jaxckpt.planner.program import PlannedStack, read_stacks
from jaxckpt.planner.target import Target
from jaxckpt.planner.work import work_bytes
from jaxckpt.schedule import full

_CLOSE = 0.004
"""A prediction by this share below the goal is close enough."""
_MOST_STEPS = 8
_FACTORS = (1.0, 1.04, 1.1)
"""Plans of the fewest bytes are looked for among those of so much more free bytes."""
_FAR = 1.06
"""Of them those are compiled that are predicted to be no larger than the least."""
_MOST_SMALLEST = 4
_MOST_UNROLLED = 24
"""Deeper stacks take too long to compile without loops."""


@dataclass(frozen=True)
class Found:
    """A plan within a goal.

    Attributes:
        plan: The plan.
        predicted_bytes: Its predicted peak.
        seconds: What runs again, by the planner's model.
        offset: By how much the prediction is above the planner's own count.
    """

    plan: Plan
    predicted_bytes: int
    seconds: float
    offset: int


class Search:
    """Finds plans for a target: the planner's model, set right by the memory model.

    The planner counts what is kept, gradients and a constant for the work of a layer
    and of the head. What else there is comes from the prediction of whole steps: of the
    fully rematerialised one at first, then of each plan that was tried.

    Args:
        target: The step.
        host_budget: Bytes of host memory that kept values may take.

    Raises:
        PlanError: There is such a budget, and no layers in a loop.
    """

    def __init__(self, target: Target, host_budget: int = 0) -> None:
        self.target = target
        device = _with_rates(target.device)
        self._link = _host_link(device, host_budget)
        with use(target.device):
            self.stacks = read_stacks(target.graph, device)
        if self._link is not None and not all(s.scanned for s in self.stacks):
            raise PlanError(
                "`host_budget` needs layers in a loop (`jax.lax.scan`, `nn.scan`): of "
                "layers one after another XLA leaves each copy to the host for the "
                "backward pass, so that nothing is saved on the device. Leave it out, "
                "or scan the layers."
            )
        self._full = target.uniform(full())
        prediction = target.predict(self._full)
        self._there = prediction.argument_bytes + self._other_gradients()
        work, head = self._works(prediction)
        self.solver = self._solver(work, head)

    def plan(self, goal_bytes: int) -> Found | None:
        """Return the fastest plan of at most so many predicted bytes."""
        best: Found | None = None
        seen: set[Any] = set()
        low, high = 0, None
        free = goal_bytes - self._there
        for _ in range(_MOST_STEPS):
            found = self._found(free)
            if found is not None and found.plan.rules in seen:
                break
            if found is None:
                low, following = free, free
            else:
                seen.add(found.plan.rules)
                following = goal_bytes - self._there - found.offset
                if found.predicted_bytes <= goal_bytes:
                    low = free
                    if best is None or found.seconds < best.seconds:
                        best = found
                    if found.predicted_bytes >= (1 - _CLOSE) * goal_bytes:
                        break
                else:
                    high = free
            if following <= low or (high is not None and following >= high):
                if high is None or high - low < _CLOSE * free / 4:
                    break
                following = (low + high) // 2
            free = following
        return best

    def bound_seconds(self, goal_bytes: int, like: Found) -> float:
        """Return less than what runs again in any plan of a goal, by the model.

        Args:
            goal_bytes: Predicted bytes.
            like: A plan that tells predictions and the model's bytes apart.
        """
        free = max(0, goal_bytes - self._there - like.offset)
        return min(like.seconds, self.solver.bound_seconds(free))

    def smallest(self) -> list[Found]:
        """Return plans of the fewest bytes, the fewest predicted ones first.

        They depend on the program alone, not on a budget.
        """
        least = self._least_free()
        amounts = [round(least * factor) for factor in _FACTORS]
        tried = [self._found(free) for free in amounts]
        tried += [self._finer(free) for free in amounts]
        found = {f.plan.rules: f for f in tried if f is not None}
        full_ones = [self._full]
        if any(stack.scanned for stack in self.stacks):
            full_ones.append(self.target.uniform(full(), "scan"))
            full_ones += self.without_loops(self._full)
        peaks = [self.target.predict(plan).peak_bytes for plan in full_ones]
        pairs = zip(full_ones, peaks, strict=True)
        ones = [Found(plan, peak, math.inf, 0) for plan, peak in pairs]
        order = sorted([*found.values(), *ones], key=lambda f: f.predicted_bytes)
        limit = _FAR * order[0].predicted_bytes
        return [f for f in order if f.predicted_bytes <= limit][:_MOST_SMALLEST]

    def without_loops(self, plan: Plan) -> list[Plan]:
        """Return plans for the same stacks without loops, where they are not deep."""
        scanned = any(stack.scanned for stack in self.stacks)
        if not scanned or sum(len(s.layers) for s in self.stacks) > _MOST_UNROLLED:
            return []
        return [self.target.plan(plan.rules, "unrolled")]

    def least(self) -> Found:
        """Return the plan of the fewest bytes by the planner's model."""
        found = self._found(self._least_free())
        assert found is not None
        return found

    def _least_free(self) -> int:
        """Return the fewest free bytes for which the planner has an answer."""
        low, high = 0, self.most_free_bytes
        while self.solver.solve(high) is None:
            low, high = high, 2 * high
        while high - low > high / 1000:
            middle = (low + high) // 2
            low, high = (
                (middle, high) if self.solver.solve(middle) is None else (low, middle)
            )
        return high

    @property
    def most_free_bytes(self) -> int:
        """More than any plan has use for."""
        return 2 * max(1, sum(map(self._most_of, self.stacks)))

    def _found(self, free_bytes: int) -> Found | None:
        solved = self.solver.solve(free_bytes) if free_bytes > 0 else None
        return None if solved is None else self.found(solved)

    def _finer(self, free_bytes: int) -> Found | None:
        if not isinstance(self.solver, LoopSolver):
            return None
        solved = self.solver.solve_finer(free_bytes)
        return None if solved is None else self.found(solved)

    def found(self, solved: Solved) -> Found:
        """Return what the planner's model found as a plan, predicted."""
        plan = self.target.plan(solved.rules)
        peak = self.target.predict(plan).peak_bytes
        offset = peak - self._there - solved.peak_bytes
        return Found(plan, peak, solved.seconds, offset)

    def _solver(self, work: int, head: int) -> Solver:
        if len(self.stacks) == 1 and not self.stacks[0].scanned:
            most = 2 * (self._most_of(self.stacks[0]) + work + head)
            return LinkSolver(self.stacks[0], work, head, most)
        works = self._loop_works(work)
        return LoopSolver(self.stacks, works, head, self._link)

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


def _host_link(device: Device, budget: int) -> HostLink | None:
    rate = device.host_link_bytes_per_second
    return HostLink(rate, budget) if rate and budget else None


def _with_rates(device: Device) -> Device:
    """Return a device with rates; those of an H100 where none are known."""
    if not device.has_rates:
        known = get_device("h100-80gb")
        return dataclasses.replace(known, name=device.name)
    return device
