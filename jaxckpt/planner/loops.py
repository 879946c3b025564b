"""Plans for stacks in loops: runs of equal layers, by `jaxckpt.planner.runs`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, runtime_checkable

import numpy as np

from jaxckpt.planner.bound import least_seconds
from jaxckpt.planner.frontier import Point, frontier
from jaxckpt.planner.offload import HostLink, offloaded_points
from jaxckpt.planner.program import PlannedLayer, PlannedStack
from jaxckpt.planner.runs import (
    Choice,
    Layers,
    RunsAnswer,
    best_runs,
    more_runs,
    peak_bytes,
)
from jaxckpt.schedule import Schedule, tree
from jaxckpt.schedule_tree import Node, Remat, Segment, canonical

_MOST_TRIED = 2.5e7
_MOST_TRIED_OF_SEVERAL = 4e5
_FEWEST = 10
"""Choices are offered such that K^3 L^2 are tried, but not fewer than these."""
_MOST_IN_SEGMENT = 16
_NEAR = 0.02
"""Runs are near the bound where they take no more than this share longer."""
_MORE_RUNS = 4
_MORE_SECONDS = 3.0

WorkBytes = Callable[[Point], int]
"""The bytes that a layer's second run and backward pass hold, by what is kept."""


@dataclass(frozen=True)
class Solved:
    """The fastest schedules for some free bytes, by the planner's model.

    Attributes:
        rules: A schedule for each stack, by name.
        seconds: What runs again.
        peak_bytes: What they hold at once, besides what is there anyway.
    """

    rules: tuple[tuple[str, Schedule], ...]
    seconds: float
    peak_bytes: int


@runtime_checkable
class Solver(Protocol):
    """What finds the fastest schedules for an amount of free bytes."""

    def solve(self, free_bytes: int) -> Solved | None:
        """Return them; None where nothing fits."""
        ...

    def bound_seconds(self, free_bytes: int) -> float:
        """Return seconds that no schedules stay below, by the same model."""
        ...


@dataclass(frozen=True)
class _Offer:
    """A choice, the point that it keeps, and whether its layers are a segment."""

    choice: Choice
    point: Point
    segment: bool = False

    def nodes(self, layers: Sequence[PlannedLayer]) -> Iterator[Node]:
        """Yield the nodes of layers that take it."""
        size = self.choice.layers
        for start in range(0, len(layers), size):
            part = [
                Remat(layer.costs.policy(self.point.saved, self.point.offloaded), 1)
                for layer in layers[start : start + size]
            ]
            if self.segment:
                yield Segment(canonical(part))
            else:
                yield from part


class LoopSolver:
    """The best runs for stacks of equal layers.

    Args:
        stacks: The stacks of a program, in order.
        work_bytes: What the backward pass of a layer holds, by its kind.
        head_bytes: What the head holds besides what is kept.
        link: Over which kept values may go to host memory; None for none.
    """

    def __init__(
        self,
        stacks: Sequence[PlannedStack],
        work_bytes: Mapping[int, WorkBytes],
        head_bytes: int,
        link: HostLink | None = None,
    ) -> None:
        self._head = head_bytes
        self._host = 0 if link is None else link.budget_bytes
        self._names = [stack.name for stack in stacks]
        self._blocks = [
            (number, block)
            for number, stack in enumerate(stacks)
            for block in _blocks(stack)
        ]
        tried = _MOST_TRIED if len(self._blocks) == 1 else _MOST_TRIED_OF_SEVERAL
        self._offers = [
            _offers(block[0], len(block), work_bytes[block[0].kind], tried, link)
            for _, block in self._blocks
        ]
        self._layers = [
            Layers(
                len(block),
                tuple(offer.choice for offer in offers),
                block[0].gradient_bytes,
                min(2, len(block)),
                len(block) * block[0].joining_seconds,
            )
            for (_, block), offers in zip(self._blocks, self._offers, strict=True)
        ]

    def solve(self, free_bytes: int) -> Solved | None:
        """Return the fastest schedules, None where nothing fits."""
        answer = best_runs(self._layers, free_bytes, self._head, self._host)
        return None if answer is None else self._solved(answer)

    def solve_finer(self, free_bytes: int) -> Solved | None:
        """Return schedules of four runs of one stack, where they are faster by far.

        They are where hardly anything fits. It takes seconds to find them.
        """
        answer = best_runs(self._layers, free_bytes, self._head, self._host)
        near = (1 + _NEAR) * self.bound_seconds(free_bytes)
        if answer is None or len(self._layers) > 1 or answer.seconds <= near:
            return None
        (layers,) = self._layers
        layers = dataclasses.replace(layers, runs=_MORE_RUNS)
        more = more_runs([layers], free_bytes, self._head, self._host, _MORE_SECONDS)
        if more is None or more.seconds >= answer.seconds:
            return None
        return self._solved(more)

    def _solved(self, answer: RunsAnswer) -> Solved:
        nodes: list[list[Node]] = [[] for _ in self._names]
        of_block = zip(self._blocks, self._offers, answer.runs, strict=True)
        for (number, block), offers, runs in of_block:
            first = 0
            for run in runs:
                offer = offers[run.choice]
                stop = first + run.parts * offer.choice.layers
                nodes[number] += offer.nodes(block[first:stop])
                first = stop
        rules = tuple(
            (name, tree(*canonical(parts)))
            for name, parts in zip(self._names, nodes, strict=True)
        )
        peak = peak_bytes(self._layers, answer.runs, self._head)
        return Solved(rules, answer.seconds, peak)

    def bound_seconds(self, free_bytes: int) -> float:
        """Return what no schedules beat, in any order and any number of runs."""
        return least_seconds(self._layers, free_bytes, self._head, self._host)


def _blocks(stack: PlannedStack) -> list[list[PlannedLayer]]:
    """Return equal neighbours together."""
    groups = groupby(stack.layers, key=lambda layer: layer.kind)
    return [list(group) for _, group in groups]


def _offers(
    layer: PlannedLayer,
    count: int,
    work_bytes: WorkBytes,
    tried: float,
    link: HostLink | None,
) -> list[_Offer]:
    """Return what can become of layers, what hardly any budget uses left out."""
    points = frontier(layer.costs.stage)
    singles = [_single(layer, point, work_bytes) for point in points]
    most = max(_FEWEST, int((tried / count**2) ** (1 / 3)))
    moved = [
        _single(layer, variant, work_bytes)
        for point in points
        for variant in (offloaded_points(layer.costs, point, link) if link else ())
    ]
    share = most // 3 if moved else 2 * most // 3
    offers = _nearest(singles, lambda choice: choice.bytes, share)
    if moved:
        offers += _nearest(moved, lambda choice: choice.bytes, share)
    sizes = _segment_sizes(count)
    for size in sizes:
        segments = [_segment(layer, point, size, work_bytes) for point in points]
        share = max(1, most // 3 // len(sizes))
        offers += _nearest(segments, lambda choice: choice.work_bytes, share)
    return offers


def _segment_sizes(count: int) -> list[int]:
    """Return how many layers a segment may have: few, or such as to divide them all.

    Example:
        >>> _segment_sizes(30)
        [2, 3, 4, 5, 6, 10, 15]
    """
    most = min(count, _MOST_IN_SEGMENT)
    return [n for n in range(2, most + 1) if n <= 4 or count % n == 0]


def _single(layer: PlannedLayer, point: Point, work_bytes: WorkBytes) -> _Offer:
    kept = layer.input_bytes + point.bytes
    choice = Choice(kept, point.seconds, work_bytes(point), host_bytes=point.host_bytes)
    return _Offer(choice, point)


def _segment(
    layer: PlannedLayer, point: Point, size: int, work_bytes: WorkBytes
) -> _Offer:
    """Return a segment of layers that keep a point's values in their second run.

    Of the last layer only the input is needed where nothing is kept of it.
    """
    again = size if point.saved else size - 1
    seconds = again * layer.costs.forward_seconds + size * point.seconds
    inside = layer.input_bytes + point.bytes + layer.gradient_bytes
    work = work_bytes(point) + size * inside
    return _Offer(Choice(layer.input_bytes, seconds, work, size), point, segment=True)


def _nearest(
    offers: list[_Offer], size_of: Callable[[Choice], int], most: int
) -> list[_Offer]:
    """Return the offers nearest to the convex hull of sizes and seconds, in order.

    The ends of the hull always are among them.
    """
    pairs = [(float(size_of(o.choice)), o.choice.seconds) for o in offers]
    hull: list[tuple[float, float]] = []
    for pair in sorted(pairs):
        if hull and pair[1] >= hull[-1][1]:
            continue
        while len(hull) >= 2 and _above(hull[-2], hull[-1], pair):
            hull.pop()
        hull.append(pair)
    sizes, seconds = zip(*hull, strict=True)
    limits = np.interp([x for x, _ in pairs], sizes, seconds)
    excess = np.array([y for _, y in pairs]) - limits
    ends = [pairs.index(hull[0]), pairs.index(hull[-1])]
    excess[ends] = -1.0
    chosen = sorted(np.argsort(excess, kind="stable")[: max(most, 2)])
    return [offers[i] for i in chosen]


def _above(
    one: tuple[float, float], middle: tuple[float, float], other: tuple[float, float]
) -> bool:
    """Return whether the middle one of three points is above the others' line."""
    rise = (middle[1] - one[1]) * (other[0] - one[0])
    return rise >= (other[1] - one[1]) * (middle[0] - one[0])
