"""A stack of equal nnx layers under a schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import spmd

from jaxckpt.layers import run_layers
from jaxckpt.stack_call import How, LayerCall


class NNXStack(nnx.Module):
    """Equal layers under a schedule; made by `jaxckpt.Stack`.

    Attributes:
        layers: One layer whose variables have a leading axis of layers.
        num_layers: How many.
        how: Which of them are rematerialised, and in what form they run.
        partition_name: Name of the layer axis in partitioning metadata.
        label: How to call a layer in errors.
    """

    def __init__(
        self,
        block: Callable[..., Any],
        *,
        num_layers: int,
        how: How,
        partition_name: str | None,
        label: str,
        rngs: nnx.Rngs,
    ) -> None:
        self.num_layers = num_layers
        self.how = how
        self.partition_name = partition_name
        self.label = label

        @nnx.split_rngs(splits=num_layers)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: partition_name})
        def make(rngs: nnx.Rngs) -> Any:
            return block(rngs=rngs)

        self.layers = make(rngs)

    def __call__(self, carry: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the layers; return the last carry, and the outputs if there are any.

        An `nnx.Rngs` among the arguments gives each layer streams of its own.
        """
        axis = {nnx.PARTITION_NAME: self.partition_name}
        graphdef, state = nnx.split(self.layers)
        call, how = LayerCall(carry, self.label), self.how.now()
        keys = jax.tree.map(_draw, (args, kwargs), is_leaf=_is_rngs)

        def body(carry: Any, layer: Any) -> Any:
            index, state = layer
            module = nnx.merge(graphdef, spmd.remove_axis(state, 0, axis))
            args, kwargs = jax.tree.map(
                lambda x: x.of_layer(index) if isinstance(x, _Keys) else x,
                keys,
                is_leaf=lambda x: isinstance(x, _Keys),
            )
            carry, output = call.pair(module(carry, *args, **kwargs))
            return carry, (output, spmd.add_axis(nnx.state(module), 0, axis))

        carry, (outputs, updated) = run_layers(
            body,
            carry,
            (jnp.arange(self.num_layers), state),
            how.schedule,
            scan=how.scan,
            form=how.form,
            label=self.label,
        )
        nnx.update(self.layers, updated)
        return call.result(carry, outputs)


class _Keys:
    """A key for each random stream of an `nnx.Rngs`, drawn once for all layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.keys = {name: stream() for name, stream in rngs.items()}

    def of_layer(self, index: Any) -> nnx.Rngs:
        folded = {n: jax.random.fold_in(k, index) for n, k in self.keys.items()}
        return nnx.Rngs(**folded)


def _is_rngs(value: Any) -> bool:
    return isinstance(value, nnx.Rngs)


def _draw(value: Any) -> Any:
    return _Keys(value) if _is_rngs(value) else value
