"""What one training step reads and replaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

PyTree = Any
# JAX also builds the state out of shapes and markers, so that no field is sure to hold
# arrays.
Leaf = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a run carries from step to step: a pytree, donated to each.

    Attributes:
        step: Number of steps done, an int32 scalar.
        params: Parameters.
        opt_state: What the optimizer keeps.
        rng: Key data, uint32; each step folds its number in, so it never changes.
            Plain data and not a typed key, because it has to pass `jax.export`.
    """

    step: Leaf
    params: PyTree
    opt_state: PyTree
    rng: Leaf

    @classmethod
    def create(
        cls, params: PyTree, optimizer: optax.GradientTransformation, rng: Array
    ) -> TrainState:
        """Return the state before the first step.

        Args:
            params: Initial parameters; the first donated step uses up their buffers.
            optimizer: Whose state to begin.
            rng: A key, typed or as key data.

        Example:
            >>> state = TrainState.create({"w": 1.0}, optax.sgd(0.1), jax.random.key(0))
            >>> int(state.step)
            0
        """
        if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
            rng = jax.random.key_data(rng)
        return cls(jnp.zeros((), jnp.int32), params, optimizer.init(params), rng)


def abstract_state(
    params: PyTree, optimizer: optax.GradientTransformation
) -> TrainState:
    """Return the state's shapes for (abstract) `params`, allocating nothing.

    Example:
        >>> w = jax.ShapeDtypeStruct((3, 4), jnp.float32)
        >>> abstract_state({"w": w}, optax.adam(0.1)).opt_state[0].mu["w"].shape
        (3, 4)
    """
    return jax.eval_shape(
        lambda p: TrainState.create(p, optimizer, jax.random.key(0)), params
    )
