"""Kept values in host memory: which of a layer's, and what the host link costs.

In a loop XLA starts a copy to the host when the value is made and waits for it at the
end of the layer's body; on the way back it starts a load at the beginning of the body
and waits where the value is read (seen in programs for absent GPUs, jax 0.10.2). One
copy follows the other on the link. What is waited for is exposed:

    out    max(0, end of the last copy - end of the forward pass)
    back   max over values (end of the load - when it is read), from 0 on

with `end_i = max(end_(i-1), made_i) + bytes_i / rate`. The backward pass of an
operation takes twice its forward pass, in reverse order, behind what runs again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jaxckpt.planner.costs import LayerCosts
from jaxckpt.planner.frontier import Point

LEAST_BYTES = 2**20
"""Smaller values stay on the device: a copy of its own is not worth it."""
_BACKWARD = 2.0


@dataclass(frozen=True)
class HostLink:
    """What may go to host memory.

    Attributes:
        bytes_per_second: One way.
        budget_bytes: Of host memory that kept values may take.
    """

    bytes_per_second: float
    budget_bytes: int


def offloaded_points(costs: LayerCosts, point: Point, link: HostLink) -> list[Point]:
    """Return a point with the first 1, 2, ... names of its values in host memory.

    The first values of a layer have the longest time to leave, and are the last that
    the backward pass reads.

    Args:
        costs: Of the layer.
        point: What is kept.
        link: Over which values go.
    """
    by_name: dict[str, list[int]] = {}
    for value in sorted(point.saved):
        by_name.setdefault(costs.labels[value], []).append(value)
    sizes = costs.stage.sizes
    groups = [v for v in by_name.values() if sum(sizes[i] for i in v) >= LEAST_BYTES]
    times = _Times(costs, point)
    found = []
    for count in range(1, len(groups) + 1):
        moved = [value for group in groups[:count] for value in group]
        host = sum(sizes[v] for v in moved)
        exposed = times.exposed(moved, link.bytes_per_second)
        found.append(
            replace(
                point,
                bytes=point.bytes - host,
                seconds=point.seconds + exposed,
                offloaded=frozenset(moved),
                host_bytes=host,
            )
        )
    return found


class _Times:
    """When a layer makes its values, and when its backward pass reads them."""

    def __init__(self, costs: LayerCosts, point: Point) -> None:
        stage = costs.stage
        total = sum(op.seconds for op in stage.operations) or 1.0
        scale = costs.forward_seconds / total
        self._sizes = stage.sizes
        self._forward = costs.forward_seconds
        self._made: dict[int, float] = {}
        last_read: dict[int, float] = {}
        clock = 0.0
        for operation in stage.operations:
            clock += scale * operation.seconds
            self._made.update((v, clock) for v in operation.writes)
            last_read.update((v, clock) for v in operation.reads)
        again, clock = stage.run_again(point.saved), 0.0
        first_again: dict[int, float] = {}
        for number in sorted(again):
            operation = stage.operations[number]
            for value in operation.reads:
                first_again.setdefault(value, clock)
            clock += scale * operation.seconds
        self._read = {
            value: first_again.get(
                value,
                clock + _BACKWARD * (self._forward - last_read.get(value, made)),
            )
            for value, made in self._made.items()
        }

    def exposed(self, moved: Sequence[int], rate: float) -> float:
        """Return the seconds for which the device waits, both ways."""
        return self._out(moved, rate) + self._back(moved, rate)

    def _out(self, moved: Sequence[int], rate: float) -> float:
        order = sorted(moved, key=self._made.__getitem__)
        starts = [(value, self._made[value]) for value in order]
        ends = list(self._ends(starts, rate))
        return max(0.0, ends[-1] - self._forward)

    def _back(self, moved: Sequence[int], rate: float) -> float:
        order = sorted(moved, key=self._read.__getitem__)
        ends = self._ends([(value, 0.0) for value in order], rate)
        pairs = zip(order, ends, strict=True)
        return max(0.0, *(end - self._read[value] for value, end in pairs))

    def _ends(
        self, starts: Sequence[tuple[int, float]], rate: float
    ) -> Iterator[float]:
        clock = 0.0
        for value, ready in starts:
            clock = max(clock, ready) + self._sizes[value] / rate
            yield clock
