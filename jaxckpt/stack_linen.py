"""A stack of equal linen layers under a schedule."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta

from jaxckpt.errors import WorkloadError
from jaxckpt.layers import run_layers
from jaxckpt.remat_flax import is_initializing, lifted_class
from jaxckpt.schedule import none
from jaxckpt.stack_call import How, LayerCall, check_depth_of


class LinenStack(nn.Module):
    """Equal layers under a schedule; made by `jaxckpt.Stack`.

    Attributes:
        block: Makes one layer.
        num_layers: How many.
        how: Which of them are rematerialised, and in what form they run.
        partition_name: Name of the layer axis in partitioning metadata.
        label: How to call a layer in errors.
    """

    block: functools.partial[nn.Module]
    num_layers: int
    how: How
    partition_name: str | None = None
    label: str = "a layer"

    @nn.compact
    def __call__(self, carry: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run the layers; return the last carry, and the outputs if there are any."""
        options = _Options(
            self.num_layers,
            self.how.now(),
            self.partition_name,
            self.label,
        )
        lifted = _stacked_class(self.block.func, options)
        layers = lifted(*self.block.args, **self.block.keywords)
        nn.share_scope(self, layers)
        return layers(carry, *args, **kwargs)


@dataclasses.dataclass(frozen=True)
class _Options:
    num_layers: int
    how: How
    partition_name: str | None
    label: str


def linen_factory(block: Any) -> functools.partial[nn.Module] | None:
    """Return what makes the block from its class, or None for no linen block."""
    if isinstance(block, nn.Module):
        names = [f.name for f in dataclasses.fields(block) if f.init]
        fields = {n: getattr(block, n) for n in names if n not in ("parent", "name")}
        return functools.partial(type(block), **fields)
    if isinstance(block, functools.partial) and _is_linen(block.func):
        return block
    return functools.partial(block) if _is_linen(block) else None


def _is_linen(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, nn.Module)


@functools.lru_cache(maxsize=256)
def _stacked_class(block: type[nn.Module], options: _Options) -> Any:
    """Return the Module class with a `__call__` that runs all layers.

    Its variables are those of one layer, each with a leading axis of layers.
    """
    return lifted_class(block, functools.partial(_run, options), name="stack")


def _run(
    options: _Options,
    fn: Callable[..., Any],
    scope_fn: Callable[..., Any],
    repack_fn: Callable[..., Any],
    variables: Any,
    rngs: Any,
    carry: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    axis = {nn.PARTITION_NAME: options.partition_name}
    call = LayerCall(carry, options.label)

    def body(carry: Any, layer: Any) -> Any:
        index, variables = layer
        own = jax.tree.map(lambda key: jax.random.fold_in(key, index), rngs)
        scope = scope_fn(variables, own)
        carry, output = call.pair(fn(scope, carry, *args, **kwargs))
        return carry, (output, repack_fn(scope))

    # While initialising, parameters are made inside and nothing is differentiated.
    scopes = jax.tree.leaves(scope_fn(variables, rngs))
    own = min((scope.path for scope in scopes), key=len)
    if any(scope.path[: len(own)] != own for scope in scopes):
        raise WorkloadError(
            f"{options.label} holds a Module that belongs to another one. The layers "
            "of a Stack have variables of their own: make that Module inside the "
            "block, or with `parent=None`."
        )
    check_depth_of(variables, options.num_layers, options.label)
    how = How(none()) if is_initializing(scopes) else options.how
    carry, (outputs, updated) = run_layers(
        body,
        carry,
        (jnp.arange(options.num_layers), meta.remove_axis(variables, 0, axis)),
        how.schedule,
        scan=how.scan,
        form=how.form,
        label=options.label,
    )
    return call.result(carry, outputs), meta.add_axis(updated, 0, axis)
