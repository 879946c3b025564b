"""Advice about remat that does nothing, or harm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from jaxckpt import _jax
from jaxckpt.errors import did_you_mean
from jaxckpt.graph.regions import Region
from jaxckpt.graph.trace import Graph
from jaxckpt.policy_algebra import Policy, matches


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
    yield from _unmatched_names(graph.regions)
    if any(_jax.excepts_names(r.policy) for r in _with_inner(graph.regions)):
        yield (
            "JAX's `save_anything_except_these_names` keeps everything, the excepted "
            "values too. Use `jaxckpt.remat` with `jaxckpt.recompute(...)`."
        )


def _unmatched_names(regions: Iterable[Region]) -> Iterator[str]:
    """Yield a sentence for each bare policy with names that no value carries.

    Regions that share a policy share its names: one of them may carry a name alone.
    """
    carried: dict[frozenset[str], set[str]] = defaultdict(set)
    for region in _with_inner(regions):
        if wanted := _policy_names(region):
            carried[wanted] |= region.names
    for wanted, names in carried.items():
        unmatched = [p for p in sorted(wanted) if not any(matches(p, n) for n in names)]
        if not unmatched:
            continue
        listed = ", ".join(f"`{name}`" for name in unmatched)
        share = "nothing" if len(unmatched) == len(wanted) else "not all"
        hint = did_you_mean(unmatched[0], names) if names else "Nothing in it is named."
        yield (
            f"A remat keeps {share} of what its policy names: no value in it has the "
            f"name {listed}. {hint}"
        )


def _policy_names(region: Region) -> frozenset[str]:
    if isinstance(region.policy, Policy):
        return frozenset(region.policy.patterns())
    return _jax.policy_names(region.policy) or frozenset()


def _with_inner(regions: Iterable[Region]) -> Iterator[Region]:
    for region in regions:
        yield region
        yield from _with_inner(region.inner)


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
