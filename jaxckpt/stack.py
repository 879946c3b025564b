"""`Stack`: L equal layers under a schedule, for linen and nnx, over `run_layers`."""

from __future__ import annotations

import functools
from typing import Any

from flax import nnx

from jaxckpt.errors import WorkloadError
from jaxckpt.layers import check_form
from jaxckpt.schedule import as_schedule
from jaxckpt.stack_call import How
from jaxckpt.stack_call import use as use
from jaxckpt.stack_linen import LinenStack, linen_factory
from jaxckpt.stack_nnx import NNXStack


def Stack(  # noqa: N802 - it makes a Module, as a class would
    block: Any,
    num_layers: int,
    *,
    schedule: Any = None,
    scan: bool = True,
    form: str | None = None,
    rngs: nnx.Rngs | None = None,
    partition_name: str | None = None,
    label: str | None = None,
    **linen_fields: Any,
) -> Any:
    """Make a Module of L equal layers that run one after another under a schedule.

    A layer takes the carry first and returns the next carry, or `(carry, output)`;
    outputs are stacked `[num_layers, ...]` and returned beside the last carry. What
    else the Stack is called with goes to every layer. All variables have a leading axis
    of layers, whatever the schedule and scanned or not, so that saved weights load
    under any of them. Random streams differ by layer.

    Args:
        block: One layer. For linen a Module class, a `functools.partial` of one, or an
            unbound instance; for nnx whatever makes one by `block(rngs=rngs)`.
        num_layers: L.
        schedule: Which layers to rematerialise, and how: whatever
            `jaxckpt.schedule.as_schedule` takes; None for no remat. `jaxckpt.use`
            replaces it from outside.
        scan: Whether equal layers run in a loop; else they stand one after another.
        form: As for `jaxckpt.run_layers`: None for the one that takes the least memory,
            `"scan"` where the stack itself is differentiated in forward mode.
        rngs: For nnx: where initial parameters come from.
        partition_name: Mesh axis or logical axis of the layer axis, for parameters that
            carry partitioning metadata.
        label: How to call a layer in errors; the block's name by default.
        linen_fields: For linen: `name` and `parent`.

    Raises:
        WorkloadError: `block` is neither, or `num_layers` is no number of layers.
        ScheduleError: The schedule is none, or does not suit the depth.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import linen as nn
        >>> class Block(nn.Module):
        ...     @nn.compact
        ...     def __call__(self, x):
        ...         return x + nn.Dense(4)(jnp.tanh(x))
        >>> stack = Stack(Block, 6, schedule="every(2)")
        >>> variables = stack.init(jax.random.key(0), jnp.ones((2, 4)))
        >>> jax.tree.map(jnp.shape, variables)
        {'params': {'Dense_0': {'bias': (6, 4), 'kernel': (6, 4, 4)}}}
    """
    rule = as_schedule(schedule)
    _check_depth(num_layers)
    rule.nodes(num_layers)
    check_form(form)
    options = {
        "num_layers": num_layers,
        "how": How(rule, scan, form),
        "partition_name": partition_name,
    }
    factory = linen_factory(block)
    label = label or f"`{_name(factory.func if factory else block)}`"
    if factory is not None:
        _check_linen(label, linen_fields, rngs)
        return LinenStack(factory, label=label, **options, **linen_fields)
    rngs = _check_nnx(block, label, linen_fields, rngs)
    return NNXStack(block, rngs=rngs, label=label, **options)


def _check_depth(num_layers: Any) -> None:
    if (
        isinstance(num_layers, bool)
        or not isinstance(num_layers, int)
        or num_layers < 1
    ):
        raise WorkloadError(
            f"`num_layers={num_layers!r}` is not a number of layers. Use 1 or more."
        )


def _name(block: Any) -> str:
    inner = block.func if isinstance(block, functools.partial) else block
    return getattr(inner, "__name__", type(inner).__name__)


def _check_linen(label: str, fields: dict[str, Any], rngs: Any) -> None:
    unknown = [name for name in fields if name not in ("name", "parent")]
    if unknown:
        raise WorkloadError(
            f"`{unknown[0]}` is no setting of a Stack. A setting of the block is given "
            f"to the block: `functools.partial({label.strip('`')}, {unknown[0]}=...)`."
        )
    if rngs is not None:
        raise WorkloadError(
            f"`rngs` is for nnx, and {label} is a linen Module: give random keys to "
            "`init` and `apply`."
        )


def _check_nnx(block: Any, label: str, fields: dict[str, Any], rngs: Any) -> nnx.Rngs:
    """Return `rngs`, checked with the block."""
    if isinstance(block, nnx.Module) or not callable(block):
        raise WorkloadError(
            f"`block` is of type `{type(block).__name__}`, which makes no layers. Give "
            "a linen Module class, a `functools.partial` of one or an unbound "
            "instance; or for nnx a callable that takes `rngs`, such as the class."
        )
    if fields:
        raise WorkloadError(
            f"`{next(iter(fields))}` is no setting of a Stack of {label}, which is no "
            "linen Module class, no `functools.partial` of one and no instance."
        )
    if not isinstance(rngs, nnx.Rngs):
        raise WorkloadError(
            f"`rngs={rngs!r}`: an nnx Stack makes its layers by `block(rngs=rngs)` and "
            "needs an `nnx.Rngs`, for instance `rngs=nnx.Rngs(0)`. (A linen block is "
            "given as its class or a `functools.partial` of it.)"
        )
    return rngs
