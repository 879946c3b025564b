"""Equal stages in loops: the actions as a table that a loop of fixed size reads.

What a list does to a run of equal stages becomes numbers: of slots in one stack of
states (and one of tapes), and of stages. The forward pass is a scan over *steps*, each
of which runs one stage at most. The backward pass is a scan over *rounds*: a round runs
the steps up to one reverse in an inner loop, and then that. So the program holds two or
three copies of a stage, however many stages and actions there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    Keep,
    Load,
    Reverse,
    storage_of,
)
from jaxckpt.executor.interpret import KeptTape
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
    is_key,
    reversed_stage,
    with_element,
)
from jaxckpt.executor.straight import Straight
from jaxckpt.executor.table import (
    NONE,
    InStack,
    Round,
    Step,
    Table,
    TableMaker,
    columns,
    find_places,
    parts_by_group,
)
from jaxckpt.layers_body import Flat
from jaxckpt.policy import save_everything


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stacks:
    """What is kept of a group's stages.

    Attributes:
        states: `[places, ...]`.
        tapes: `[places, ...]`, empty where no tape is kept.
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
        self._has_host = any(map(_elsewhere, listed))

    def run(self, actions: Iterable[Action]) -> None:
        """Run actions, those on equal stages in loops."""
        for group, part in parts_by_group(actions, self.layout):
            if group.number not in self.places or _elsewhere(part[0]):
                super().run(part)
            else:
                self._run_part(group, part)

    def waits(self, group: Group) -> bool:
        """Return whether gradients have to be there in turn: loops see to it, else."""
        return self._has_host or group.number not in self.places

    def put(self, key: tuple[str, int], value: Any) -> Any:
        """Return what a slot holds: a place in a stack, of equal stages."""
        group = self.layout.group_of(key[1])
        if group.number not in self.places or key[0] != "device":
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
        """Return what a slot holds, from its stack if it is there."""
        if not isinstance(held, InStack):
            return super().get(key, held)
        stacks = self._stacks(self.layout.group_of(key[1]))
        if held.is_tape:
            kept = [at(x, held.number) for x in stacks.tapes]
            return super().get(key, KeptTape(kept, save_everything()))
        return super().get(key, [at(x, held.number) for x in stacks.states])

    def discard(self, key: tuple[str, int], held: Any) -> None:
        """Free a place in a stack."""
        if isinstance(held, InStack):
            self.places[self.layout.group_of(key[1]).number].give_back(held)

    def _run_part(self, group: Group, part: Sequence[Action]) -> None:
        if self.tape is not None:
            # What a loaded tape is for is not in the table.
            ends = [i for i, a in enumerate(part, 1) if isinstance(a, (Reverse, Load))]
            end = ends[0] if ends else len(part)
            super().run(part[:end])
            part = part[end:]
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
        made = self._table(group, part)
        turn = Turn(self.layout, group, self.given, made)

        def body(carry: Any, step: Step) -> tuple[Any, None]:
            state, stacks, outputs = carry
            state, stacks, aux = turn.run(step, state, stacks)
            if not turn.always_runs:
                before = aux_of(group, step.stage, outputs)
                aux = lax.cond(step.runs, lambda: aux, lambda: before)
            outputs = self._with_aux(group, step.stage, outputs, aux)
            return (state, stacks, outputs), None

        carry = self._working(group), self._stacks(group), self._aux_stacks(group)
        carry, _ = lax.scan(body, carry, columns(made.steps))
        self.state, self.stacks[group.number], self.aux[group.number] = carry

    def _run_rounds(self, group: Group, part: Sequence[Action]) -> None:
        """Run a part of the backward pass that ends with a reverse."""
        assert self.gradients is not None
        state = self._working(group)
        made = self._table(group, part)
        turn = Turn(self.layout, group, self.given, made)
        d_aux = self.d_aux[group.number]
        steps = columns(made.steps or [Step()])

        def inner(number: Any, carry: Any) -> Any:
            step = jax.tree.map(lambda x: at(x, number), steps)
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
        carry, _ = lax.scan(body, carry, columns(made.rounds))
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
        """Return the working state; anything, where the first step loads one."""
        if self.state is not None:
            return self.state
        # Keys come from the stacks, of their own kind; zeros take no memory.
        keys = [x[0] for x in self._stacks(group).states if x.shape[0] and is_key(x)]
        return [x[0] for x in empty_stacks(group.program.state, 1, keys)]

    def _stacks(self, group: Group) -> Stacks:
        """Return the stacks of a group, made when something is kept at first."""
        if group.number not in self.stacks:
            states, tapes = self.places[group.number].sizes
            flow = self.state or (self.gradients.flow if self.gradients else [])
            types = self.layout.tape(group).kept_types if tapes else []
            self.stacks[group.number] = Stacks(
                empty_stacks(group.program.state, states, flow),
                empty_stacks(types, tapes, flow),
            )
        return self.stacks[group.number]

    def _table(self, group: Group, part: Sequence[Action]) -> Table:
        """Return what a part does as steps, and as the rounds that they make."""
        maker = TableMaker(self.slots, self.places[group.number])
        for action in part:
            maker.add(action)
        return maker.finish()


class Turn:
    """What a turn of the loops does, given a table's row.

    Args:
        layout: The chain's.
        group: The group that runs.
        given: The chain's arrays.
        made: All that will run: where none keeps a tape, say, none is looked for.

    Attributes:
        always_runs: Whether each step runs a stage.
    """

    def __init__(
        self,
        layout: Layout,
        group: Group,
        given: Arrays,
        made: Table,
    ) -> None:
        self._group = group
        self._given = given
        self._tape = layout.tape(group)
        self._loads = any(step.load != NONE for step in made.steps)
        self._keeps, self._tapes = made.keeps
        self.always_runs = all(step.runs for step in made.steps)
        self._from_states = any(one.load != NONE for one in made.rounds)
        self._from_tapes = any(one.tape != NONE for one in made.rounds)

    def run(self, step: Step, state: Flat, stacks: Stacks) -> tuple[Flat, Stacks, Flat]:
        """Run a step; return state, stacks and the stage's auxiliary outputs."""
        if self._loads:
            state = _loaded(step.load, state, stacks)
        if self._keeps:
            states = _written(stacks.states, state, step.keep)
            stacks = replace(stacks, states=states)
        if self.always_runs:
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
        if self._from_states:
            state = _loaded(one.load, state, stacks)

        def now() -> Flat:
            return self._tape.forward(given.consts, state, given.layer)[1]

        if not self._from_tapes:
            return now()
        # Read outside of the branches: a stack that goes into one is copied.
        before = [at(x, jnp.maximum(one.tape, 0)) for x in stacks.tapes]
        return lax.cond(one.tape == NONE, now, lambda: before)

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


def _elsewhere(action: Action) -> bool:
    """Return whether an action keeps or loads something off the device."""
    return storage_of(action) != "device"


def _loaded(number: Any, state: Flat, stacks: Stacks) -> Flat:
    before = [at(x, jnp.maximum(number, 0)) for x in stacks.states]
    return lax.cond(number == NONE, lambda: state, lambda: before)


def _written(stacks: Flat, values: Flat, number: Any) -> Flat:
    return [with_element(s, x, number) for s, x in zip(stacks, values, strict=True)]
