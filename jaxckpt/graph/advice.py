"""Advice about remat that does nothing, or harm."""

from __future__ import annotations

from collections.abc import Iterator

from jaxckpt.graph.regions import Region
from jaxckpt.graph.trace import Graph


def warnings_about(graph: Graph) -> tuple[str, ...]:
    """Return a sentence for each rematerialisation that does not do its work.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxckpt.graph.trace import trace
        >>> dense = jax.checkpoint(lambda w, x: x @ w)
        >>> w, x = jnp.ones((8, 8)), jnp.ones((4, 8))
        >>> warnings_about(trace(dense, w, x, argnums=None))[0][:41]
        'Remat saves nothing here: the backward pa'
    """
    return tuple(_warnings(graph))


def _warnings(graph: Graph) -> Iterator[str]:
    for region in graph.regions:
        if region.whole_stack:
            yield (
                "Remat stands round a scan over layers: its backward pass computes all "
                "layers again and holds the residuals of all. Put it inside the scan, "
                "round the body of one layer."
            )
    if graph.regions and saves_nothing(graph):
        yield (
            "Remat saves nothing here: the backward pass holds as many bytes at its "
            "worst moment as without it. Wrap one layer of several, not the whole "
            "model and not a single product; per layer is best."
        )


def saves_nothing(graph: Graph) -> bool:
    """Return whether remat does not lower the bytes held at the worst moment.

    At that moment the backward pass holds what was kept and one region computed again:
    kept residuals + the largest region's own, against all residuals without remat.
    """
    worst = graph.residual_bytes + max(map(_transient, graph.regions))
    return worst >= 0.98 * graph.plain.residual_bytes


def _transient(region: Region) -> int:
    """Bytes that a region holds beyond what it keeps, once it is computed again."""
    kept = sum(r.bytes for r in region.kept if r.decision == "save")
    return max(0, region.transient_bytes - kept)
