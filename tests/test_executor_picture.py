"""Pictures of lists: those of the schedules, and marks for tapes and storages."""

import random

import pytest
from helpers import PLAIN_SCHEDULES
from helpers_executor import random_actions

import jaxckpt
from jaxckpt.errors import ScheduleError
from jaxckpt.executor.actions import ActionList, Advance, Keep, Load, Reverse
from jaxckpt.executor.from_schedule import actions_from
from jaxckpt.executor.picture import draw
from jaxckpt.executor.revolve import binomial, mixed, two_level
from jaxckpt.executor.simulate import simulate
from jaxckpt.policy import save, save_everything

# Where a second run ends before a segment, the segment's own run goes on from there: a
# list needs no load between the two, and has one line for both.
MERGED = "nested(2, 2)"


def below_title(picture):
    return picture.split("\n", 1)[1]


@pytest.mark.parametrize("steps", [1, 2, 5, 12, 13, 40, 64])
@pytest.mark.parametrize("name", [n for n in PLAIN_SCHEDULES if n != MERGED])
def test_the_list_of_a_schedule_has_its_picture(name, steps):
    schedule = PLAIN_SCHEDULES[name]
    picture = draw(actions_from(schedule, steps))
    assert below_title(picture) == below_title(schedule.draw(steps))


@pytest.mark.parametrize("slots", range(1, 17))
def test_binomial_has_the_picture_of_the_schedule(slots):
    schedule = jaxckpt.binomial(slots)
    for steps in range(1 + slots, 51 if slots == 1 else 65, 8):
        picture = draw(binomial(steps, slots))
        assert below_title(picture) == below_title(schedule.draw(steps))


def test_a_second_run_goes_on_into_its_last_segment():
    assert draw(actions_from(MERGED, 8)) == (
        "32 actions with 3 device slots on 8 layers\n"
        "  forward   *...*...   * keeps the layer's input, . nothing\n"
        "backward runs again, in order:\n"
        "                *.==   layers 4-7\n"
        "                ==     layers 4-5\n"
        "            *.==       layers 0-3\n"
        "            ==         layers 0-1\n"
        "2 layer inputs kept; 20 layer forwards: 8 forward, 12 again"
    )


def test_the_picture_of_two_storages_says_which_holds_an_input():
    assert draw(two_level(8, 1, 1, 2.0, 2.0)) == (
        "28 actions with 1 device and 1 host slots on 8 layers\n"
        "  forward   h..*...=\n"
        "            * keeps the layer's input, h the layer's input on the host,\n"
        "            = everything, . nothing\n"
        "backward runs again, in order:\n"
        "               *..=    layers 3-6\n"
        "               *.=     layers 3-5\n"
        "               *=      layers 3-4\n"
        "               =       layer 3\n"
        "            *.=        layers 0-2\n"
        "            *=         layers 0-1\n"
        "            =          layer 0\n"
        "2 layer inputs kept; 24 layer forwards: 8 forward, 16 again"
    )


def test_the_picture_shows_tapes_and_policies_wherever_they_are_kept():
    everything = save_everything()
    actions = [
        Keep(0, policy=everything),
        Keep(1, "host", everything),
        Keep(2, "disk", save("a")),
        Keep(3, policy=save("a")),
        *(Reverse(4), Load(3), Reverse(3), Load(2, "disk"), Reverse(2)),
        *(Load(1, "host"), Reverse(1), Load(0), Reverse(0)),
    ]
    assert draw(ActionList(actions, 5)) == (
        "13 actions on 5 layers\n"
        "  forward   =HD+=\n"
        "            + its input and what a policy keeps, = everything,\n"
        "            H a tape on the host, D a tape on disk\n"
        "backward runs again, in order:\n"
        "               =    layer 3\n"
        "              =     layer 2\n"
        "policy: save(a)\n"
        "1 layer inputs kept; 7 layer forwards: 5 forward, 2 again"
    )


def test_the_forward_pass_is_whole_where_it_loads_and_runs_again():
    again = [Load(0), Advance(0, 2), Reverse(2), Load(0), Advance(0, 1), Reverse(1)]
    actions = [Keep(0), Advance(0, 2), *again, Load(0), Reverse(0)]
    assert below_title(draw(ActionList(actions, 3))) == (
        "  forward   *.=   * keeps the layer's input, = everything, . nothing\n"
        "backward runs again, in order:\n"
        "            *=    layers 0-1\n"
        "            =     layer 0\n"
        "1 layer inputs kept; 8 layer forwards: 3 forward, 5 again"
    )


@pytest.mark.parametrize("seed", range(30))
def test_any_list_has_a_picture_of_80_columns(seed):
    rng = random.Random(seed)
    actions = random_actions(rng.randint(1, 12), rng, ("device", "host", "disk"))
    lines = draw(actions).splitlines()
    assert max(map(len, lines)) <= 80
    assert f"; {simulate(actions).forwards} layer forwards: " in lines[-1]
    assert len(lines[1].split()[1]) == actions.steps


@pytest.mark.parametrize("steps", [1, 30, 53, 70, 250])
def test_long_lists_fit_80_columns(steps):
    for actions in (mixed(steps, 5), two_level(steps, 2, 4, 1.0, 1.0)):
        assert max(map(len, draw(actions).splitlines())) <= 80


def test_an_illegal_list_has_no_picture():
    with pytest.raises(ScheduleError, match="Action 0 of 1, `reverse 0`"):
        draw(ActionList([Reverse(0)], 2))
