"""What a list does to equal stages, as a table of numbers that a loop can read.

Numbers are places in two stacks, of states and of tapes, and stages. A *step* runs one
stage at most; a *round* is the steps up to one reverse, and that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxckpt.executor.actions import (
    Action,
    ActionList,
    Advance,
    Drop,
    Keep,
    Load,
    Reverse,
    storage_of,
)
from jaxckpt.executor.interpret import Held
from jaxckpt.executor.layout import Group, Layout
from jaxckpt.policy_algebra import Everything

NONE = -1
"""No place."""


@dataclass(frozen=True)
class InStack:
    """Where a stack holds what a slot holds.

    Attributes:
        number: Its place in the stack.
        is_tape: Whether in the stack of tapes.
    """

    number: int
    is_tape: bool


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
    """What one turn of a loop does, in this order; places of a stack, or -1.

    Attributes:
        load: The state that becomes the working state.
        keep: Where the working state goes.
        tape: Where the tape of the stage goes that runs.
        stage: The stage that runs.
        runs: Whether one does.
    """

    load: Any = NONE
    keep: Any = NONE
    tape: Any = NONE
    stage: Any = 0
    runs: Any = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Round:
    """Steps, and the reverse behind them.

    Attributes:
        start: The first step.
        stop: The step behind the last.
        load: The state that the reverse starts from, or -1 for the working state.
        tape: The tape that it starts from, or -1.
        stage: The stage that is reversed.
    """

    start: Any
    stop: Any
    load: Any
    tape: Any
    stage: Any


class Places:
    """Which places of a group's stacks are free.

    Every turn of a loop writes a state where one is kept in the loop, and a tape where
    one is: what is not to be kept goes to a place that is free.

    Args:
        actions: What concerns the group, with all of it on the device.

    Attributes:
        sizes: How many places the stacks of states and of tapes have.
    """

    def __init__(self, actions: Sequence[Action]) -> None:
        most = _most_held(actions)
        full = (
            _runs_when_full(actions, False, most),
            _runs_when_full(actions, True, most),
        )
        self.sizes = (most[0] + full[0], most[1] + full[1])
        self._free = tuple(list(range(size)) for size in self.sizes)

    def take(self, is_tape: bool) -> InStack:
        """Return a free place."""
        return InStack(self._free[is_tape].pop(0), is_tape)

    def spare(self, is_tape: bool) -> int:
        """Return a place for what is not to be kept."""
        return self._free[is_tape][0] if self._free[is_tape] else NONE

    def give_back(self, place: InStack) -> None:
        """Free a place."""
        self._free[place.is_tape].append(place.number)


def columns(rows: Sequence[Any]) -> Any:
    """Return rows of numbers as one row of arrays."""
    return jax.tree.map(lambda *x: jnp.asarray(x), *rows)


def find_places(listed: ActionList, layout: Layout) -> dict[int, Places]:
    """Return the places that the groups need which can run in loops.

    They are those of which states and whole tapes are kept on the device; what is kept
    elsewhere goes straight there, between loops.
    """
    own: dict[int, list[Action]] = {g.number: [] for g in layout.groups if g.looped}
    if not own:
        return {}
    for group, part in parts_by_group(listed, layout):
        if group.looped:
            here = (a for a in part if storage_of(a) == "device")
            own[group.number] += here
    return {n: Places(part) for n, part in own.items() if all(map(_fits_stack, part))}


def parts_by_group(
    actions: Iterable[Action], layout: Layout
) -> Iterator[tuple[Group, list[Action]]]:
    """Cut actions into parts that concern one group and, if they do, the host."""

    def single() -> Iterator[tuple[Group, Action]]:
        for action in actions:
            if not isinstance(action, Advance):
                yield layout.group_of(action.index), action
                continue
            start = action.start
            while start < action.stop:
                group = layout.group_of(start)
                stop = min(action.stop, group.stop)
                yield group, Advance(start, stop)
                start = stop

    def part(pair: tuple[Group, Action]) -> tuple[int, str]:
        return pair[0].number, storage_of(pair[1])

    for (number, _), found in itertools.groupby(single(), key=part):
        yield layout.groups[number], [action for _, action in found]


def _fits_stack(action: Action) -> bool:
    return not isinstance(action, Keep) or isinstance(action.policy, Everything | None)


def _held_before(
    actions: Iterable[Action],
) -> Iterator[tuple[Action, tuple[int, int]]]:
    """Yield each action with the number of states and tapes that are kept before."""
    held: dict[int, bool] = {}
    for action in actions:
        tapes = sum(held.values())
        yield action, (len(held) - tapes, tapes)
        if isinstance(action, Keep):
            held[action.index] = action.policy is not None
        elif isinstance(action, Drop):
            del held[action.index]


def _most_held(actions: Iterable[Action]) -> tuple[int, int]:
    """Return how many states and tapes are kept at once, at most."""
    counts = [count for _, count in _held_before([*actions, Reverse(0)])]
    return max(c[0] for c in counts), max(c[1] for c in counts)


def _runs_when_full(actions: Iterable[Action], is_tape: bool, most: Any) -> bool:
    """Return whether a step keeps no state (tape) while all places are in use.

    A step stands for an advance or a keep.
    """
    return most[is_tape] > 0 and any(
        isinstance(action, (Advance, Keep)) and held[is_tape] == most[is_tape]
        for action, held in _held_before(actions)
    )


@dataclass(frozen=True)
class Table:
    """What a part of a list does to equal stages.

    Attributes:
        steps: All steps.
        rounds: The rounds that they make.
        keeps: Whether any step keeps a state, and whether any keeps a tape. The others
            name places that are free.
    """

    steps: Sequence[Step]
    rounds: Sequence[Round]
    keeps: tuple[bool, bool]


class TableMaker:
    """Turns actions into steps and rounds.

    Args:
        slots: Where things are kept; account of it is kept on the way.
        places: The group's.
    """

    def __init__(self, slots: dict[tuple[str, int], Held], places: Places) -> None:
        self._slots = slots
        self._places = places
        self._steps: list[Step] = []
        self._rounds: list[Round] = []
        self._next = Step()
        self._tape = NONE
        self._start = 0
        self._keeps = self._tapes = False

    def add(self, action: Action) -> None:
        """Add an action."""
        if isinstance(action, Advance):
            for stage in range(action.start, action.stop):
                self._ends(replace(self._next, stage=stage, runs=True))
        elif isinstance(action, Keep):
            self._keep(action)
        elif isinstance(action, Load):
            self._load(self._slots[_key(action)].value)
        elif isinstance(action, Drop):
            self._places.give_back(self._slots.pop(_key(action)).value)
        else:
            self._reverse(action.index)

    def finish(self) -> Table:
        """Return the table."""
        self._flush()
        return Table(self._steps, self._rounds, (self._keeps, self._tapes))

    def _ends(self, step: Step) -> None:
        self._keeps |= step.keep != NONE
        self._tapes |= step.tape != NONE
        if step.keep == NONE:
            step = replace(step, keep=self._places.spare(is_tape=False))
        if step.tape == NONE:
            step = replace(step, tape=self._places.spare(is_tape=True))
        self._steps.append(step)
        self._next = Step()

    def _flush(self) -> None:
        if self._next != Step():
            self._ends(self._next)

    def _keep(self, action: Keep) -> None:
        is_tape = action.policy is not None
        place = self._places.take(is_tape)
        self._slots[_key(action)] = Held(place, is_tape)
        if is_tape:
            here = {"tape": place.number, "stage": action.index, "runs": True}
            self._ends(replace(self._next, **here))
        else:
            self._next = replace(self._next, keep=place.number)

    def _load(self, place: InStack) -> None:
        if self._next.keep != NONE:
            self._flush()
        self._next = Step() if place.is_tape else Step(load=place.number)
        self._tape = place.number if place.is_tape else NONE

    def _reverse(self, stage: int) -> None:
        if self._next.keep != NONE:
            self._flush()
        stop = len(self._steps)
        one = Round(self._start, stop, self._next.load, self._tape, stage)
        self._rounds.append(one)
        self._next, self._tape, self._start = Step(), NONE, stop


def _key(action: Keep | Load | Drop) -> tuple[str, int]:
    return action.storage, action.index
