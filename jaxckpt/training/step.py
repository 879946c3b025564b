"""One training step from a loss function and an optimizer."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxckpt.errors import WorkloadError
from jaxckpt.host_memory import keep_on_host
from jaxckpt.training.state import TrainState

PyTree = Any
Step = Callable[[TrainState, PyTree], tuple[TrainState, dict[str, Any]]]
GradFn = Callable[[PyTree, PyTree, Array], tuple[tuple[Array, PyTree], PyTree]]


def make_train_step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
    offload_optimizer: bool = False,
) -> jax.stages.Wrapped:
    """Return `step(state, batch) -> (state, metrics)`, jitted, `state` donated.

    The state handed in is used up: its buffers become those of the one returned. The
    arguments are those of `train_step_fn`, the same step as a pure function.

    Example:
        >>> loss_fn = lambda params, batch: jnp.mean((params["w"] - batch) ** 2)
        >>> optimizer = optax.sgd(0.5)
        >>> params = {"w": jnp.zeros(())}
        >>> state = TrainState.create(params, optimizer, jax.random.key(0))
        >>> step = make_train_step(loss_fn, optimizer)
        >>> state, metrics = step(state, jnp.ones(4))
        >>> float(metrics["loss"]), float(state.params["w"])
        (1.0, 1.0)
    """
    step = train_step_fn(
        loss_fn,
        optimizer,
        accumulate=accumulate,
        clip_norm=clip_norm,
        offload_optimizer=offload_optimizer,
    )
    return jax.jit(step, donate_argnums=0)


def train_step_fn(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
    offload_optimizer: bool = False,
) -> Step:
    """Return one training step as a pure function, to export or to wrap.

    Its metrics are `loss`, `grad_norm` (of the whole gradient, before clipping) and, if
    the loss function returns it, `aux`.

    Args:
        loss_fn: `loss_fn(params, batch)` returns a scalar, or the scalar and a tree of
            arrays. One that takes `rng` gets a new key each step.
        optimizer: Turns gradients into updates.
        accumulate: In how many equal parts of its leading axis to cut the batch, one
            after the other; gradients, loss and aux are the means over the parts.
        clip_norm: Scale gradients down to this global norm; None leaves them.
        offload_optimizer: Whether the optimizer's state lives in host memory between
            the steps. It has to begin there (see `jaxckpt.host_memory.keep_on_host`).

    Raises:
        WorkloadError: A setting is out of range; or, when traced, the batch cannot be
            cut in `accumulate` parts, the loss is not a scalar, or the state to offload
            is on the device.
    """
    if accumulate < 1:
        raise WorkloadError(
            f"`accumulate={accumulate}` is not a number of parts. Use 1 (the whole "
            "batch at once) or a divisor of the batch."
        )
    if clip_norm is not None and not clip_norm > 0:
        raise WorkloadError(
            f"`clip_norm={clip_norm}` must be above 0. Use None not to clip."
        )
    if offload_optimizer:
        optimizer = keep_on_host(optimizer)
    grad_fn = _make_grad_fn(loss_fn)
    if accumulate > 1:
        grad_fn = _accumulated(grad_fn, accumulate)

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
        rng = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
        (loss, aux), grads = grad_fn(state.params, batch, rng)
        norm = optax.tree.norm(grads)
        if clip_norm is not None:
            grads = _scale(grads, jnp.minimum(1.0, clip_norm / (norm + 1e-12)))
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "grad_norm": norm}
        if aux is not None:
            metrics["aux"] = aux
        new = {"step": state.step + 1, "params": params, "opt_state": opt_state}
        return dataclasses.replace(state, **new), metrics

    return step


def call_loss(
    loss_fn: Callable[..., Any], params: PyTree, batch: PyTree, rng: Array | None
) -> tuple[Array, PyTree]:
    """Return `(loss, aux)` of any loss function; `aux` is None if it returns none.

    Args:
        loss_fn: As for `train_step_fn`.
        params: Its first argument.
        batch: Its second.
        rng: Handed on by keyword if not None and if `loss_fn` takes it.
    """
    takes_rng = rng is not None and _takes_rng(loss_fn)
    result = loss_fn(params, batch, **({"rng": rng} if takes_rng else {}))
    loss, aux = result if isinstance(result, tuple) else (result, None)
    if jnp.shape(loss) != ():
        raise WorkloadError(
            f"`loss_fn` returned a loss of shape {jnp.shape(loss)}; it must be a "
            "scalar, such as the mean over the batch."
        )
    return loss, aux


def _takes_rng(fn: Callable[..., Any]) -> bool:
    parameters = inspect.signature(fn).parameters
    any_keyword = inspect.Parameter.VAR_KEYWORD
    return "rng" in parameters or any(
        p.kind is any_keyword for p in parameters.values()
    )


def _make_grad_fn(loss_fn: Callable[..., Any]) -> GradFn:
    def loss_and_aux(params: PyTree, batch: PyTree, rng: Array):
        return call_loss(loss_fn, params, batch, rng)

    return jax.value_and_grad(loss_and_aux, has_aux=True)


def _accumulated(grad_fn: GradFn, parts: int) -> GradFn:
    """Return `grad_fn` over `parts` microbatches: the mean of its results."""

    def mean_grad_fn(params: PyTree, batch: PyTree, rng: Array):
        def add_part(total, index_part):
            index, part = index_part
            result = grad_fn(params, part, jax.random.fold_in(rng, index))
            return jax.tree.map(lambda t, x: t + x / parts, total, result), None

        batch_parts = jax.tree.map(lambda x: _split(jnp.asarray(x), parts), batch)
        first = jax.tree.map(lambda x: x[0], batch_parts)
        shapes = jax.eval_shape(grad_fn, params, first, rng)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, _mean_dtype(x)), shapes)
        return jax.lax.scan(add_part, zeros, (jnp.arange(parts), batch_parts))[0]

    return mean_grad_fn


def _split(x: Array, parts: int) -> Array:
    if x.ndim == 0 or x.shape[0] % parts:
        size = x.shape[0] if x.ndim else "no leading axis"
        raise WorkloadError(
            f"`accumulate={parts}` does not divide the batch: a leaf of shape "
            f"{x.shape} has a leading axis of {size}. Use a divisor of the batch size."
        )
    return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])


def _mean_dtype(x: jax.ShapeDtypeStruct) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _scale(tree: PyTree, factor: Array) -> PyTree:
    return jax.tree.map(lambda x: (x * factor).astype(x.dtype), tree)
