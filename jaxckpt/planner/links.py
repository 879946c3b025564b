"""Plans for layers that stand one after another, by `jaxckpt.planner.chain`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxckpt.planner.chain import (
    ChainSolver,
    Decision,
    KeepOption,
    Link,
    Option,
    ReverseNow,
)
from jaxckpt.planner.frontier import Point, frontier
from jaxckpt.planner.loops import Solved
from jaxckpt.planner.program import PlannedLayer, PlannedStack
from jaxckpt.schedule import tree
from jaxckpt.schedule_tree import Keep, Node, Remat, Segment


class LinkSolver:
    """The best nested schedule for a stack whose layers may differ.

    Args:
        stack: The stack.
        work_bytes: What the backward pass of one layer holds besides its residuals.
        head_bytes: What the head holds besides what is kept.
        most_bytes: The largest amount that is asked about.
    """

    def __init__(
        self, stack: PlannedStack, work_bytes: int, head_bytes: int, most_bytes: int
    ) -> None:
        self._stack = stack
        links = [_link(layer, work_bytes) for layer in stack.layers]
        head = Link(0, 0.0, head_bytes)
        self._most = most_bytes
        self._solver = ChainSolver([*links, head], most_bytes)

    def solve(self, free_bytes: int) -> Solved | None:
        """Return the fastest schedule, None where nothing fits."""
        answer = self._solver.solve(min(free_bytes, self._most))
        if answer is None:
            return None
        nodes = tuple(self._nodes(answer.decisions))
        rules = ((self._stack.name, tree(*nodes)),)
        return Solved(rules, answer.seconds, answer.peak_bytes)

    def bound_seconds(self, free_bytes: int) -> float:
        """Return seconds that no nested schedule stays below."""
        answer = self._solver.solve(min(free_bytes, self._most))
        return 0.0 if answer is None else answer.bound_seconds

    def _nodes(self, decisions: Iterable[Decision]) -> Iterator[Node]:
        count = len(self._stack.layers)
        for decision in decisions:
            if isinstance(decision, ReverseNow):
                if decision.stage < count:
                    yield Keep(1)
            elif isinstance(decision, KeepOption):
                layer = self._stack.layers[decision.stage]
                point = frontier(layer.costs.stage)[decision.option]
                yield Remat(layer.costs.policy(point.saved), 1)
            else:
                yield Segment(tuple(self._nodes(decision.children)))


def _link(layer: PlannedLayer, work_bytes: int) -> Link:
    stage = layer.costs.stage
    residuals = stage.bytes(stage.residuals)
    options = tuple(_option(layer, point, work_bytes) for point in frontier(stage))
    return Link(
        layer.input_bytes,
        layer.costs.forward_seconds,
        layer.input_bytes + residuals + layer.gradient_bytes,
        options=options,
        gradient_bytes=layer.gradient_bytes,
    )


def _option(layer: PlannedLayer, point: Point, work_bytes: int) -> Option:
    kept = layer.input_bytes + point.bytes
    return Option(kept, point.seconds, work_bytes + layer.gradient_bytes)
