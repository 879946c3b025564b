"""Optimizer steps inside the backward pass: no two stages' gradients at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import optax

from jaxckpt.errors import WorkloadError
from jaxckpt.executor.manual import ManualCheckpoint
from jaxckpt.graph.gradient import is_inexact

PyTree = Any


def apply_updates_in_backward(
    chain: ManualCheckpoint,
    optimizer: optax.GradientTransformation,
    states: Sequence[PyTree],
    cotangent: PyTree = None,
    *,
    aux_cotangents: Sequence[PyTree] | None = None,
) -> list[PyTree]:
    """Run a chain backward and update each stage as soon as its gradient is there.

    The gradient is freed by that, before the next stage runs. `chain.params` is
    updated; parameters and states handed in are used up. Gradients of shared arrays are
    in `chain.shared_gradients` afterwards, for the caller to apply.

    The optimizer sees one stage at a time: a rule over all gradients, such as clipping
    by their global norm, acts on each stage alone.

    Args:
        chain: After its `forward`.
        optimizer: Turns gradients into updates.
        states: `[optimizer.init(p) for p in chain.params]`, or what this returned.
        cotangent: As for `chain.backward`: None where `forward` returned a scalar.
        aux_cotangents: As for `chain.backward`.

    Returns:
        The states for the next step.

    Raises:
        WorkloadError: Before anything runs: a parameter is in two places, or is none
            that has a gradient; or there are not as many states as stages.

    Example:
        >>> import jax.numpy as jnp
        >>> chain = ManualCheckpoint([lambda w, x: w * x] * 2, [jnp.ones(()), 2.0])
        >>> optimizer = optax.sgd(0.5)
        >>> states = [optimizer.init(p) for p in chain.params]
        >>> loss = chain.forward(jnp.ones(()))
        >>> states = apply_updates_in_backward(chain, optimizer, states)
        >>> [float(p) for p in chain.params]
        [0.0, 1.5]
    """
    _check(chain, states)
    update, found = _update_fn(optimizer), list(states)
    for stage, gradient in chain.backward(cotangent, aux_cotangents):
        chain.params[stage], found[stage] = update(
            chain.params[stage], found[stage], gradient
        )
        del gradient
    return found


@functools.lru_cache(maxsize=16)
def _update_fn(optimizer: optax.GradientTransformation) -> Any:
    def update(params: PyTree, state: PyTree, gradient: PyTree) -> Any:
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    # Results take the buffers of parameters and state; there is none for the
    # gradient's, which is freed with its last reference.
    return jax.jit(update, donate_argnums=(0, 1))


def _check(chain: ManualCheckpoint, states: Sequence[PyTree]) -> None:
    if len(states) != len(chain.params):
        raise WorkloadError(
            f"`states` has {len(states)} items, and the chain {len(chain.params)} "
            "stages. Use `[optimizer.init(p) for p in chain.params]`."
        )
    places = {id(const): "A shared keyword" for const in chain.shared_arrays()}
    for stage, tree in enumerate(chain.params):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = f"`params[{stage}]{jax.tree_util.keystr(path)}`"
            if not is_inexact(leaf):
                raise WorkloadError(
                    f"{name} is `{jax.typeof(leaf).str_short()}`, which has no "
                    "gradient. Hand it to `forward` as a shared keyword."
                )
            other = places.setdefault(id(leaf), name)
            if other != name and isinstance(leaf, jax.Array):
                raise WorkloadError(
                    f"{other} and {name} are one array, and an update uses it up. Hand "
                    "it to `forward` as a shared keyword alone, and apply its part of "
                    "`chain.shared_gradients` once."
                )
    arrays = [x for x in jax.tree.leaves(states) if isinstance(x, jax.Array)]
    if len({id(x) for x in arrays}) < len(arrays):
        raise WorkloadError(
            "`states` holds one array twice, and an update uses it up. Use "
            "`[optimizer.init(p) for p in chain.params]`."
        )
