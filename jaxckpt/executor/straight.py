"""A list of actions as straight-line code: what a compiled chain does, one by one.

Everything that runs in the backward pass is bound to its turn by a barrier: the
compiler would otherwise take a stage's first run for its second, or begin the second
long before its turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax

from jaxckpt.executor.interpret import Interpreter, KeptTape
from jaxckpt.executor.layout import (
    Arrays,
    Gradients,
    Group,
    Layout,
    StageArrays,
    aux_of,
    empty_stacks,
    is_key,
    reversed_stage,
    with_element,
)
from jaxckpt.layers_body import Flat
from jaxckpt.layers_forward import numbers
from jaxckpt.policy import Policy


class Straight(Interpreter):
    """Runs actions one by one; an advance over equal stages is a loop where allowed.

    Args:
        layout: The chain's.
        given: Its arrays.
        state: x0; None in the backward pass.
        gradients: Where the backward pass begins; None in the forward pass.
        d_aux: Cotangents of the auxiliary outputs of each group; None for zeros.

    Attributes:
        aux: In the forward pass, the auxiliary outputs of each group so far.
        gradients: Those so far.
    """

    def __init__(
        self,
        layout: Layout,
        given: Arrays,
        state: Flat | None,
        gradients: Gradients | None = None,
        d_aux: Sequence[Sequence[Any]] = (),
    ) -> None:
        super().__init__(state)
        self.layout = layout
        self.given = given
        self.gradients = gradients
        self.d_aux = d_aux
        self.aux: list[Any] = [None] * len(layout.groups)
        self._moved: list[tuple[str, int]] = []
        self._fetched: StageArrays | None = None

    def forward(self, start: int, stop: int, state: Flat) -> Flat:
        """Run stages forward."""
        while start < stop:
            group = self.layout.group_of(start)
            end = min(stop, group.stop) if group.looped else start + 1
            state = self._advance(group, start, end, state)
            start = end
        return state

    def taped(self, index: int, state: Flat, policy: Policy) -> tuple[Flat, Any]:
        """Run a stage forward, and leave its tape."""
        group = self.layout.group_of(index)
        state, given = self._in_turn(state, self.given.of(group, index))
        tape = self.layout.tape(group, policy)
        results, kept = tape.forward(given.consts, state, given.layer)
        count = group.program.num_after
        self._put_aux(group, index, results[count:])
        self._fetched = None if self.gradients is None else given
        return self._after(results[:count]), KeptTape(kept, policy)

    def backward(self, index: int, tape: KeptTape) -> None:
        """Run a stage backward; `gradients` are then those with its own."""
        assert self.gradients is not None
        group = self.layout.group_of(index)
        given, flow, kept = self._fetched, self.gradients.flow, tape.kept
        self._fetched = None
        if given is None:
            given, flow, kept = lax.optimization_barrier(
                (self.given.of(group, index), flow, kept)
            )
        self.gradients = reversed_stage(
            self.layout,
            group,
            index,
            self.layout.tape(group, tape.policy),
            given,
            kept,
            replace(self.gradients, flow=flow),
            aux_of(group, index, self.d_aux[group.number]),
            in_turn=self.waits(group),
        )

    def waits(self, group: Group) -> bool:
        """Return whether all gradients of a reverse have to be there in its turn."""
        return True

    def put(self, key: tuple[str, int], value: Any) -> Any:
        """Return a value, in the host's memory if it is kept there."""
        if key[0] == "device":
            return value
        self._moved.append(key)
        return _moved(value, jax.memory.Space.Host)

    def get(self, key: tuple[str, int], held: Any) -> Any:
        """Return a value on the device; in the backward pass only in its turn."""
        self._fetched = None
        value = held
        if key[0] == "host":
            value = _moved(held, jax.memory.Space.Device)
        if self.gradients is None:
            return value
        value, flow = lax.optimization_barrier((value, self.gradients.flow))
        self.gradients = replace(self.gradients, flow=flow)
        return value

    def _advance(self, group: Group, start: int, stop: int, state: Flat) -> Flat:
        program = group.program
        if stop - start == 1:
            state, given = self._in_turn(state, self.given.of(group, start))
            state, aux = program.run(given.consts, state, given.layer)
            self._put_aux(group, start, aux)
            return self._after(state)

        def body(carry: Any, step: Any) -> tuple[Any, None]:
            state, stacks = carry
            stage = start + step
            given = self.given.of(group, stage)
            state, aux = program.run(given.consts, state, given.layer)
            return (state, self._with_aux(group, stage, stacks, aux)), None

        stacks = self._aux_stacks(group)
        (state, stacks), _ = lax.scan(body, (state, stacks), numbers(stop - start))
        self.aux[group.number] = stacks
        return self._after(state)

    def _in_turn(self, state: Flat, given: StageArrays) -> tuple[Flat, StageArrays]:
        if self.gradients is None:
            return state, given
        return lax.optimization_barrier((state, given))

    def _after(self, state: Flat) -> Flat:
        """Return a state that is there only when copies to the host have been made.

        The compiler puts a copy as late as it can, else, so that what is copied stays
        on the device until the backward pass.
        """
        for key in self._moved:
            if key in self.slots:
                held = self.slots[key]
                state, value = lax.optimization_barrier((state, held.value))
                self.slots[key] = replace(held, value=value)
        self._moved = []
        return state

    def _put_aux(self, group: Group, stage: int, aux: Flat) -> None:
        stacks = self._aux_stacks(group)
        self.aux[group.number] = self._with_aux(group, stage, stacks, aux)

    def _with_aux(self, group: Group, stage: Any, stacks: Any, aux: Flat) -> Any:
        if self.gradients is not None:
            return None
        if not group.stacked:
            return aux
        position = stage - group.start
        return [with_element(s, x, position) for s, x in zip(stacks, aux, strict=True)]

    def _aux_stacks(self, group: Group) -> Any:
        """Return what the auxiliary outputs of a group are written to."""
        stacks = self.aux[group.number]
        if stacks is None and group.stacked and self.gradients is None:
            types = group.program.results[group.program.num_after :]
            return empty_stacks(types, group.stages, [])
        return stacks


def _moved(value: Any, space: Any) -> Any:
    def move(x: Any) -> Any:
        return x if is_key(x) else jax.device_put(x, space)

    return jax.tree.map(move, value)
