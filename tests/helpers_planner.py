"""What tests of the planner share."""

from jaxckpt.planner.stage import Operation, StageCosts


def random_stage(rng, *, most=12, fewest_residuals=0):
    """Return a stage of up to so many values: views, joint results, several readers."""
    count = rng.randint(1, most)
    sizes = tuple(rng.choice([1, 2, 4, 4, 8, rng.randint(1, 50)]) for _ in range(count))
    operations, made = [], 0
    while made < count:
        writes = tuple(range(made, min(count, made + rng.choice([1, 1, 1, 2]))))
        reads = tuple(rng.sample(range(made), min(made, rng.choice([0, 1, 1, 2]))))
        seconds = rng.choice([0.0, 1.0, 2.0, rng.uniform(0, 5)])
        operations.append(Operation(seconds, reads, writes))
        made += len(writes)
    residuals = rng.sample(range(count), rng.randint(fewest_residuals, count))
    return StageCosts(sizes, tuple(operations), frozenset(residuals))
