"""Equal stages in loops: the actions as a table that a loop of fixed size reads.

What a list does to a run of equal stages becomes numbers: of slots in one stack of
states (and one of tapes), and of stages. The forward pass is a scan over *steps*, each
of which runs one stage at most. The backward pass is a scan over *rounds*: a round runs
the steps up to one reverse in an inner loop, and then that. So the program holds two or
three copies of a stage, however many stages and actions there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxckpt import _jax
from jaxckpt.executor.actions import (
    Action,
    ActionList,
    Advance,
    Drop,
    Keep,
    Load,
    Reverse,
)
from jaxckpt.executor.interpret import Held
from jaxckpt.executor.layout import (
    Arrays,
    Gradients,
    Group,
    Layout,
    StageArrays,
    at,
    aux_of,
    empty_stacks,
    gradient_stacks,
    reversed_stage,
    with_element,
)
from jaxckpt.executor.straight import KeptTape, Straight
from jaxckpt.layers_body import Flat
from jaxckpt.policy import save_everything
from jaxckpt.policy_algebra import Everything

_NONE = -1


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

    load: Any = _NONE
    keep: Any = _NONE
    tape: Any = _NONE
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

    Args:
        states: How many states are kept at once, at most.
        tapes: How many tapes.
    """

    def __init__(self, states: int, tapes: int) -> None:
        self.counts = (states, tapes)
        self._free = (list(range(states)), list(range(tapes)))

    def take(self, is_tape: bool) -> InStack:
        """Return a free place."""
        return InStack(self._free[is_tape].pop(0), is_tape)

    def give_back(self, place: InStack) -> None:
        """Free a place."""
        self._free[place.is_tape].append(place.number)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stacks:
    """What is kept of a group's stages; the last place of each is for nothing.

    Attributes:
        states: `[places + 1, ...]`.
        tapes: `[places + 1, ...]`, empty where no tape is kept.
    """

    states: Flat
    tapes: Flat


class Looped(Straight):
    """Runs what a list does to equal stages in loops, and the rest straight.

    Attributes:
        stacks: What is kept of each group that runs in loops, by its number.
        places: Which of the places are free.
    """

    def __init__(self, *args: Any, listed: ActionList, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.stacks: dict[int, Stacks] = {}
        self.places = find_places(listed, self.layout)

    def run(self, actions: Iterable[Action]) -> None:
        for group, part in parts_by_group(actions, self.layout):
            if group.number not in self.places:
                super().run(part)
            else:
                self._run_part(group, part)

    def settled(self, group: Group, found: Gradients) -> Gradients:
        # A barrier would copy the stack of gradients, and the loops need none.
        return found if group.number in self.places else super().settled(group, found)

    def put(self, key: tuple[str, int], value: Any) -> Any:
        group = self.layout.group_of(key[1])
        if group.number not in self.places:
            return super().put(key, value)
        is_tape = isinstance(value, KeptTape)
        place = self.places[group.number].take(is_tape)
        stacks = self._stacks(group)
        if is_tape:
            tapes = _written(stacks.tapes, value.kept, place.number)
            self.stacks[group.number] = replace(stacks, tapes=tapes)
        else:
            states = _written(stacks.states, value, place.number)
            self.stacks[group.number] = replace(stacks, states=states)
        return place

    def get(self, key: tuple[str, int], held: Any) -> Any:
        if not isinstance(held, InStack):
            return super().get(key, held)
        stacks = self._stacks(self.layout.group_of(key[1]))
        if held.is_tape:
            kept = [at(x, held.number) for x in stacks.tapes]
            return super().get(key, KeptTape(kept, save_everything()))
        return super().get(key, [at(x, held.number) for x in stacks.states])

    def discard(self, key: tuple[str, int], held: Any) -> None:
        if isinstance(held, InStack):
            self.places[self.layout.group_of(key[1]).number].give_back(held)

    def _run_part(self, group: Group, part: Sequence[Action]) -> None:
        if self.tape is not None:
            super().run(part[:1])
            part = part[1:]
        ends = [i for i, a in enumerate(part, 1) if isinstance(a, Reverse)]
        end = ends[-1] if len(ends) > 1 else 0
        if end:
            self._run_rounds(group, part[:end])
        rest = part[end:]
        runs = sum(isinstance(a, (Advance, Keep)) for a in rest)
        if self.gradients is None and runs > 1:
            self._run_steps(group, rest)
        else:
            super().run(rest)

    def _run_steps(self, group: Group, part: Sequence[Action]) -> None:
        """Run a part of the forward pass."""
        steps, _ = self._table(part)
        turn = Turn(self.layout, group, self.given, steps)

        def body(carry: Any, step: Step) -> tuple[Any, None]:
            state, stacks, outputs = carry
            state, stacks, aux = turn.run(step, state, stacks)
            return (state, stacks, self._with_aux(group, step.stage, outputs, aux)), None

        carry = self._working(group), self._stacks(group), self._aux_stacks(group)
        carry, _ = lax.scan(body, carry, table(steps))
        self.state, self.stacks[group.number], self.aux[group.number] = carry

    def _run_rounds(self, group: Group, part: Sequence[Action]) -> None:
        """Run a part of the backward pass that ends with a reverse."""
        assert self.gradients is not None
        state = self._working(group)
        steps, rounds = self._table(part)
        turn = Turn(self.layout, group, self.given, steps, rounds)
        d_aux = self.d_aux[group.number]
        all_steps = table(steps or [Step()])

        def inner(number: Any, carry: Any) -> Any:
            step = jax.tree.map(lambda x: at(x, number), all_steps)
            return turn.run(step, *carry)[:2]

        def body(carry: Any, one: Round) -> tuple[Any, None]:
            gradients, stacks = carry
            working, stacks = lax.fori_loop(one.start, one.stop, inner, (state, stacks))
            given = self.given.of(group, one.stage)
            kept = turn.kept(one, given, working, stacks)
            gradients = reversed_stage(
                self.layout,
                group,
                one.stage,
                self.layout.tape(group),
                given,
                kept,
                gradients,
                aux_of(group, one.stage, d_aux),
            )
            return (gradients, stacks), None

        carry = self._with_stacks(group), self._stacks(group)
        carry, _ = lax.scan(body, carry, table(rounds))
        self.gradients, self.stacks[group.number] = carry
        self.state = None

    def _with_stacks(self, group: Group) -> Gradients:
        """Return the gradients so far, with room for those of a group."""
        assert self.gradients is not None
        params = list(self.gradients.params)
        if params[group.number] is None:
            flow = self.gradients.flow
            params[group.number] = gradient_stacks(self.layout, group, flow)
        return replace(self.gradients, params=params)

    def _working(self, group: Group) -> Flat:
        if self.state is not None:
            return self.state
        return [x[0] for x in empty_stacks(group.program.state, 1, [])]

    def _stacks(self, group: Group) -> Stacks:
        """Return the stacks of a group, made when something is kept at first."""
        if group.number not in self.stacks:
            states, tapes = self.places[group.number].counts
            flow = self.state or []
            types = self.layout.tape(group).kept_types if tapes else []
            self.stacks[group.number] = Stacks(
                empty_stacks(group.program.state, states + 1, flow),
                empty_stacks(types, tapes + 1, flow),
            )
        return self.stacks[group.number]

    def _table(self, part: Sequence[Action]) -> tuple[list[Step], list[Round]]:
        """Return what a part does as steps, and as the rounds that they make."""
        maker = _TableMaker(self)
        for action in part:
            maker.add(action)
        return maker.finish()


class _TableMaker:
    """Turns actions into steps and rounds; keeps account of the slots on the way."""

    def __init__(self, run: Looped) -> None:
        self._run = run
        self._steps: list[Step] = []
        self._rounds: list[Round] = []
        self._next = Step()
        self._tape = _NONE
        self._start = 0

    def add(self, action: Action) -> None:
        """Add an action."""
        if isinstance(action, Advance):
            for stage in range(action.start, action.stop):
                self._ends(replace(self._next, stage=stage, runs=True))
        elif isinstance(action, Keep):
            self._keep(action)
        elif isinstance(action, Load):
            self._load(self._run.slots[action.storage, action.index].value)
        elif isinstance(action, Drop):
            self._run.run_action(action)
        else:
            self._reverse(action.index)

    def finish(self) -> tuple[list[Step], list[Round]]:
        """Return all steps, and the rounds."""
        self._flush()
        return self._steps, self._rounds

    def _ends(self, step: Step) -> None:
        self._steps.append(step)
        self._next = Step()

    def _flush(self) -> None:
        if self._next != Step():
            self._ends(self._next)

    def _keep(self, action: Keep) -> None:
        run, is_tape = self._run, action.policy is not None
        places = run.places[run.layout.group_of(action.index).number]
        place = places.take(is_tape)
        run.slots[action.storage, action.index] = Held(place, is_tape)
        if is_tape:
            here = {"tape": place.number, "stage": action.index, "runs": True}
            self._ends(replace(self._next, **here))
        else:
            self._next = replace(self._next, keep=place.number)

    def _load(self, place: InStack) -> None:
        if self._next.keep != _NONE:
            self._flush()
        self._next = Step() if place.is_tape else Step(load=place.number)
        self._tape = place.number if place.is_tape else _NONE

    def _reverse(self, stage: int) -> None:
        if self._next.keep != _NONE:
            self._flush()
        stop = len(self._steps)
        one = Round(self._start, stop, self._next.load, self._tape, stage)
        self._rounds.append(one)
        self._next, self._tape, self._start = Step(), _NONE, stop


class Turn:
    """What a turn of the loops does, given a table's row.

    Args:
        layout: The chain's.
        group: The group that runs.
        given: The chain's arrays.
        steps: All that will run: where none keeps a tape, say, none is looked for.
        rounds: The same.
    """

    def __init__(
        self,
        layout: Layout,
        group: Group,
        given: Arrays,
        steps: Sequence[Step],
        rounds: Sequence[Round] = (),
    ) -> None:
        self._group = group
        self._given = given
        self._tape = layout.tape(group)
        self._loads = any(step.load != _NONE for step in steps)
        self._keeps = any(step.keep != _NONE for step in steps)
        self._tapes = any(step.tape != _NONE for step in steps)
        self._always_runs = all(step.runs for step in steps)
        self._from_tapes = any(one.tape != _NONE for one in rounds)

    def run(self, step: Step, state: Flat, stacks: Stacks) -> tuple[Flat, Stacks, Flat]:
        """Run a step; return state, stacks and the stage's auxiliary outputs."""
        if self._loads:
            state = _loaded(step.load, state, stacks)
        if self._keeps:
            states = _written(stacks.states, state, step.keep)
            stacks = replace(stacks, states=states)
        if self._always_runs:
            state, kept, aux = self._stage(step.stage, state)
        else:
            state, kept, aux = lax.cond(
                step.runs, self._stage, self._skipped, step.stage, state
            )
        if self._tapes:
            stacks = replace(stacks, tapes=_written(stacks.tapes, kept, step.tape))
        return state, stacks, aux

    def kept(self, one: Round, given: StageArrays, state: Flat, stacks: Stacks) -> Flat:
        """Return the tape that a round's reverse starts from."""
        state = _loaded(one.load, state, stacks)

        def now() -> Flat:
            return self._tape.forward(given.consts, state, given.layer)[1]

        if not self._from_tapes:
            return now()
        # Read outside of the branches: a stack that goes into one is copied.
        before = [at(x, jnp.maximum(one.tape, 0)) for x in stacks.tapes]
        return lax.cond(one.tape == _NONE, now, lambda: before)

    def _stage(self, stage: Any, state: Flat) -> tuple[Flat, Flat, Flat]:
        given, program = self._given.of(self._group, stage), self._group.program
        if not self._tapes:
            after, aux = program.run(given.consts, state, given.layer)
            return after, [], aux
        results, kept = self._tape.forward(given.consts, state, given.layer)
        return results[: program.num_after], kept, results[program.num_after :]

    def _skipped(self, stage: Any, state: Flat) -> tuple[Flat, Flat, Flat]:
        results = self._group.program.results[self._group.program.num_after :]
        kept = self._tape.kept_types if self._tapes else []
        return state, list(map(_jax.zeros, kept)), list(map(_jax.zeros, results))


def table(rows: Sequence[Any]) -> Any:
    """Return rows of numbers as one row of arrays."""
    return jax.tree.map(lambda *x: jnp.asarray(x), *rows)


def find_places(listed: ActionList, layout: Layout) -> dict[int, Places]:
    """Return the places that the groups need which can run in loops.

    They are those of which all is kept on the device, states and whole tapes.
    """
    places = {}
    for group in layout.groups:
        own = [
            a
            for a in listed
            if isinstance(a, (Keep, Drop)) and layout.group_of(a.index) is group
        ]
        if group.looped and all(map(_fits_stack, own)):
            places[group.number] = Places(*_most_held(own))
    return places


def parts_by_group(
    actions: Iterable[Action], layout: Layout
) -> Iterator[tuple[Group, list[Action]]]:
    """Cut actions into parts that concern one group each."""

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

    for number, found in itertools.groupby(single(), key=lambda pair: pair[0].number):
        yield layout.groups[number], [action for _, action in found]


def _fits_stack(action: Keep | Drop) -> bool:
    whole = isinstance(action, Drop) or isinstance(action.policy, Everything | None)
    return action.storage == "device" and whole


def _most_held(actions: Iterable[Keep | Drop]) -> tuple[int, int]:
    """Return how many states and tapes are kept at once, at most."""
    held: dict[int, bool] = {}
    most = [0, 0]
    for action in actions:
        if isinstance(action, Drop):
            del held[action.index]
            continue
        held[action.index] = is_tape = action.policy is not None
        most[is_tape] = max(most[is_tape], sum(x is is_tape for x in held.values()))
    return most[0], most[1]


def _loaded(number: Any, state: Flat, stacks: Stacks) -> Flat:
    before = [at(x, jnp.maximum(number, 0)) for x in stacks.states]
    return lax.cond(number == _NONE, lambda: state, lambda: before)


def _written(stacks: Flat, values: Flat, number: Any) -> Flat:
    """Write values into stacks; -1 is the last place, which nothing reads."""
    return [
        with_element(s, x, jnp.where(number == _NONE, s.shape[0] - 1, number))
        for s, x in zip(stacks, values, strict=True)
    ]
