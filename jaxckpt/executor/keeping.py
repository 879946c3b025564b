"""What `keep` means: the actions of a chain that the host drives."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

from jaxckpt.errors import ScheduleError
from jaxckpt.executor.actions import (
    KINDS,
    Action,
    ActionList,
    Drop,
    Keep,
    Load,
    as_actions,
)
from jaxckpt.executor.checks import check_number, check_storage
from jaxckpt.executor.from_schedule import actions_from
from jaxckpt.executor.simulate import simulate
from jaxckpt.schedule import Keep as KeepAll
from jaxckpt.schedule import Schedule, Segment, parse_schedule, tree


def kept_actions(keep: Any, steps: int, storage: str) -> ActionList:
    """Return the checked actions for a chain.

    Args:
        keep: n for the input of every n-th stage; stage numbers, whose inputs are kept
            beside that of stage 0; a schedule or its text; or a list of actions.
        steps: The chain's depth.
        storage: Where a rule keeps what the forward pass keeps. A list of actions says
            that itself.

    Raises:
        ScheduleError: Something is out of range, or the list is illegal.

    Example:
        >>> print(kept_actions([2], 3, "host"))
        keep 0 on host, advance 0-1, reverse 2, load 0 from host, drop 0 on host, keep
        all of 0, reverse 1, load 0, drop 0, reverse 0
    """
    check_storage(storage)
    if _is_action_list(keep):
        if storage != "device":
            raise ScheduleError(
                f"`storage={storage!r}` does not go with a list of actions, which says "
                "where each slot is. Leave it out."
            )
        actions = as_actions(keep, steps)
    else:
        actions = moved(actions_from(_rule(keep, steps), steps), storage)
    simulate(actions, steps=steps)
    return actions


def moved(actions: ActionList, storage: str) -> ActionList:
    """Return actions whose forward pass keeps its states in another storage."""
    if storage == "device":
        return actions
    length = actions.forward_length
    there: set[int] = set()
    found: list[Action] = []
    for number, action in enumerate(actions):
        if number < length and isinstance(action, Keep) and action.policy is None:
            there.add(action.index)
        if isinstance(action, (Keep, Load, Drop)) and action.index in there:
            found.append(replace(action, storage=storage))
            if isinstance(action, Drop):
                there.remove(action.index)
        else:
            found.append(action)
    return ActionList(found, actions.steps, actions.slots, actions.costs)


def _is_action_list(keep: Any) -> bool:
    if isinstance(keep, (ActionList, str)) or not isinstance(keep, Sequence):
        return isinstance(keep, ActionList)
    return any(isinstance(item, KINDS) for item in keep)


def _rule(keep: Any, steps: int) -> Schedule:
    if isinstance(keep, Schedule):
        return keep
    if isinstance(keep, str):
        return parse_schedule(keep)
    if isinstance(keep, Integral):
        check_number(keep, "keep", least=1)
        return _segments(list(range(0, steps, int(keep))), steps)
    if isinstance(keep, Iterable):
        return _segments(list(keep), steps)
    raise ScheduleError(
        f"`keep={keep!r}` says of no stage whether its input is kept. Use n for every "
        "n-th, a list of stage numbers, a schedule, or a list of actions."
    )


def _segments(stages: list[Any], steps: int) -> Schedule:
    """Return segments that begin at these stages.

    The last one is the first to be reversed. It leaves its tapes in the forward pass:
    run again, it would leave as many.
    """
    for stage in stages:
        is_number = isinstance(stage, Integral) and not isinstance(stage, bool)
        if not is_number or int(stage) not in range(steps):
            raise ScheduleError(
                f"`keep={stages!r}` has `{stage!r}`, which is no stage. Use numbers "
                f"from 0 to {steps - 1}."
            )
    bounds = [*sorted({0, *map(int, stages)}), steps]
    *before, last = [KeepAll(b - a) for a, b in itertools.pairwise(bounds)]
    return tree(*map(Segment, before), last)
