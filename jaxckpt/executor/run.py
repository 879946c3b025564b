"""`checkpoint_chain`: any legal list of actions as a differentiable function."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxckpt import _jax
from jaxckpt.errors import ScheduleError, WorkloadError
from jaxckpt.executor.actions import ActionList, Keep, as_actions
from jaxckpt.executor.entries import (
    as_groups,
    as_links,
    check_params,
    entry_aux,
    group_params,
    stage_params,
)
from jaxckpt.executor.from_schedule import actions_from
from jaxckpt.executor.interpret import Held
from jaxckpt.executor.layout import Arrays, Gradients, Layout
from jaxckpt.executor.loops import InStack, Looped
from jaxckpt.executor.program import trace_chain
from jaxckpt.executor.simulate import simulate
from jaxckpt.executor.stage import check_key, check_shared
from jaxckpt.executor.straight import Straight
from jaxckpt.graph.gradient import is_inexact_type
from jaxckpt.layers_backward import spread
from jaxckpt.layers_body import Flat, strong
from jaxckpt.layers_explicit import instantiated, is_zero, perturbed
from jaxckpt.plan import Plan
from jaxckpt.policy import Policy
from jaxckpt.schedule import Schedule

PyTree = Any


def checkpoint_chain(
    stages: Any,
    actions: Any,
    *,
    has_aux: bool = False,
    scan: bool = True,
) -> Callable[..., Any]:
    """Return a chain of stages as a function whose gradient follows a list of actions.

    The function is `chain(params, x, *, rng=None, **shared)`. It returns what the last
    stage returns; with `has_aux` that and the list of all auxiliary outputs, which may
    be differentiated too. Use it under `jax.jit` and `jax.grad`; the result and the
    gradients are those of the plain composition.

    Args:
        stages: Functions `stage(params, x) -> y`, linen Modules, nnx Modules, or
            `repeat(stage, times)`. The chain's keywords reach the stages that name
            them: `rng`, a key of their own, the same whenever they run again; and
            arrays that several stages share, which get gradients too, as do arrays
            that a stage closes over.
        actions: An `ActionList`, or any sequence of actions, that `simulate` accepts
            for the number of stages; or what `actions_from` makes one of, such as
            `"every(4)"`. A state kept on `"host"` is moved to the host's memory, where
            the backend has one.
        has_aux: Whether each stage returns `(y, aux)`.
        scan: Whether equal stages run in loops, so that the program's size does not
            depend on their number; else they stand one after another, once for each
            run.

    Raises:
        ScheduleError: The list is illegal, made for another depth, or keeps something
            on disk (`ManualCheckpoint` does).
        WorkloadError: When called: there is not one tree of parameters for each stage,
            or a stage does not take what the one before it returns.

    There is no forward mode through it, and no second derivative in reverse mode
    through its loops; Hessian-vector products by forward over reverse work.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxckpt.executor import binomial
        >>> stage = lambda w, x: jnp.tanh(x @ w)
        >>> chain = checkpoint_chain([stage] * 10, binomial(10, 3))
        >>> weights = list(jax.random.normal(jax.random.key(0), (10, 4, 4)))
        >>> loss = lambda weights, x: jnp.sum(chain(weights, x))
        >>> gradients = jax.jit(jax.grad(loss))(weights, jnp.ones((2, 4)))
        >>> len(gradients), gradients[0].shape
        (10, (4, 4))
    """
    repeats, links = as_links(stages)
    if isinstance(actions, (str, Schedule, Plan, Policy)):
        actions = actions_from(actions, len(links))
    simulate(actions, steps=len(links))
    listed = as_actions(actions, len(links))
    _refuse_disk(listed)

    def chain(params: Any, x: PyTree, *, rng: Any = None, **shared: PyTree) -> Any:
        check_params(params, repeats)
        check_shared(links, shared)
        check_key(rng)
        strong_params, shared = jax.tree.map(strong, (list(params), shared))
        own = stage_params(strong_params, repeats)
        traced = trace_chain(links, own, x, rng, shared, has_aux=has_aux)
        given = jax.tree.leaves((strong_params, traced.state, traced.consts))
        loops = scan and not any(_jax.typed_by_mesh(jax.typeof(v)) for v in given)
        _refuse_varying(given)
        layout = Layout(as_groups(traced, repeats, loops))
        stacked = group_params(layout, strong_params, repeats)
        result, aux = _differentiable(layout, listed)(
            Arrays(traced.consts, stacked, rng), traced.state
        )
        y = traced.result_tree.unflatten(result)
        return (y, entry_aux(layout, repeats, aux)) if has_aux else y

    return chain


def _refuse_disk(actions: ActionList) -> None:
    for number, action in enumerate(actions):
        if isinstance(action, Keep) and action.storage == "disk":
            raise ScheduleError(
                f"Action {number}, `{action}`: a compiled program cannot write to "
                "disk. Use `ManualCheckpoint`, or keep it on the host."
            )


def _refuse_varying(given: Sequence[Any]) -> None:
    varies = any(_jax.varies_over_mesh(jax.typeof(x)) for x in given)
    if varies and _jax.version() < (0, 12):
        raise WorkloadError(
            "A chain inside `jax.shard_map` needs jax 0.12 or newer, or "
            "`check_vma=False`: before, JAX changes the types of what a derivative "
            "rule is given."
        )


def _differentiable(layout: Layout, listed: ActionList) -> Callable[..., Any]:
    """Return `(arrays, x0) -> (x[steps], aux of each group)`, all flat."""

    @jax.custom_vjp
    def jaxckpt_chain(given: Arrays, state: Flat) -> tuple[Flat, list[Flat]]:
        run = Straight(layout, given, state)
        return run.forward(0, listed.steps, state), run.aux

    def forward(given: Any, state: Any) -> Any:
        wrt = replace(
            layout,
            wrt_consts=perturbed(given.consts),
            wrt_params=tuple(map(perturbed, given.params)),
        )
        given, state = jax.tree.map(lambda x: x.value, (given, state))
        run = Looped(wrt, given, state, listed=listed)
        after = run.run_forward(listed)
        where, arrays = _packed(run.slots)
        rule = functools.partial(_backward, wrt, listed, where, run.places)
        rest = jax.tree_util.Partial(rule, given, arrays, run.stacks, run.tape)
        return (after, run.aux), rest

    def backward(residuals: Any, cotangents: Any) -> Any:
        return residuals(*cotangents)

    jaxckpt_chain.defvjp(forward, backward, symbolic_zeros=True)
    return jaxckpt_chain


def _backward(
    layout: Layout,
    listed: ActionList,
    where: Any,
    places: Any,
    given: Arrays,
    arrays: Any,
    stacks: Any,
    tape: Any,
    d_after: Sequence[Any],
    d_aux: Sequence[Sequence[Any]],
) -> tuple[Any, Any]:
    """Return the cotangents of arrays and x0; None where there is none."""
    zeros = [
        _jax.zeros(jax.typeof(x)) if w else None
        for x, w in zip(given.consts, layout.wrt_consts, strict=True)
    ]
    so_far = Gradients(instantiated(d_after), zeros, [None] * len(layout.groups))
    d_aux = [[None if is_zero(x) else x for x in group] for group in d_aux]
    run = Looped(layout, given, None, so_far, d_aux, listed=listed)
    run.slots, run.places = _unpacked(where, arrays), copy.deepcopy(places)
    run.stacks, run.tape = stacks, tape
    run.run(listed[listed.forward_length :])
    found = run.gradients
    assert found is not None
    params = [
        spread(own, wrt)
        for own, wrt in zip(found.params, layout.wrt_params, strict=True)
    ]
    inexact = [is_inexact_type(t) for t in layout.groups[0].program.state]
    return Arrays(found.consts, params, None), spread(found.flow, inexact)


def _packed(slots: dict[tuple[str, int], Held]) -> tuple[Any, list[Any]]:
    """Return slots as what is known when tracing, and the arrays in them."""
    where = [
        (key, held.is_tape, held.value if isinstance(held.value, InStack) else None)
        for key, held in slots.items()
    ]
    arrays = [h.value for h in slots.values() if not isinstance(h.value, InStack)]
    return where, arrays


def _unpacked(where: Any, arrays: Any) -> dict[tuple[str, int], Held]:
    rest = iter(arrays)
    return {
        key: Held(next(rest) if place is None else place, is_tape)
        for key, is_tape, place in where
    }
