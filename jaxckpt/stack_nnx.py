"""A stack of equal nnx layers under a schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import spmd

from jaxckpt.errors import WorkloadError
from jaxckpt.layers import run_layers
from jaxckpt.remat_flax import arrays_of, changed_state, is_stateful
from jaxckpt.stack_call import How, LayerCall, check_depth_of


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
        self.layers = _make(block, num_layers, partition_name, label, rngs)

    def __call__(self, carry: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run the layers; return the last carry, and the outputs if there are any.

        An `nnx.Rngs` among the arguments gives each layer streams of its own. Another
        Module is shared by the layers: its state goes from each to the next.
        """
        axis = {nnx.PARTITION_NAME: self.partition_name}
        graphdef, state = nnx.split(self.layers)
        check_depth_of(state, self.num_layers, self.label)
        call, how = LayerCall(carry, self.label), self.how.now()
        shared = _Shared((args, kwargs))

        def body(carry: Any, layer: Any) -> Any:
            (carry, passed), (index, state) = carry, layer
            module = nnx.merge(graphdef, spmd.remove_axis(state, 0, axis))
            (args, kwargs), others = shared.of_layer(index, passed)
            carry, output = call.pair(module(carry, *args, **kwargs))
            updated = spmd.add_axis(nnx.state(module), 0, axis)
            return (carry, shared.passed_on(others)), (output, updated)

        (carry, passed), (outputs, updated) = run_layers(
            body,
            (carry, shared.state),
            (jnp.arange(self.num_layers), state),
            how.schedule,
            scan=how.scan,
            form=how.form,
            label=self.label,
        )
        _write_changed(self.layers, state, updated)
        _write_changed(shared.modules, shared.state, passed)
        return call.result(carry, outputs)


def _make(
    block: Callable[..., Any],
    num_layers: int,
    partition_name: str | None,
    label: str,
    rngs: nnx.Rngs,
) -> Any:
    """Make the layers at once, each with random streams of its own."""

    @nnx.split_rngs(splits=num_layers)
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: partition_name})
    def make(rngs: nnx.Rngs) -> Any:
        return block(rngs=rngs)

    try:
        return make(rngs)
    except ValueError as error:
        if "trace level" not in str(error):
            raise
        raise WorkloadError(
            f"{label} takes a Module or Variable of the outside into itself. The "
            "layers of a Stack have variables of their own; give what they share as an "
            "argument of the call."
        ) from error


class _Shared:
    """The arguments that all layers get, nnx state among them.

    Attributes:
        modules: The Modules among them.
        state: What of these may change, from layer to layer: all but parameters.
    """

    def __init__(self, arguments: Any) -> None:
        self.leaves, self.tree = jax.tree.flatten(arguments, is_leaf=is_stateful)
        self.keys = {
            i: {name: stream() for name, stream in x.items()}
            for i, x in enumerate(self.leaves)
            if isinstance(x, nnx.Rngs)
        }
        stateful = (i for i, x in enumerate(self.leaves) if is_stateful(x))
        self.places = [i for i in stateful if i not in self.keys]
        self.modules = [self.leaves[i] for i in self.places]
        self.graphdef, self.params, self.state = nnx.split(self.modules, nnx.Param, ...)

    def of_layer(self, index: Any, state: Any) -> tuple[Any, list[Any]]:
        """Return the arguments of one layer, and the Modules among them."""
        leaves = list(self.leaves)
        for place, keys in self.keys.items():
            folded = {n: jax.random.fold_in(key, index) for n, key in keys.items()}
            leaves[place] = nnx.Rngs(**folded)
        modules = nnx.merge(self.graphdef, self.params, state)
        for place, module in zip(self.places, modules, strict=True):
            leaves[place] = module
        return self.tree.unflatten(leaves), modules

    def passed_on(self, modules: list[Any]) -> Any:
        """Return the state for the next layer."""
        return nnx.split(modules, nnx.Param, ...)[2]


def _write_changed(target: Any, before: Any, after: Any) -> None:
    """Update the variables of a Module that are other arrays than before.

    The rest stays untouched, so that a Module that only computes can be called where
    its variables may not be written: inside a transformation that closes over it.
    """
    changed = changed_state(arrays_of(before), after)
    if changed:
        nnx.update(target, changed)
