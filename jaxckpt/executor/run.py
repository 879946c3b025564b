"""`checkpoint_chain`: any legal list of actions as a differentiable function."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxckpt import _jax
from jaxckpt.errors import ScheduleError, WorkloadError
from jaxckpt.executor.actions import Action, ActionList, Keep, as_actions
from jaxckpt.executor.interpret import Held
from jaxckpt.executor.layout import Arrays, Gradients, Group, Layout
from jaxckpt.executor.loops import InStack, Looped
from jaxckpt.executor.program import StageProgram, TracedChain, trace_chain
from jaxckpt.executor.simulate import simulate
from jaxckpt.executor.stage import Stage, as_stages, check_shared
from jaxckpt.executor.straight import Straight
from jaxckpt.graph.gradient import is_inexact_type
from jaxckpt.layers_backward import spread
from jaxckpt.layers_body import Flat, strong
from jaxckpt.layers_explicit import instantiated, is_zero, perturbed

PyTree = Any


@dataclass(frozen=True)
class Repeat:
    """Equal stages one after another, whose parameters are one stack.

    Attributes:
        stage: What stands for one of them.
        times: How many there are.
    """

    stage: Any
    times: int

    def __post_init__(self) -> None:
        times = self.times
        if isinstance(times, bool) or not isinstance(times, int) or times < 1:
            raise WorkloadError(
                f"`times={times!r}` is not a number of stages. Use 1 or more."
            )


def repeat(stage: Any, times: int) -> Repeat:
    """Return equal stages for `checkpoint_chain`, with stacked parameters `[times, ..]`.

    Stages given one by one are stacked where they run in a loop, which takes a copy of
    their parameters and gradients; these are not.

    Args:
        stage: What stands for one of them.
        times: How many there are.

    Example:
        >>> repeat(abs, 4).times
        4
    """
    return Repeat(stage, times)


def checkpoint_chain(
    stages: Sequence[Any],
    actions: Iterable[Action],
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
            for the number of stages. A state kept on `"host"` is moved to the host's
            memory, where the backend has one.
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
        >>> chain = checkpoint_chain([lambda w, x: jnp.tanh(x @ w)] * 10, binomial(10, 3))
        >>> weights = list(jax.random.normal(jax.random.key(0), (10, 4, 4)))
        >>> loss = lambda weights, x: jnp.sum(chain(weights, x))
        >>> gradients = jax.jit(jax.grad(loss))(weights, jnp.ones((2, 4)))
        >>> len(gradients), gradients[0].shape
        (10, (4, 4))
    """
    repeats, links = _links(stages)
    listed = as_actions(actions, len(links))
    simulate(listed, steps=len(links))
    _refuse_disk(listed)

    def chain(
        params: Sequence[PyTree], x: PyTree, *, rng: Any = None, **shared: PyTree
    ) -> Any:
        _check_params(params, repeats)
        check_shared(links, shared)
        strong_params, shared = jax.tree.map(strong, (list(params), shared))
        own = _slices(strong_params, repeats)
        traced = trace_chain(links, own, x, rng, shared, has_aux=has_aux)
        layout = Layout(traced, _groups(traced, repeats, scan))
        stacked = _stacked(layout, strong_params, repeats)
        result, aux = _differentiable(layout, listed)(
            Arrays(traced.consts, stacked, rng), traced.state
        )
        y = traced.result_tree.unflatten(result)
        return (y, _aux(layout, repeats, aux)) if has_aux else y

    return chain


def _links(stages: Sequence[Any]) -> tuple[list[int | None], list[Stage]]:
    """Return how often each entry stands (None for a single stage), and all stages."""
    plain = isinstance(stages, Sequence) and not isinstance(stages, str)
    entries = list(stages) if plain else stages
    repeats = [e.times if isinstance(e, Repeat) else None for e in entries]
    forms = as_stages([e.stage if isinstance(e, Repeat) else e for e in entries])
    links: list[Stage] = []
    for form, times in zip(forms, repeats, strict=True):
        links += [form] * (times or 1)
    return repeats, links


def _refuse_disk(actions: ActionList) -> None:
    for number, action in enumerate(actions):
        if isinstance(action, Keep) and action.storage == "disk":
            raise ScheduleError(
                f"Action {number}, `{action}`: a compiled program cannot write to "
                "disk. Use `ManualCheckpoint`, or keep it on the host."
            )


def _check_params(params: Any, repeats: Sequence[int | None]) -> None:
    if not isinstance(params, (list, tuple)) or len(params) != len(repeats):
        count = len(params) if isinstance(params, (list, tuple)) else None
        given = f"{count} trees" if count is not None else f"`{type(params).__name__}`"
        raise WorkloadError(
            f"`params` is {given}, and the chain has {len(repeats)} stages. Give a "
            "list with one tree of parameters for each (None where it has none)."
        )
    for number, (own, times) in enumerate(zip(params, repeats, strict=True)):
        leaves = jax.tree.leaves(own) if times is not None else []
        wrong = [x for x in leaves if jax.numpy.shape(x)[:1] != (times,)]
        if wrong:
            raise WorkloadError(
                f"Parameters of entry {number} have shapes such as "
                f"{jax.numpy.shape(wrong[0])}. Those of `repeat(stage, {times})` are "
                f"stacked: `[{times}, ...]`."
            )


def _slices(params: Sequence[PyTree], repeats: Sequence[int | None]) -> list[PyTree]:
    """Return the abstract parameters of each stage."""
    own: list[PyTree] = []
    for tree, times in zip(params, repeats, strict=True):
        if times is None:
            own.append(tree)
        else:
            one = jax.eval_shape(lambda t: jax.tree.map(lambda x: x[0], t), tree)
            own += [one] * times
    return own


LOOP_FROM = 4
"""From how many equal stages on they run in a loop, if they are given one by one."""


def _groups(
    traced: TracedChain, repeats: Sequence[int | None], scan: bool
) -> tuple[Group, ...]:
    """Return the groups: what is given as a stack, and equal stages that can loop."""
    groups: list[Group] = []
    start = 0
    for program, same, times in _runs(traced.programs, repeats):
        joined = times is not None or (scan and same >= LOOP_FROM)
        for _ in range(1 if joined else same):
            stop = start + (same if joined else 1)
            looped = joined and scan
            groups.append(Group(len(groups), start, stop, joined, looped, program))
            start = stop
    return tuple(groups)


def _runs(
    programs: Sequence[StageProgram], repeats: Sequence[int | None]
) -> list[tuple[StageProgram, int, int | None]]:
    """Return runs of equal single stages, and each stack: program, length, stack's."""
    runs: list[tuple[StageProgram, int, int | None]] = []
    start = 0
    for times in repeats:
        program, count = programs[start], times or 1
        if any(p is not program for p in programs[start : start + count]):
            raise WorkloadError(
                f"{program.label} changes the type of the state, so that it cannot be "
                "repeated. Each of equal stages must return what the next one takes."
            )
        if times is None and runs and runs[-1][0] is program and runs[-1][2] is None:
            runs[-1] = (program, runs[-1][1] + 1, None)
        else:
            runs.append((program, count, times))
        start += count
    return runs


def _stacked(
    layout: Layout, params: Sequence[PyTree], repeats: Sequence[int | None]
) -> list[Flat]:
    """Return the parameters of each group, flat."""
    rest = list(zip(params, repeats, strict=True))
    groups = []
    for group in layout.groups:
        tree, times = rest.pop(0)
        leaves = jax.tree.leaves(tree)
        if group.stacked and times is None:
            more = [rest.pop(0)[0] for _ in range(group.stages - 1)]
            others = [jax.tree.leaves(t) for t in more]
            leaves = [jax.numpy.stack(x) for x in zip(leaves, *others, strict=True)]
        groups.append(leaves)
    return groups


def _aux(
    layout: Layout, repeats: Sequence[int | None], aux: Sequence[Flat]
) -> list[PyTree]:
    """Return the auxiliary outputs of each entry; those of a stack are stacked."""
    entries: list[PyTree] = []
    for group, leaves in zip(layout.groups, aux, strict=True):
        tree = group.program.aux_tree
        if not group.stacked or repeats[len(entries)] is not None:
            entries.append(tree.unflatten(leaves))
            continue
        for position in range(group.stages):
            entries.append(tree.unflatten([x[position] for x in leaves]))
    return entries


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
