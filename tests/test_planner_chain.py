"""Chains under a budget: brute force, revolve, the mixed optimum, rounding, gaps."""

import itertools
import random
import time

import pytest

from jaxckpt.executor import mixed, simulate
from jaxckpt.planner.chain import (
    ChainSolver,
    KeepOption,
    Link,
    Option,
    RunAgain,
)
from jaxckpt.schedule_rules import advances


def solve(links, budget, **settings):
    return ChainSolver(links, budget, **settings).solve(budget)


STATE = Link(input_bytes=1, forward_seconds=1.0, work_bytes=0)
EITHER = Link(1, 1.0, 0, options=(Option(bytes=1, seconds=0.0),))


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("steps", [1, 2, 7, 10, 24, 64])
def test_without_options_it_is_revolve(steps, slots):
    found = solve([STATE] * steps, slots)
    assert found.seconds == found.bound_seconds == advances(steps, slots)


@pytest.mark.parametrize(
    ("steps", "slots"), [(12, 4), (24, 8), (32, 8), (48, 12), (96, 24), (100, 5)]
)
def test_with_tapes_of_a_states_size_it_is_the_mixed_optimum(steps, slots):
    found = solve([EITHER] * steps, slots)
    assert steps + found.seconds == simulate(mixed(steps, slots)).forwards


def random_chain(rng, scale=1):
    """Return up to 7 stages; a third of all chains have gradients to hold."""
    gradients = rng.random() < 0.3

    def size(least, most):
        return rng.randint(least * scale, most * scale)

    def option():
        return Option(size(0, 9), rng.choice([0.0, rng.random()]), size(0, 4))

    def link():
        options = tuple(option() for _ in range(rng.randint(0, 3)))
        sizes = size(1, 6), rng.random() * 3, size(0, 8), size(0, 3)
        return Link(*sizes, options, gradient_bytes=size(0, 4) if gradients else 0)

    links = [link() for _ in range(rng.randint(1, 7))]
    return [rng.choice(links) for _ in links] if rng.random() < 0.3 else links


def front(links, start, stop, known):
    """Return (peak bytes, seconds) of all ways that no other one beats."""
    if (start, stop) in known:
        return known[start, stop]

    def behind(first):
        return sum(link.gradient_bytes for link in links[first:stop])

    link = links[start]
    if stop - start == 1:
        ways = {(max(link.work_bytes, link.gradient_bytes), 0.0)}
    else:
        ways = set()
        for option in link.options:
            reversing = max(option.work_bytes, link.gradient_bytes) + behind(start + 1)
            work = max(link.run_bytes, reversing)
            for peak, seconds in front(links, start + 1, stop, known):
                ways.add((option.bytes + max(peak, work), seconds + option.seconds))
        for middle in range(start + 1, stop):
            part = links[start:middle]
            forward = sum(x.forward_seconds for x in part)
            running = max(x.run_bytes for x in part)
            for peak, seconds in front(links, middle, stop, known):
                for inner_peak, inner in front(links, start, middle, known):
                    outer = link.input_bytes + max(peak, running)
                    most = max(outer, inner_peak + behind(middle))
                    ways.add((most, forward + seconds + inner))
    best, kept = float("inf"), []
    for peak, seconds in sorted(ways):
        if seconds < best:
            best = seconds
            kept.append((peak, seconds))
    known[start, stop] = kept
    return kept


class Walk:
    """What decisions hold, step by step in time: `peak` bytes, and extra `seconds`."""

    def __init__(self, links, decisions):
        self.links, self.held, self.peak, self.seconds = links, 0, 0, 0.0
        self.run(decisions)
        assert self.held == sum(link.gradient_bytes for link in links)

    def run(self, decisions):
        for one in decisions[:-1]:
            self.forward(one)
        self.reverse(decisions[-1].stage, self.links[decisions[-1].stage].work_bytes)
        for one in reversed(decisions[:-1]):
            self.backward(one)

    def needs(self, size):
        self.peak = max(self.peak, self.held + size)

    def forward(self, one):
        if isinstance(one, KeepOption):
            link = self.links[one.stage]
            self.held += link.options[one.option].bytes
            self.needs(link.run_bytes)
        else:
            part = self.links[one.start : one.stop]
            self.held += part[0].input_bytes
            self.needs(max(link.run_bytes for link in part))

    def reverse(self, stage, work):
        self.needs(max(work, self.links[stage].gradient_bytes))
        self.held += self.links[stage].gradient_bytes

    def backward(self, one):
        if isinstance(one, KeepOption):
            option = self.links[one.stage].options[one.option]
            self.reverse(one.stage, option.work_bytes)
            self.held -= option.bytes
            self.seconds += option.seconds
        else:
            part = self.links[one.start : one.stop]
            self.held -= part[0].input_bytes
            self.seconds += sum(link.forward_seconds for link in part)
            self.run(one.children)


@pytest.mark.parametrize("part", range(10))
def test_answers_equal_brute_force_and_keep_the_budget(part):
    rng = random.Random(part)
    for _ in range(100):
        links = random_chain(rng)
        ways = front(links, 0, len(links), {})
        before, solver = float("inf"), ChainSolver(links, ways[-1][0] + 2)
        assert solver.least_bytes == ways[0][0]
        for budget in range(ways[-1][0] + 3):
            found = solver.solve(budget)
            fitting = [seconds for peak, seconds in ways if peak <= budget]
            if not fitting:
                assert found is None
                continue
            assert found.seconds == pytest.approx(min(fitting))
            assert found.seconds <= before
            before = found.seconds
            walk = Walk(links, found.decisions)
            assert walk.peak == found.peak_bytes <= budget
            assert walk.seconds == pytest.approx(found.seconds)


@pytest.mark.parametrize("part", range(10))
def test_rounded_sizes_stay_within_the_budget_and_above_the_bound(part):
    rng = random.Random(part)
    for _ in range(20):
        links = random_chain(rng, scale=1000)
        ways = front(links, 0, len(links), {})
        most = ways[-1][0] + 5000
        solver = ChainSolver(links, most, units=rng.choice([11, 60, 300]))
        before = float("inf")
        for budget in sorted(rng.randrange(most + 1) for _ in range(30)):
            found = solver.solve(budget)
            least = solver.least_bytes
            assert (found is None) == (least is None or budget < least)
            if found is None:
                continue
            exact = min(seconds for peak, seconds in ways if peak <= budget)
            assert found.bound_seconds <= exact + 1e-9 <= found.seconds + 2e-9
            assert found.seconds <= before
            before = found.seconds
            walk = Walk(links, found.decisions)
            assert walk.peak == found.peak_bytes <= budget
            assert walk.seconds == pytest.approx(found.seconds)


def test_solvers_for_other_budgets_agree_as_far_as_rounding_allows():
    rng = random.Random(0)
    for _ in range(50):
        links = random_chain(rng, scale=1000)
        most = front(links, 0, len(links), {})[-1][0] + 5000
        budgets = sorted(rng.randint(most // 20, most) for _ in range(6))
        solvers = [ChainSolver(links, budget, units=80) for budget in budgets]
        answers = [x.solve(b) for x, b in zip(solvers, budgets, strict=True)]
        pairs = list(zip(solvers, answers, strict=True))
        for (small, slow), (large, fast) in itertools.combinations(pairs, 2):
            if slow is not None and fast is not None:
                assert fast.bound_seconds <= slow.seconds
            if small.grain_bytes == large.grain_bytes and slow is not None:
                assert fast.seconds <= slow.seconds


def test_no_gap_where_sizes_are_few_multiples_of_a_large_one():
    rng = random.Random(1)
    for _ in range(20):
        links = random_chain(rng)

        def times(size):
            return size * 2**20

        larger = [
            Link(
                times(link.input_bytes),
                link.forward_seconds,
                times(link.work_bytes),
                times(link.run_bytes),
                tuple(
                    Option(times(o.bytes), o.seconds, times(o.work_bytes))
                    for o in link.options
                ),
                times(link.gradient_bytes),
            )
            for link in links
        ]
        solver = ChainSolver(larger, times(100))
        exact = ChainSolver(links, 99)
        for budget in range(100):
            found, wanted = solver.solve(times(budget) + 9), exact.solve(budget)
            if wanted is None:
                assert found is None
            else:
                assert found.seconds == found.bound_seconds == wanted.seconds


def transformer_layer(rng, options, gradients=0):
    """Return a layer of odd sizes: residuals of 17 inputs and more, a convex front."""
    input_bytes = rng.randint(64 * 2**20, 256 * 2**20)
    residuals = input_bytes * rng.uniform(17, 50)
    forward, bend = rng.uniform(0.005, 0.03), rng.uniform(1.5, 4)
    places = sorted(rng.uniform(0, 1) for _ in range(options - 1))
    front = tuple(
        Option(
            int(input_bytes + place * residuals),
            forward * (1 - place) ** bend,
            int(rng.uniform(0.2, 0.5) * residuals),
        )
        for place in [*places, 1.0]
    )
    work = int(1.2 * residuals)
    return Link(input_bytes, forward, work, input_bytes * 3, front, gradients)


def gaps(links):
    """Return the gaps at budgets from 90 % to 20 % of everything, in steps' times."""
    kept = sum(max(o.bytes for o in x.options) + x.gradient_bytes for x in links)
    everything = kept + max(link.work_bytes for link in links)
    solver = ChainSolver(links, everything)
    forward = sum(link.forward_seconds for link in links)
    for percent in (90, 70, 50, 30, 20):
        budget = everything * percent // 100
        for found in (solver.solve(budget), ChainSolver(links, budget).solve(budget)):
            assert Walk(links, found.decisions).peak <= budget
            yield (found.seconds - found.bound_seconds) / (3 * forward + found.seconds)


@pytest.mark.parametrize("gradients", [0, 123_456_789])
@pytest.mark.parametrize("options", [20, 60])
@pytest.mark.parametrize("count", [16, 32, 128])
def test_equal_layers_are_solved_nearly_to_the_bound(count, options, gradients):
    layer = transformer_layer(random.Random(count), options, gradients)
    assert max(gaps([layer] * count)) < 0.01


def test_128_equal_layers_take_less_than_a_second():
    layer = transformer_layer(random.Random(0), 60)
    budget = 64 * max(option.bytes for option in layer.options)
    start = time.process_time()
    assert solve([layer] * 128, budget) is not None
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    "count", [24, pytest.param(128, marks=pytest.mark.slow)], ids=str
)
def test_different_layers_are_solved_nearly_to_the_bound(count):
    rng = random.Random(count)
    layers = [transformer_layer(rng, rng.randint(15, 30)) for _ in range(count)]
    assert max(gaps(layers)) < 0.02


def test_a_budget_above_what_a_solver_was_built_for_is_an_error():
    with pytest.raises(ValueError, match="`budget_bytes=5` is above `most_bytes=4`"):
        ChainSolver([STATE], 4).solve(5)


def test_all_stages_are_decided_once_and_in_order():
    def stages(decisions):
        for one in decisions:
            if isinstance(one, RunAgain):
                inner = list(stages(one.children))
                assert inner == list(range(one.start, one.stop))
                yield from inner
            else:
                yield one.stage

    found = solve([EITHER] * 40, 6)
    assert list(stages(found.decisions)) == list(range(40))
