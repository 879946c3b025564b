"""What can be predicted: `predict`'s arguments, looked at before the work begins."""

from __future__ import annotations

from typing import Any

import jax

from jaxckpt.errors import PlanError, WorkloadError
from jaxckpt.graph.gradient import is_inexact
from jaxckpt.graph.trace import Graph
from jaxckpt.plan import Plan

PyTree = Any


def check_kinds(graph: Any, plan: Any, optimizer: Any) -> None:
    """Raise `WorkloadError` or `PlanError` for something else in their place."""
    if not isinstance(graph, Graph):
        raise WorkloadError(
            f"`graph={graph!r}` is no traced function. Give "
            "`jaxckpt.trace(loss_fn, params, batch)`."
        )
    if plan is not None and not isinstance(plan, Plan):
        raise PlanError(
            f"`plan={plan!r}` is no plan. Make one of it: "
            "`jaxckpt.plan_from(rule, loss_fn, params, batch)`."
        )
    is_optimizer = hasattr(optimizer, "init") and hasattr(optimizer, "update")
    if optimizer is not None and not is_optimizer:
        raise WorkloadError(
            f"`optimizer={optimizer!r}` is no optax transformation. Give one such as "
            "`optax.adamw(3e-4)`, or None for the gradients alone."
        )


def check_trained(params: PyTree) -> None:
    """Raise `WorkloadError` for a first argument that holds what has no gradient."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not is_inexact(leaf):
            place = jax.tree_util.keystr(path)
            raise WorkloadError(
                f"The first argument holds {leaf.dtype}{place and f' at `{place}`'}, "
                "which cannot be trained. Give what is no floating value (keys, "
                "counts) in another argument."
            )


def check_loss(graph: Graph) -> None:
    """Raise `WorkloadError` for outputs that are no loss, as `has_aux` says."""
    outputs = graph.outputs
    is_pair = isinstance(outputs, tuple) and len(outputs) == 2
    loss = outputs[0] if graph.has_aux and is_pair else outputs
    if graph.has_aux != is_pair or getattr(loss, "shape", None) != ():
        wanted = "a scalar loss and one tree" if graph.has_aux else "a scalar loss"
        raise WorkloadError(
            f"With `has_aux={graph.has_aux}` the function must return {wanted}, and "
            f"not `{outputs}`. Take the mean of what is no scalar, and trace a loss "
            "that returns more than itself with `has_aux=True`."
        )


def positions(donate_argnums: Any, count: int) -> set[int]:
    """Return which of `count` arguments are donated; they may be counted from behind.

    Raises:
        WorkloadError: One is no position of an argument.
    """
    one = isinstance(donate_argnums, (int, str))
    chosen = (donate_argnums,) if one else tuple(donate_argnums)
    for position in chosen:
        if not isinstance(position, int) or not -count <= position < count:
            raise WorkloadError(
                f"`donate_argnums={donate_argnums!r}` has {position!r}, but the step "
                f"is given {count} arguments. Use whole numbers below that."
            )
    return {int(position) % count for position in chosen}
