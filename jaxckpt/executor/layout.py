"""How a chain's arrays lie: stages in groups, with own or stacked parameters."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxckpt import _jax
from jaxckpt.executor.program import StageProgram
from jaxckpt.executor.stage import stage_key
from jaxckpt.graph.gradient import is_inexact_type
from jaxckpt.layers_backward import spread
from jaxckpt.layers_body import Flat
from jaxckpt.layers_tape import Tape
from jaxckpt.policy import Policy, save_everything


@dataclass(frozen=True)
class Group:
    """Consecutive stages of one program whose parameters are one stack.

    Attributes:
        number: Which group.
        start: The first stage.
        stop: The stage behind the last.
        stacked: Whether parameters, and auxiliary outputs, are `[stages, ...]`; else
            it is one stage.
        looped: Whether its stages run in loops.
        program: The program of each.
    """

    number: int
    start: int
    stop: int
    stacked: bool
    looped: bool
    program: StageProgram

    @property
    def stages(self) -> int:
        """How many."""
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """The groups of a chain, and what is differentiated.

    Attributes:
        groups: One after another.
        wrt_consts: Which shared arrays are differentiated.
        wrt_params: Which parameters of a group are.
    """

    groups: tuple[Group, ...]
    wrt_consts: tuple[bool, ...] = ()
    wrt_params: tuple[tuple[bool, ...], ...] = ()

    def group_of(self, stage: int) -> Group:
        """Return the group of a stage; the last one's for the state behind it."""
        return self._groups_of[min(stage, len(self._groups_of) - 1)]

    @functools.cached_property
    def _groups_of(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups for _ in range(group.stages))

    def tape(self, group: Group, policy: Policy | None = None) -> Tape:
        """Return the tape of a group's stages."""
        wrt = self.wrt_params[group.number]
        return group.program.tape(policy or save_everything(), self.wrt_consts, wrt)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StageArrays:
    """What one stage is given besides its state.

    Attributes:
        consts: What it takes of the shared arrays.
        layer: Its parameters, and its key if it takes one.
    """

    consts: Flat
    layer: Flat


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Arrays:
    """What a chain is given besides its state.

    Attributes:
        consts: What stages share.
        params: Parameters of each group, flat.
        rng: None, or the chain's key.
    """

    consts: Flat
    params: list[Flat]
    rng: Any

    def of(self, group: Group, stage: Any) -> StageArrays:
        """Return what one stage is given, the stage a number or traced."""
        params = self.params[group.number]
        if group.stacked:
            position = stage - group.start
            params = [at(x, position) for x in params]
        key = [stage_key(self.rng, stage)] if group.program.takes_key else []
        return StageArrays(group.program.consts_of(self.consts), [*params, *key])


def at(stack: Any, position: Any) -> Any:
    """Return one element of a stack, by a number or a traced one."""
    if isinstance(position, int):
        return stack[position]
    return lax.dynamic_index_in_dim(
        stack, position, keepdims=False, allow_negative_indices=False
    )


def with_element(stack: Any, value: Any, position: Any) -> Any:
    """Return a stack with one element replaced, in place where that is possible."""
    return lax.dynamic_update_index_in_dim(
        stack, value, jnp.asarray(position, jnp.int32), 0, allow_negative_indices=False
    )


def empty_stacks(types: Sequence[Any], count: int, flow: Sequence[Any]) -> Flat:
    """Return stacks `[count, ...]` to be written over, made no earlier than a flow.

    As `layers_backward` makes those of gradients, and for the same reason: what depends
    on nothing is made when the program begins.
    """
    return [_filled(t, count, flow) for t in types]


def _filled(aval: Any, count: int, flow: Sequence[Any]) -> Any:
    shape = (count, *aval.shape)
    if is_key(aval):
        keys = (x.ravel()[0] for x in flow if x.dtype == aval.dtype and x.size)
        return jnp.broadcast_to(next(keys, jax.random.key(0)), shape)
    numbers = (x.ravel()[0].real for x in flow if _has_number(x))
    number = next(numbers, jnp.zeros(()))
    return jnp.broadcast_to(number.astype(aval.dtype), shape)


def _has_number(x: Any) -> bool:
    return not is_key(x) and x.size > 0 and not _jax.typed_by_mesh(jax.typeof(x))


def is_key(x: Any) -> bool:
    """Return whether an array, or a type, is of random keys."""
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gradients:
    """What the backward pass of a chain has so far.

    Attributes:
        flow: Cotangents of the state that the next reversed stage returned.
        consts: Of the shared arrays; None where not differentiated.
        params: Of each group's parameters that are differentiated; None before the
            first of its stages is reversed.
    """

    flow: Flat
    consts: list[Any]
    params: list[Any]


def reversed_stage(
    layout: Layout,
    group: Group,
    stage: Any,
    tape: Tape,
    given: StageArrays,
    kept: Flat,
    so_far: Gradients,
    d_aux: Sequence[Any],
    *,
    in_turn: bool = False,
) -> Gradients:
    """Run one stage backward from its tape.

    Args:
        layout: The chain's.
        group: The stage's.
        stage: Its number, which may be traced.
        tape: Its tape, and
        given: what it is given, and
        kept: what was kept.
        so_far: Gradients of the stages behind it.
        d_aux: Cotangents of its auxiliary output; None for zeros.
        in_turn: Whether nothing may go on before all of its gradients are there. The
            compiler may leave those of parameters, and all that they are made of, for
            the end, else: it does where it hides copies to the host.
    """
    program = group.program
    after = map(is_inexact_type, program.results[: program.num_after])
    cotangents = [*spread(so_far.flow, list(after)), *d_aux]
    found = tape.backward(given.consts, given.layer, kept, cotangents)
    consts, params = list(so_far.consts), list(so_far.params)
    shared, flow, own = program.split_gradients(found, layout.wrt_consts)
    for position, value in shared:
        consts[position] = _jax.add_any(consts[position], value)
    if in_turn:
        flow, own, consts = lax.optimization_barrier((flow, own, consts))
    if group.stacked:
        stacks = params[group.number]
        if stacks is None:
            stacks = gradient_stacks(layout, group, so_far.flow)
        position = stage - group.start
        own = [with_element(s, x, position) for s, x in zip(stacks, own, strict=True)]
    params[group.number] = own
    return Gradients(flow, consts, params)


def gradient_stacks(layout: Layout, group: Group, flow: Sequence[Any]) -> Flat:
    """Return what the gradients of a group's parameters are written to."""
    wrt = layout.wrt_params[group.number]
    wanted = zip(group.program.params, wrt, strict=True)
    return empty_stacks([t for t, w in wanted if w], group.stages, flow)


def aux_of(group: Group, stage: Any, stacks: Sequence[Any]) -> list[Any]:
    """Return one stage's part of what is stacked for a group; None stays."""
    if not group.stacked:
        return list(stacks)
    return [None if x is None else at(x, stage - group.start) for x in stacks]
