"""The simulator: what legal lists take, and why illegal ones are refused."""

import random

import pytest
from helpers_executor import Symbolic, random_actions

from jaxckpt.errors import ScheduleError
from jaxckpt.executor.actions import (
    ActionList,
    Advance,
    Costs,
    Drop,
    Keep,
    Load,
    Reverse,
    as_actions,
)
from jaxckpt.executor.simulate import simulate
from jaxckpt.policy import save_everything, save_nothing

ALL = save_everything()
STORAGES = "device", "host", "disk"


# --- What a list takes ---------------------------------------------------------------


def test_a_record_counts_runs_slots_and_traffic():
    actions = [Keep(0, "host"), Advance(0, 1), Keep(1), Advance(1, 3), Reverse(3)]
    actions += [Load(1), Advance(1, 2), Reverse(2), Load(1), Drop(1), Reverse(1)]
    actions += [Load(0, "host"), Drop(0, "host"), Reverse(0)]
    costs = Costs(forward=1.0, backward=2.0, write=10.0, read=100.0)
    record = simulate(actions, costs=costs)
    assert record.forwards_of == (2, 3, 2, 1)
    assert record.forwards == 8
    assert record.peak_slots_in == {"device": 1, "host": 1, "disk": 0}
    assert (record.steps, record.peak_slots) == (4, 1)
    assert (record.writes, record.reads) == (1, 1)
    assert record.cost == 8 + 4 * 2 + 10 + 100


def test_a_tape_saves_the_forward_run_of_its_reverse_if_it_keeps_all():
    for policy, forwards in ((ALL, 2), (save_nothing(), 3)):
        actions = [Keep(0, policy=policy), Reverse(1), Load(0), Reverse(0)]
        assert simulate(actions).forwards == forwards


def test_a_tape_stays_loaded_when_its_slot_is_freed():
    actions = [Keep(0, policy=ALL), Reverse(1), Load(0), Drop(0), Reverse(0)]
    assert simulate(actions).peak_slots == 1


def test_one_state_may_be_in_several_storages():
    actions = [Keep(0), Keep(0, "host"), Keep(0, "disk"), Reverse(0)]
    assert simulate(actions).peak_slots_in == dict.fromkeys(STORAGES, 1)


# --- Illegal lists -------------------------------------------------------------------

TO_LAST = [Keep(0), Advance(0, 2)]
TO_FIRST = [*TO_LAST, Reverse(2), Load(0)]


@pytest.mark.parametrize(
    ("actions", "text"),
    [
        ([Load(0)], "Action 0 of 1, `load 0`, is illegal: the device's slot of 0 is "
                    "empty; the device holds nothing."),
        ([*TO_LAST, Load(1)], "`load 1`, is illegal: the device's slot of 1 is empty; "
                              "the device holds [0]."),
        ([Keep(0), Load(0, "host")], "`load 0 from host`, is illegal: the host's slot "
                                     "of 0 is empty; the host holds nothing."),
        ([Keep(0), Drop(0), Drop(0)], "Action 2 of 3, `drop 0`, is illegal: the "
                                      "device's slot of 0 is empty"),
        ([Keep(0), Keep(0)], "`keep 0`, is illegal: the device's slot of 0 is in use"),
        ([Keep(0, policy=ALL), Keep(0)], "`keep 0`, is illegal: it needs the state x0, "
                                         "and the working memory holds x1."),
        (TO_LAST, "The list ends, and stages 0-2 are not reversed. Each stage needs"),
        ([*TO_FIRST, Advance(0, 1), Reverse(1)],
         "The list ends, and stage 0 is not reversed."),
        ([*TO_LAST, Load(0), Reverse(0)], "`reverse 0`, is illegal: stage 2 is to be"),
        ([*TO_FIRST, Advance(0, 2), Reverse(2)],
         "`reverse 2`, is illegal: stage 1 is to be reversed next."),
        ([*TO_FIRST, Reverse(1)],
         "`reverse 1`, is illegal: it needs the tape of stage 1 or the state x1, and "
         "the working memory holds x0."),
        ([*TO_LAST, Reverse(2), Advance(0, 1)], "`advance 0`, is illegal: it needs the "
                                                "state x0, and the working memory "
                                                "holds nothing."),
        ([Advance(1, 2)], "`advance 1`, is illegal: it needs the state x1, and the "
                          "working memory holds x0."),
        ([Advance(0, 4)], "`advance 0-3`, is illegal: it has to end behind stage 0, at "
                          "most at 3."),
        ([Advance(0, 0)], "is illegal: it has to end behind stage 0"),
        ([Keep(0, policy=ALL), Load(0), Advance(0, 1)],
         "it needs the state x0, and the working memory holds the tape of stage 0."),
        ([Advance(0, 3), Keep(3)], "the chain's result is handed out, not kept."),
        ([*TO_FIRST, Reverse(1), Reverse(0)], "`reverse 1`, is illegal: it needs"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)  # fmt: skip
def test_an_illegal_list_is_refused_with_its_first_fault(actions, text):
    with pytest.raises(ScheduleError) as caught:
        simulate(actions, steps=3)
    assert text in str(caught.value)


def test_more_than_the_slots_are_refused():
    actions = [Keep(0), Advance(0, 1), Keep(1), Reverse(1), Load(0), Reverse(0)]
    assert simulate(actions, slots=2).peak_slots == 2
    for slots in (1, {"device": 1}):
        with pytest.raises(ScheduleError) as caught:
            simulate(actions, slots=slots)
        assert str(caught.value) == (
            "Action 2 of 6, `keep 1`, is illegal: all 1 slots of the device are in "
            "use, by [0]."
        )
    with pytest.raises(ScheduleError, match="no slots of the host"):
        simulate([Keep(0, "host")], steps=1, slots={"host": 0})
    with pytest.raises(ScheduleError, match="all 1 slots of the device"):
        simulate(ActionList(actions, 2, {"device": 1}))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Keep(0, "gpu"), "`storage='gpu'` is not known."),
        (lambda: Load(0, "hots"), "`storage='hots'` is not known. Did you mean `host`"),
        (lambda: Drop(-1), "`index=-1` is not a whole number of at least 0."),
        (lambda: Advance(0, True), "`stop=True` is not a whole number"),
    ],
)
def test_a_wrong_action_is_refused_when_it_is_made(make, text):
    with pytest.raises(ScheduleError) as caught:
        make()
    assert text in str(caught.value)


def test_nothing_is_reversed_after_the_last_stage():
    with pytest.raises(ScheduleError, match="all stages are reversed already"):
        simulate([Reverse(0), Reverse(0)])


def test_slots_that_nothing_frees_are_counted():
    actions = [Keep(0), Advance(0, 1), Reverse(1), Load(0), Reverse(0)]
    assert simulate(actions).slots_left == 1
    assert simulate([*actions, Drop(0)]).slots_left == 0


@pytest.mark.parametrize(
    ("actions", "settings", "text"),
    [
        (ActionList([Reverse(0)], 1), {"steps": 2}, "is made for 1 stages"),
        ([Reverse(0)], {"steps": 3}, "is made for 1 stages, and the chain has 3."),
        ([Keep(0)], {"slots": 0}, "no slots of the device"),
        ([Reverse(0)], {"steps": 0}, "`steps=0` is not a whole number of at least 1."),
        ([Reverse(0)], {"steps": True}, "`steps=True` is not a whole number"),
        ([Reverse(0)], {"slots": -1}, "`slots['device']=-1` is not a whole number"),
        ([Reverse(0)], {"slots": {"gpu": 1}}, "`storage='gpu'` is not known."),
    ],
    ids=str,
)
def test_a_setting_that_is_none_is_refused(actions, settings, text):
    with pytest.raises(ScheduleError) as caught:
        simulate.__wrapped__(actions, **settings)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("actions", "text"),
    [
        (
            [Reverse(0), "drop 0"],
            "Item 1 of the list, `'drop 0'`, is no action. Use `Advance`",
        ),
        ([Reverse], "Item 0 of the list, `<class"),
        ("reverse 0", "`actions='reverse 0'` is no list of actions."),
        (3, "`actions=3` is no list of actions."),
    ],
    ids=str,
)
def test_what_is_no_list_of_actions_is_refused(actions, text):
    with pytest.raises(ScheduleError) as caught:
        as_actions.__wrapped__(actions)
    assert text in str(caught.value)


# --- Random lists --------------------------------------------------------------------


def lists(seeds):
    """Return random legal lists, half of them in all storages."""
    for seed in seeds:
        rng = random.Random(seed)
        storages = STORAGES if seed % 2 else ("device",)
        yield random_actions(rng.randint(1, 9), rng, storages, tapes=seed % 4 < 2), rng


def mutated(actions, rng):
    """Return actions with one left out, twice there, moved, or for another stage."""
    actions, i = list(actions), rng.randrange(len(actions))
    action = actions.pop(i)
    kind = rng.choice(["left out", "twice", "moved", "another"])
    if kind == "twice":
        actions[i:i] = [action, action]
    elif kind == "moved":
        actions.insert(rng.randrange(len(actions) + 1), action)
    elif kind == "another":
        other = rng.choice(actions or [action])
        actions.insert(i, other)
    return actions


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_legal_lists_are_accepted_and_run_as_counted(first):
    for actions, _ in lists(range(first, first + 50)):
        record = simulate(actions)
        assert Symbolic(actions).forwards == record.forwards
        assert sum(record.forwards_of) == record.forwards >= record.steps
        simulate(actions, slots=record.peak_slots_in)
        for storage, peak in record.peak_slots_in.items():
            if peak:
                with pytest.raises(ScheduleError, match=f"slots of the {storage}"):
                    simulate(actions, slots={storage: peak - 1})


def test_a_mutated_list_is_refused_or_runs():
    refused = accepted = 0
    for actions, rng in lists(range(150)):
        for _ in range(4):
            mutant = ActionList(mutated(actions, rng), actions.steps)
            try:
                record = simulate(mutant)
            except ScheduleError as error:
                assert str(error)
                refused += 1
                continue
            assert Symbolic(mutant).forwards == record.forwards
            accepted += 1
    assert refused > 100 and accepted > 50, (refused, accepted)


def test_a_list_without_one_of_its_reverses_is_refused():
    for actions, rng in lists(range(40)):
        stage = rng.randrange(actions.steps)
        rest = [action for action in actions if action != Reverse(stage)]
        with pytest.raises(ScheduleError):
            simulate(rest, steps=actions.steps)
