"""The frontier of a stage: against brute force, and what it does with real layers."""

import random

import pytest
from helpers_planner import random_stage

from jaxckpt.planner.frontier import frontier


def brute_force(stage):
    """Return (bytes, seconds) of the choices that no other one beats."""
    count = len(stage.sizes)
    reads = [sum(1 << v for v in set(op.reads)) for op in stage.operations]
    writes = [sum(1 << v for v in op.writes) for op in stage.operations]
    residuals = sum(1 << v for v in stage.residuals)
    least = {}
    for saved in range(1 << count):
        wanted, seconds = residuals & ~saved, 0.0
        # Operations come after those that make what they read.
        for op, read, made in zip(
            reversed(stage.operations), reversed(reads), reversed(writes), strict=True
        ):
            if made & wanted:
                seconds += op.seconds
                wanted |= read & ~saved
        size = sum(stage.sizes[v] for v in range(count) if saved >> v & 1)
        least[size] = min(seconds, least.get(size, seconds))
    front, best = [], float("inf")
    for size in sorted(least):
        if least[size] < best - 1e-9:
            best = least[size]
            front.append((size, pytest.approx(best)))
    return front


@pytest.mark.parametrize("part", range(10))
def test_frontier_equals_brute_force(part):
    rng = random.Random(part)
    for _ in range(50):
        stage = random_stage(rng)
        points = frontier(stage)
        assert [(p.bytes, p.seconds) for p in points] == brute_force(stage)
        for point in points:
            assert stage.bytes(point.saved) == point.bytes
            assert stage.seconds(point.saved) == point.seconds
