"""`run_layers`: the one engine that runs a stack of equal layers under a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxckpt.errors import WorkloadError
from jaxckpt.layers_body import Flat, TracedBody, trace_body
from jaxckpt.layers_explicit import run_explicit
from jaxckpt.layers_plain import Plain
from jaxckpt.schedule import as_schedule

PyTree = Any
FORMS = ("explicit", "scan", "unrolled")


def run_layers(
    body: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    carry: PyTree,
    stacked: PyTree,
    schedule: Any = None,
    *,
    scan: bool = True,
    form: str | None = None,
    label: str = "a layer",
) -> tuple[PyTree, PyTree]:
    """Run L equal layers under a schedule."""
    num_layers = _num_layers(stacked)
    nodes = as_schedule(schedule).nodes(num_layers)
    traced = trace_body(body, carry, stacked, label)
    leaves = jax.tree.leaves(stacked)
    form = form or ("explicit" if scan else "unrolled")
    if form == "explicit":
        after, outputs = run_explicit(
            traced.program, nodes, traced.consts, traced.carry, leaves
        )
    else:
        run = Plain(traced.program, scan=form == "scan")
        after, outputs = run(nodes, traced.consts, traced.carry, leaves)
    return traced.carry_tree.unflatten(after), _outputs(traced, outputs, leaves)


def _outputs(traced: TracedBody, computed: Flat, stacked: Sequence[Any]) -> PyTree:
    rest = iter(computed)
    leaves = [next(rest) if i is None else stacked[i] for i in traced.passed_on]
    return traced.output_tree.unflatten(leaves)


def _num_layers(stacked: PyTree) -> int:
    sizes = {x.shape[0] if x.ndim else None for x in jax.tree.leaves(stacked)}
    if len(sizes) != 1 or None in sizes:
        raise WorkloadError(
            f"`stacked` has leading axes of {sorted(sizes, key=str)}. Each of its "
            "arrays needs one leading axis of the number of layers."
        )
    return sizes.pop()
