"""`apply`: any function under a plan, without a change to its code.

The function is traced, its stacks are found, and the traced program is run: stacks
under their schedules, all else as it stands. Scanned stacks go through `run_layers`;
layers that stand one after another become nested `jax.checkpoint`s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax

from jaxckpt import _jax
from jaxckpt.errors import PlanError
from jaxckpt.graph.flops import equations
from jaxckpt.graph.inline import has_remat, is_stack
from jaxckpt.graph.stages import Chain, stages
from jaxckpt.remat_flax import with_nnx_state
from jaxckpt.rewrite_call import Call, is_array, trace_call
from jaxckpt.rewrite_find import Rules, as_ruled, find_ruled
from jaxckpt.rewrite_program import Rewriter
from jaxckpt.rewrite_remat import without_own_remat
from jaxckpt.stack_call import use

Function = TypeVar("Function", bound=Callable[..., Any])


def apply(plan: Rules, fn: Function) -> Function:
    """Return a function that follows a plan: same signature, values and gradients.

    It is traced at each call, so put it under `jax.jit` as part of the training step.
    Arrays that it closes over, its static arguments and its nnx Modules are as in a
    plain call. A stack that the plan does not mention stays as it is.

    Args:
        plan: What to follow (`jaxckpt.plan.Plan`).
        fn: The function, scanned or unrolled, with remat of its own or without.

    Raises:
        TypeError: `fn` is no function.
        PlanError: When called, if the program has not the stacks of the plan.
        PolicyError: When called, for a name pattern without effect.
        WorkloadError: When called, for a rematerialised layer with an `io_callback`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxckpt.plan import plan_from
        >>> def loss(weights, x):
        ...     x, _ = jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, weights)
        ...     return jnp.sum(x)
        >>> weights, x = jnp.full((8, 4, 4), 0.1), jnp.ones((2, 4))
        >>> plan = plan_from("every(4)", loss, weights, x)
        >>> planned = jax.grad(apply(plan, loss))(weights, x)
        >>> bool(jnp.allclose(planned, jax.grad(loss)(weights, x)))
        True
    """
    _check_callable(fn)

    def of_arrays(fn: Callable[..., Any], label: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return _run(plan, fn, label, args, kwargs)

        return call

    return cast(Function, with_nnx_state(fn, of_arrays, ()))


def find_chain(fn: Callable[..., Any], args: Sequence[Any], *, existing: str) -> Chain:
    """Return the program of a call as a chain of stages, as `apply` sees it.

    Args:
        fn: The function.
        args: Its arguments; arrays may be abstract.
        existing: `"replace"` to take away remat that is there, also the schedules of
            `jaxckpt.Stack`s; `"keep"` to leave it.
    """
    _check_callable(fn)
    found: list[Chain] = []

    def of_arrays(fn: Callable[..., Any], label: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            call = _traced(fn, args, kwargs, existing)
            found.append(stages(call.closed, remat=existing == "replace"))
            outputs = _jax.jaxpr_function(call.closed)(*call.arrays)
            return call.results(outputs)

        return call

    try_call(with_nnx_state(fn, of_arrays, ()), args)
    return found[-1]


def try_call(fn: Callable[..., Any], args: Sequence[Any]) -> None:
    """Trace a call for the errors that this finds; arrays may be abstract."""
    leaves, tree = jax.tree.flatten(tuple(args))
    places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

    def flat(*values: Any) -> list[Any]:
        filled = list(leaves)
        for place, value in zip(places, values, strict=True):
            filled[place] = value
        results = fn(*jax.tree.unflatten(tree, filled))
        return [x for x in jax.tree.leaves(results) if isinstance(x, jax.Array)]

    jax.eval_shape(flat, *(leaves[i] for i in places))


def _run(
    plan: Rules,
    fn: Callable[..., Any],
    label: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    call = _traced(fn, args, kwargs, plan.existing)
    if plan.existing == "replace" and has_remat(call.closed):
        chain, found = without_own_remat(
            call.closed, lambda chain: find_ruled(plan, chain, label)
        )
    else:
        chain = stages(call.closed, remat=False)
        found = find_ruled(plan, chain, label)
    if plan.existing == "replace" and len(found) < len(chain.stacks):
        _check_others(fn, args, kwargs, label)
    outputs = Rewriter(as_ruled(plan, found), plan.form).run(chain.closed, call.arrays)
    return call.results(outputs)


def _traced(fn: Callable[..., Any], args: Any, kwargs: Any, existing: str) -> Call:
    with use(None) if existing == "replace" else contextlib.nullcontext():
        return trace_call(fn, args, kwargs)


def _check_others(fn: Callable[..., Any], args: Any, kwargs: Any, label: str) -> None:
    """Raise `PlanError` where a `jaxckpt.Stack` would lose its schedule in silence."""
    call = trace_call(fn, args, kwargs)
    if any(is_stack(eqn) for eqn, _ in equations(call.closed)):
        raise PlanError(
            f"The plan leaves out stacks of {label}, which has a `jaxckpt.Stack` with "
            "a schedule of its own. Give each stack a rule, `none` for no remat."
        )


def _check_callable(fn: Any) -> None:
    if not callable(fn):
        raise TypeError(f"`fn={fn!r}` is no function.")
