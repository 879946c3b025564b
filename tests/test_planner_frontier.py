"""The frontier of a stage: against brute force, and what it does with real layers."""

import random

import pytest

from jaxckpt.planner.frontier import frontier
from jaxckpt.planner.stage import Operation, StageCosts


def random_stage(rng):
    """Return a stage of up to 12 values: views, joint results, several readers."""
    count = rng.randint(1, 12)
    sizes = tuple(rng.choice([1, 2, 4, 4, 8, rng.randint(1, 50)]) for _ in range(count))
    operations, made = [], 0
    while made < count:
        writes = tuple(range(made, min(count, made + rng.choice([1, 1, 1, 2]))))
        reads = tuple(rng.sample(range(made), min(made, rng.choice([0, 1, 1, 2]))))
        seconds = rng.choice([0.0, 1.0, 2.0, rng.uniform(0, 5)])
        operations.append(Operation(seconds, reads, writes))
        made += len(writes)
    residuals = rng.sample(range(count), rng.randint(0, count))
    return StageCosts(sizes, tuple(operations), frozenset(residuals))


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
