"""`Stack`: L equal layers under a schedule, for linen and nnx, over `run_layers`."""

from __future__ import annotations

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
    if factory is not None:
        label = label or f"`{factory.func.__name__}`"
        return LinenStack(factory, label=label, **options, **linen_fields)
    if linen_fields or not callable(block) or isinstance(block, nnx.Module):
        raise WorkloadError(_no_block(block, linen_fields))
    if rngs is None:
        raise WorkloadError(
            "An nnx Stack makes its layers by `block(rngs=rngs)`: give `rngs`, for "
            "instance `rngs=nnx.Rngs(0)`."
        )
    label = label or f"`{getattr(block, '__name__', type(block).__name__)}`"
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


def _no_block(block: Any, fields: dict[str, Any]) -> str:
    if fields:
        return (
            f"`{next(iter(fields))}` is for linen, and `block={block!r}` is no linen "
            "Module class, no `functools.partial` of one and no instance."
        )
    return (
        f"`block={block!r}` makes no layers. Give a linen Module class, a "
        "`functools.partial` of one or an unbound instance; or for nnx a callable that "
        "takes `rngs`, such as the Module class."
    )
