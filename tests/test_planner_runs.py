"""Runs of equal layers: against all sequences of runs, within budgets, bounded."""

import functools
import itertools
import random

import pytest

from jaxckpt.planner.bound import least_seconds
from jaxckpt.planner.runs import (
    Choice,
    Layers,
    Taken,
    best_runs,
    peak_bytes,
)

CLOSE = 1e-5
"""Answers in fewer runs are preferred to ones that are faster by less than this."""


def random_choice(rng, scale):
    """Return a choice of one layer, or a segment of two."""
    seconds = rng.choice([0.0, 1.0, 2.0, 5.0 * rng.random()])
    sizes = (rng.randint(0, 9) * scale, rng.randint(0, 12) * scale)
    return Choice(sizes[0], seconds, sizes[1], layers=rng.choice([1, 1, 1, 2]))


def random_layers(rng, count, choices, scale=1, runs=2):
    """Return a stack; half of all have gradients to hold, and to join."""
    picked = tuple(random_choice(rng, scale) for _ in range(rng.randint(1, choices)))
    gradient = rng.choice([0, rng.randint(0, 4)]) * scale
    joining = rng.choice([0.0, rng.random()])
    return Layers(rng.randint(1, count), picked, gradient, runs, joining)


def sequences(layers, runs):
    """Return all ways to share layers among runs.

    A run has two parts at least, where there are so many; and no two runs take one
    choice.
    """
    return list(_sequences(layers, layers.count, runs, ()))


def _sequences(layers, left, runs, taken):
    if not left:
        yield ()
    elif runs:
        for number, choice in enumerate(layers.choices):
            least = min(2, layers.count // choice.layers)
            for parts in range(max(1, least), left // choice.layers + 1):
                if number not in taken:
                    behind = left - parts * choice.layers
                    rest = _sequences(layers, behind, runs - 1, (*taken, number))
                    yield from ((Taken(number, parts), *others) for others in rest)


def walk(stacks, runs, head_bytes):
    """Return the most bytes held, by going through a step run by run."""
    path = [
        (layers.choices[taken.choice], taken.parts, layers.gradient_bytes)
        for layers, of_stack in zip(stacks, runs, strict=True)
        for taken in of_stack
    ]
    kept, gradients = 0, 0
    for choice, parts, _ in path:
        kept += parts * choice.bytes
    peak = kept + head_bytes
    for choice, parts, gradient in reversed(path):
        gradients += parts * choice.layers * gradient
        peak = max(peak, kept + gradients + choice.work_bytes)
        kept -= parts * choice.bytes
    return peak


def seconds_of(stacks, runs):
    total = 0.0
    for layers, of_stack in zip(stacks, runs, strict=True):
        total += sum(t.parts * layers.choices[t.choice].seconds for t in of_stack)
        total += layers.joining_seconds * (len(of_stack) > 1)
    return total


def layers_of(layers, of_stack):
    return sum(t.parts * layers.choices[t.choice].layers for t in of_stack)


def check_against_all(stacks, ways, head_bytes, rng, tolerance, around=(-1, 0)):
    """Compare `best_runs` to all ways, for budgets around some of their peaks."""
    pairs = [(walk(stacks, w, head_bytes), seconds_of(stacks, w)) for w in ways]
    peaks = sorted({peak for peak, _ in pairs})
    some = rng.sample(peaks, min(3, len(peaks)))
    budgets = {peak + more for peak in some for more in around}
    before = float("inf")
    for budget in sorted(budgets):
        wanted = min((s for peak, s in pairs if peak <= budget), default=None)
        found = best_runs(stacks, budget, head_bytes)
        if wanted is None:
            assert found is None
            continue
        assert found is not None
        assert found.seconds == pytest.approx(seconds_of(stacks, found.runs))
        assert found.seconds == pytest.approx(wanted, rel=tolerance, abs=1e-9)
        assert found.seconds <= before * (1 + tolerance)
        assert walk(stacks, found.runs, head_bytes) <= budget
        for layers, of_stack in zip(stacks, found.runs, strict=True):
            assert layers_of(layers, of_stack) == layers.count
        before = found.seconds


@pytest.mark.parametrize("part", range(10))
def test_best_runs_equal_the_best_of_all_sequences(part):
    """Hazard 14: 1000 instances in all; never over budget, no rise with the budget."""
    rng = random.Random(part)
    for _ in range(100):
        layers = random_layers(rng, count=7, choices=4, scale=rng.choice([1, 2**30]))
        ways = [(way,) for way in sequences(layers, runs=3)]
        head = rng.choice([0, rng.randint(0, 20)])
        if ways:
            check_against_all([layers], ways, head, rng, CLOSE)
        else:
            assert best_runs([layers], 2**40, head) is None


@pytest.mark.parametrize("part", range(4))
def test_two_stacks_equal_the_best_of_all_sequences(part):
    rng = random.Random(part)
    for _ in range(8):
        # Of even sizes, so that no peak is just an odd budget: HiGHS leaves a little of
        # it free, and stops at a gap of 2e-4 of the cost.
        stacks = [random_layers(rng, count=5, choices=3, scale=2) for _ in range(2)]
        ways = list(itertools.product(*(sequences(s, s.runs) for s in stacks)))
        if ways:
            head = 2 * rng.randint(0, 9)
            check_against_all(stacks, ways, head, rng, 1e-3, around=(-1, 1))


@pytest.mark.parametrize("runs", [2, 3])
def test_peak_of_runs_is_that_of_going_through_the_step(runs):
    rng = random.Random(runs)
    for _ in range(200):
        stacks = [random_layers(rng, 6, 3) for _ in range(rng.randint(1, 3))]
        ways = [sequences(layers, runs) for layers in stacks]
        if all(ways):
            chosen = [rng.choice(of_stack) for of_stack in ways]
            head = rng.randint(0, 20)
            assert peak_bytes(stacks, chosen, head) == walk(stacks, chosen, head)


@pytest.mark.parametrize("part", range(8))
def test_bound_is_below_every_sequence_of_runs(part):
    """No sequence of any number of runs is faster, and most often one is as fast."""
    rng = random.Random(part)
    tight, compared = 0, 0
    for _ in range(20):
        stacks = [random_layers(rng, 6, 3) for _ in range(1 + part % 2)]
        head = rng.randint(0, 20)
        pairs = [
            (walk(stacks, way, head), seconds_of(stacks, way))
            for way in itertools.product(*(sequences(s, runs=6) for s in stacks))
        ]
        for budget in {rng.choice(pairs)[0] for _ in range(3) if pairs}:
            fastest = min(seconds for peak, seconds in pairs if peak <= budget)
            found = least_seconds(stacks, budget, head)
            assert 0.0 <= found <= fastest + 1e-6
            compared += 1
            tight += found >= fastest * (1 - 1e-2)
    assert tight >= 0.5 * compared > 0


def test_deep_stacks_are_planned_at_once():
    """126 layers, as of the largest Llama, and so many choices as are offered then."""
    choices = tuple(
        Choice(2**20 * n, 1e-3 * (30 - n) ** 1.5, 2**24 - 2**18 * n)
        for n in range(0, 31, 3)
    )
    layers = Layers(126, choices, gradient_bytes=2**22)
    solve = functools.partial(best_runs, [layers])
    answers = [solve(2**20 * mib) for mib in (700, 1500, 2500, 3800)]
    seconds = [answer.seconds for answer in answers]
    assert seconds == sorted(seconds, reverse=True) and len(set(seconds)) == 4
    for mib, answer in zip((700, 1500, 2500, 3800), answers, strict=True):
        assert walk([layers], answer.runs, 0) <= 2**20 * mib


def test_large_sizes_of_two_stacks_stay_within_budget():
    """Bytes of real programs, budgets one byte below what an answer needs."""
    rng = random.Random(0)
    for _ in range(10):
        stacks = [random_layers(rng, 6, 4, scale=123_456_789) for _ in range(2)]
        budget = 2**40
        for _ in range(4):
            found = best_runs(stacks, budget)
            if found is None:
                break
            peak = walk(stacks, found.runs, 0)
            assert peak <= budget
            budget = peak - 1
