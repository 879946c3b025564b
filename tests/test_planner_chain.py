"""Chains under a budget: brute force, revolve, the mixed optimum, equal layers."""

import random

import pytest

from jaxckpt.executor import mixed, simulate
from jaxckpt.planner.chain import (
    ChainSolver,
    KeepOption,
    Link,
    Option,
    ReverseNow,
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


def random_chain(rng):
    def link():
        options = tuple(
            Option(
                rng.randint(0, 9), rng.choice([0.0, rng.random()]), rng.randint(0, 4)
            )
            for _ in range(rng.randint(0, 3))
        )
        sizes = rng.randint(1, 6), rng.random() * 3, rng.randint(0, 8)
        return Link(*sizes, run_bytes=rng.randint(0, 3), options=options)

    links = [link() for _ in range(rng.randint(1, 7))]
    return [rng.choice(links) for _ in links] if rng.random() < 0.3 else links


def front(links, start, stop, known):
    """Return (peak bytes, seconds) of all ways that no other one beats."""
    if (start, stop) in known:
        return known[start, stop]
    link = links[start]
    if stop - start == 1:
        ways = {(link.work_bytes, 0.0)}
    else:
        ways = set()
        for option in link.options:
            work = max(link.run_bytes, option.work_bytes)
            for peak, seconds in front(links, start + 1, stop, known):
                ways.add((option.bytes + max(peak, work), seconds + option.seconds))
        for middle in range(start + 1, stop):
            part = links[start:middle]
            forward = sum(x.forward_seconds for x in part)
            running = max(x.run_bytes for x in part)
            for peak, seconds in front(links, middle, stop, known):
                for inner_peak, inner in front(links, start, middle, known):
                    outer = link.input_bytes + max(peak, running)
                    ways.add((max(outer, inner_peak), forward + seconds + inner))
    best, kept = float("inf"), []
    for peak, seconds in sorted(ways):
        if seconds < best:
            best = seconds
            kept.append((peak, seconds))
    known[start, stop] = kept
    return kept


def peak_and_seconds(links, decisions):
    """Walk through decisions; return what they hold at most, and their time."""
    held = peak = 0
    seconds = 0.0
    for one in decisions:
        if isinstance(one, ReverseNow):
            peak = max(peak, held + links[one.stage].work_bytes)
        elif isinstance(one, KeepOption):
            option = links[one.stage].options[one.option]
            work = max(links[one.stage].run_bytes, option.work_bytes)
            held += option.bytes
            peak, seconds = max(peak, held + work), seconds + option.seconds
        else:
            part = links[one.start : one.stop]
            inner, again = peak_and_seconds(links, one.children)
            peak = max(peak, held + inner)
            held += part[0].input_bytes
            peak = max(peak, held + max(x.run_bytes for x in part))
            seconds += again + sum(x.forward_seconds for x in part)
    return peak, seconds


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
            peak, seconds = peak_and_seconds(links, found.decisions)
            assert peak <= budget
            assert seconds == pytest.approx(found.seconds)


def test_rounded_sizes_stay_within_the_budget_and_above_the_bound():
    rng = random.Random(0)
    for _ in range(50):
        links = random_chain(rng)
        ways = front(links, 0, len(links), {})
        budget = rng.randint(ways[0][0], 2 * ways[-1][0])
        exact = min(seconds for peak, seconds in ways if peak <= budget)
        found = solve(links, budget, units=11)
        if found is not None:
            assert peak_and_seconds(links, found.decisions)[0] <= budget
            assert found.bound_seconds <= exact + 1e-9 <= found.seconds + 2e-9


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
