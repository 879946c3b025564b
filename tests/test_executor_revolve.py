"""Generated lists: optimal by papers and brute force, and equal to schedules."""

import random

import pytest
from helpers import SCHEDULES
from helpers_executor import Symbolic, least_cost, random_actions

import jaxckpt
from jaxckpt.errors import ScheduleError
from jaxckpt.executor.actions import ActionList, Drop, Keep, Load, Reverse
from jaxckpt.executor.build import simplified
from jaxckpt.executor.from_schedule import actions_from
from jaxckpt.executor.revolve import binomial, mixed, two_level
from jaxckpt.executor.simulate import simulate
from jaxckpt.plan import Plan
from jaxckpt.policy import save, save_everything
from jaxckpt.schedule import Remat, Segment, every, tree
from jaxckpt.schedule_rules import advances

INF, NAN = float("inf"), float("nan")
DEPTHS = 1, 2, 3, 7, 16, 33, 64
SLOTS = 1, 2, 3, 5, 8, 16


def picture(actions):
    """Return a picture below its title."""
    return actions.draw().split("\n", 1)[1]


# --- Optima --------------------------------------------------------------------------


@pytest.mark.parametrize("slots", range(1, 17))
def test_binomial_takes_the_forwards_of_revolve_and_no_more_slots(slots):
    for steps in range(1 + slots % 3, 65, 3):
        actions = binomial(steps, slots)
        record = simulate(actions)
        assert record.forwards == steps + advances(steps, slots)
        assert record.peak_slots == min(slots, steps - 1)
        assert dict(actions.slots) == {"device": slots}


@pytest.mark.parametrize("slots", range(1, 17))
def test_mixed_takes_no_more_than_binomial_and_each_forward_once_if_it_can(slots):
    for steps in range(1 + slots % 3, 65, 3):
        record = simulate(mixed(steps, slots))
        assert record.peak_slots <= slots
        assert steps <= record.forwards <= steps + advances(steps, slots)
        assert (record.forwards == steps) == (slots >= steps - 1)


@pytest.mark.parametrize(
    ("steps", "slots", "by_states", "by_both"),
    [(12, 4, 30, 21), (24, 8, 62, 41), (32, 8, 86, 59), (48, 12, 130, 87),
     (96, 24, 262, 171), (100, 5, 416, 352), (100, 10, 322, 237), (250, 25, 723, 486)],
)  # fmt: skip
def test_binomial_and_mixed_give_the_published_numbers(
    steps, slots, by_states, by_both
):
    assert simulate(binomial(steps, slots)).forwards == by_states
    assert simulate(mixed(steps, slots)).forwards == by_both


@pytest.mark.parametrize(
    ("steps", "device", "host", "cost"),
    [(10, 1, 2, 46), (20, 2, 3, 90), (50, 3, 5, 230), (100, 5, 10, 442),
     (20, 2, None, 90), (50, 3, None, 225), (100, 5, None, 433)],
)  # fmt: skip
def test_two_level_gives_the_published_numbers(steps, device, host, cost):
    actions = two_level(steps, device, host, write=2.0, read=2.0)
    record = simulate(actions)
    assert record.cost == cost
    assert dict(actions.slots).get("host") == host
    assert record.peak_slots <= device
    assert host is None or record.peak_slots_in["host"] <= host


@pytest.mark.parametrize(("device", "host"), [(0, 1), (1, 0), (2, 3), (16, 2), (3, 16)])
def test_two_level_lists_are_legal_and_cost_what_they_say_for_any_depth(device, host):
    for steps in range(1, 65, 3):
        record = simulate(two_level(steps, device, host, 1.5, 0.5))
        on_device = steps * 2 + advances(steps, device) if device else INF
        assert record.cost <= on_device
        if not host:
            assert record.cost == on_device and record.writes == record.reads == 0


def test_two_level_without_costs_of_its_storage_is_binomial_in_all_slots():
    for steps in range(1, 40):
        record = simulate(two_level(steps, 2, 3, 0.0, 0.0, backward=0.0))
        assert record.cost == steps + advances(steps, 5)


def test_two_level_uses_the_costs_of_a_stage():
    cheap = simulate(two_level(30, 2, 4, 4.0, 4.0, forward=2.0, backward=6.0))
    assert cheap.cost == 2 * simulate(two_level(30, 2, 4, 2.0, 2.0, backward=3.0)).cost


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("steps", range(1, 8))
def test_brute_force_finds_nothing_better_on_one_storage(steps, slots):
    best = least_cost(steps, slots, backward=0.0)
    assert simulate(binomial(steps, slots)).forwards == best
    best = least_cost(steps, slots, backward=0.0, tapes=True)
    assert simulate(mixed(steps, slots)).forwards == best


@pytest.mark.parametrize(
    ("write", "read"), [(0, 0), (2, 2), (0.3, 0.7), (0, 3), (3, 0)]
)
@pytest.mark.parametrize("steps", range(2, 8))
def test_brute_force_finds_nothing_better_on_two_storages(steps, write, read):
    for device, host in [(0, 1), (1, 1), (0, 2), (1, 2), (2, 1), (1, None)]:
        best = least_cost(steps, device, host or steps, write=write, read=read)
        found = simulate(two_level(steps, device, host, write, read)).cost
        assert found == pytest.approx(best)


def test_lists_as_long_as_the_chain_is_deep_need_no_recursion():
    assert simulate(binomial(1100, 1)).forwards == 1100 + 1100 * 1099 // 2
    assert simulate(mixed(1100, 2)).peak_slots == 2


# --- What is left out ----------------------------------------------------------------

ALL = save_everything()


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        ([Keep(0), Load(0), Drop(0)], []),
        ([Keep(0, policy=ALL), Load(0), Drop(0), Reverse(0)], [Reverse(0)]),
        ([Load(0), Drop(0), Keep(0), Drop(0)], [Load(0), Drop(0)]),
        ([Load(0), Load(0)], [Load(0)]),
        # These do something: another slot, or a part of the stage that runs again.
        ([Keep(0), Load(0, "host"), Drop(0)], None),
        ([Load(0), Drop(0), Keep(0, "host")], None),
        ([Keep(0, policy=save("a")), Load(0), Drop(0), Reverse(0)], None),
        ([Keep(0, policy=ALL), Load(0), Drop(0)], None),
    ],
    ids=lambda given: ", ".join(map(str, given or ["the same"])),
)
def test_actions_that_undo_each_other_are_left_out(actions, expected):
    assert simplified(actions) == (actions if expected is None else expected)


def test_a_simplified_list_does_the_same_for_no_more():
    for seed in range(60):
        rng = random.Random(seed)
        actions = random_actions(rng.randint(1, 9), rng, ("device", "host"))
        shorter = ActionList(simplified(actions), actions.steps)
        before, after = simulate(actions), simulate(shorter)
        assert Symbolic(shorter).forwards == after.forwards == before.forwards
        assert after.peak_slots <= before.peak_slots
        assert after.cost <= before.cost


# --- Schedules as lists --------------------------------------------------------------


@pytest.mark.parametrize("steps", DEPTHS)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_and_its_list_run_the_same(schedule, steps):
    if any("policy" in str(node) for node in schedule.nodes(steps)):
        with pytest.raises(ScheduleError, match="keeps values inside a segment"):
            actions_from(schedule, steps)
        return
    actions = actions_from(schedule, steps)
    assert simulate(actions).forwards == schedule.forwards(steps)
    assert Symbolic(actions).forwards == schedule.forwards(steps)
    assert simplified(actions) == list(actions)


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("steps", DEPTHS)
def test_binomial_as_a_schedule_and_as_a_list_are_one(steps, slots):
    schedule = jaxckpt.binomial(slots)
    if steps > 50 and slots == 1:  # nests too deep for a program
        with pytest.raises(ScheduleError):
            schedule.nodes(steps)
        return
    actions = actions_from(schedule, steps)
    assert list(actions) == list(binomial(steps, slots))
    assert simulate(actions, slots=min(slots, steps - 1)).peak_slots <= slots
    assert picture(actions) == schedule.draw(steps).split("\n", 1)[1]


def test_a_plan_of_one_stack_brings_its_depth():
    plan = Plan((("layers", every(2)),), depths=(6,))
    assert actions_from(plan) == actions_from(plan, 6) == actions_from("every(2)", 6)
    assert actions_from(Plan(plan.rules), 4) == actions_from(every(2), 4)


@pytest.mark.parametrize(
    ("rule", "steps", "parts"),
    [
        (Plan((("a", every(2)), ("b", every(2)))), 4,
         ["stacks `a`, `b`", "`plan.rules`", "`steps`"]),
        (Plan((("a", every(2)),), depths=(6,)), 4, ["`steps=4`", "`a` has 6 layers"]),
        (Plan((("a", every(2)),)), None, ["`every(2)`", "Give `steps`"]),
        (every(2), None, ["`every(2)`", "Give `steps`"]),
        (tree(Remat(None, 2)), 3, ["holds 2 layers"]),
        (4, 3, ["`schedule=4` is no schedule"]),
        (tree(Segment([Remat(None, 1), Remat(save("a"), 1)], save("b"))), 2,
         ["inside a segment", "`Remat(save(b), 2)`"]),
        *((every(2), bad, [f"`steps={bad!r}`"]) for bad in (0, -1, True)),
    ],
    ids=str,
)  # fmt: skip
def test_a_rule_that_makes_no_list_is_refused(rule, steps, parts):
    with pytest.raises(ScheduleError) as caught:
        actions_from(rule, steps)
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "3"])
@pytest.mark.parametrize("make", [binomial, mixed], ids=["binomial", "mixed"])
def test_numbers_that_are_none_are_refused(make, bad):
    unchecked = make.__wrapped__
    with pytest.raises(ScheduleError, match=f"`steps={bad!r}` is not a whole number"):
        unchecked(bad, 2)
    with pytest.raises(ScheduleError, match=f"`slots={bad!r}` is not a whole number"):
        unchecked(4, bad)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((0, 1, 1, 2.0, 2.0), "`steps=0`"),
        ((4, -1, 1, 2.0, 2.0), "`device_slots=-1`"),
        ((4, "3", 1, 2.0, 2.0), "`device_slots='3'`"),
        ((4, 1, True, 2.0, 2.0), "`host_slots=True`"),
        ((4, 1, 1.5, 2.0, 2.0), "`host_slots=1.5`"),
        ((4, 1, 1, -2.0, 2.0), "`write=-2.0` is not a cost"),
        ((4, 1, 1, 2.0, INF), "`read=inf` is not a cost"),
        ((4, 1, 1, NAN, 2.0), "`write=nan` is not a cost"),
        ((4, 0, 0, 2.0, 2.0), "leave no slot for x0"),
    ],
)
def test_two_level_refuses_what_it_cannot_use(given, text):
    with pytest.raises(ScheduleError) as caught:
        two_level.__wrapped__(*given)
    assert text in str(caught.value)


def test_one_stage_needs_no_slot():
    for actions in (mixed(1, 0), two_level(1, 0, 0, 1.0, 1.0)):
        assert list(actions) == [Reverse(0)]
