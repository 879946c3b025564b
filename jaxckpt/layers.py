"""`run_layers`: the one engine that runs a stack of equal layers under a schedule.

It takes one of three forms:

    explicit   one `custom_vjp` over the stack (`layers_explicit.py`)
    scan       scans and checkpoints that JAX differentiates (`layers_plain.py`)
    unrolled   the same without loops

The rule for the form, with the peaks that it comes from: GiB of a Llama-3-1b AdamW
step, batch 4 x 4096, for an absent H100 (jax 0.10.2; `benchmarks/forms.py`).

    schedule                                explicit    scan   unrolled
    none                                       55.87   57.68      38.56
    full                                       20.91   22.45      25.22
    every(4)                                   24.16   32.35      25.97
    nested(4, 2)                               22.21   29.97      25.69
    remat_every(2)                             40.02   42.61      32.20
    12 layers keep A, 4 keep A + gate, up      24.06   27.96      29.10

A is query, key and value, context and log-sum-exp, and the projection out.

So `explicit` wherever something is rematerialised, and `scan` where nothing is: the
program is then what JAX makes of a plain scan, forward mode included. `unrolled` only
where it is asked for: it takes long to compile, though the compiler stores less of a
layer that keeps everything, since it fuses elementwise work into what reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxckpt import _jax
from jaxckpt.errors import ScheduleError, WorkloadError, did_you_mean
from jaxckpt.layers_body import Flat, TracedBody, trace_body
from jaxckpt.layers_explicit import run_explicit
from jaxckpt.layers_plain import Plain
from jaxckpt.remat import refuse_callbacks
from jaxckpt.schedule import as_schedule
from jaxckpt.schedule_tree import Keep, Node

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
    """Run L equal layers one after another under a schedule.

    As `jax.lax.scan(body, carry, stacked)`, with the same result and gradients, but
    what the backward pass finds kept follows the schedule. The body is traced once.

    Args:
        body: `body(carry, layer) -> (carry, outputs)`. It may close over arrays, which
            all layers then share and which get gradients too.
        carry: What the first layer takes: arrays whose types do not change. The carry
            of each layer has the value name `layer_input`, where the body does
            not name it at its top.
        stacked: Parameters and whatever else each layer has of its own, `[L, ...]`.
        schedule: Whatever `jaxckpt.schedule.as_schedule` takes; None for no remat.
        scan: Whether equal layers run in a loop.
        form: `"explicit"`, `"scan"` or `"unrolled"`; None for the one that takes the
            least memory, as this module's table says. There is no forward mode
            (`jax.jvp` of the stack) through the explicit one; ask for `"scan"` then.
        label: How to call a layer in an error.

    Returns:
        The last carry, and the outputs of all layers, stacked `[L, ...]`. An output
        that is a layer's own input comes back as it was, without a copy.

    Raises:
        WorkloadError: The body or what it is given does not fit; or a layer that would
            run again calls `io_callback`.
        ScheduleError: The schedule is none, or does not suit the depth.
        PolicyError: A policy in it has no effect on a layer.

    Example:
        >>> import jax.numpy as jnp
        >>> weights = jnp.full((6, 4, 4), 0.1)
        >>> layer = lambda x, w: (x + jnp.tanh(x @ w), jnp.sum(x))
        >>> x, sums = run_layers(layer, jnp.ones((2, 4)), weights, "every(4)")
        >>> x.shape, sums.shape
        ((2, 4), (6,))
    """
    nodes = as_schedule(schedule).nodes(_num_layers(stacked))
    traced = trace_body(body, carry, stacked, label)
    given = traced.consts, traced.carry, jax.tree.leaves(stacked)
    if not all(isinstance(node, Keep) for node in nodes):
        refuse_callbacks(traced.program.closed, label)
    chosen = _form(form, scan, nodes, traced, given[-1])
    if chosen == "explicit":
        after, outputs = run_explicit(traced.program, nodes, *given)
    else:
        after, outputs = Plain(traced.program, scan=chosen == "scan")(nodes, *given)
    return traced.carry_tree.unflatten(after), _outputs(traced, outputs, given[-1])


def check_form(form: str | None) -> None:
    """Raise `ScheduleError` for a form that there is not."""
    if form is not None and form not in FORMS:
        hint = did_you_mean(str(form), FORMS)
        raise ScheduleError(f"`form={form!r}` is not known. {hint}")


def _form(
    form: str | None,
    scan: bool,
    nodes: Sequence[Node],
    traced: TracedBody,
    stacked: Sequence[Any],
) -> str:
    if form is None:
        if not scan:
            return "unrolled"
        if all(isinstance(node, Keep) for node in nodes):
            return "scan"
        # JAX traces the rules of a `custom_vjp` where the axes of a `vmap` are unknown.
        over_axes = _jax.vmapped_axes(traced.program.closed)
        changed = _types_change([*traced.consts, *traced.carry, *stacked])
        return "scan" if over_axes or changed else "explicit"
    check_form(form)
    if not scan and form != "unrolled":
        raise ScheduleError(
            f"`scan=False` and `form={form!r}` contradict each other: that form is "
            "made of loops. Give one of the two."
        )
    return form


def _types_change(inputs: Sequence[Any]) -> bool:
    """Return whether JAX hands a `custom_vjp` other types than it was given.

    Before 0.12 it does so inside `shard_map`, where it makes all inputs vary over the
    mesh; a layer that was traced before does not take them.
    """
    varies = any(_jax.varies_over_mesh(jax.typeof(x)) for x in inputs)
    return varies and _jax.version() < (0, 12)


def _outputs(traced: TracedBody, computed: Flat, stacked: Sequence[Any]) -> PyTree:
    rest = iter(computed)
    leaves = [next(rest) if i is None else stacked[i] for i in traced.passed_on]
    return traced.output_tree.unflatten(leaves)


def _num_layers(stacked: PyTree) -> int:
    """Return the leading axis that all arrays of a tree have."""
    sizes = {x.shape[0] if x.ndim else None for x in jax.tree.leaves(stacked)}
    if len(sizes) != 1 or None in sizes or 0 in sizes:
        raise WorkloadError(
            f"`stacked` has leading axes of {sorted(sizes, key=str)}. Each of its "
            "arrays needs one leading axis of the number of layers."
        )
    return next(size for size in sizes if size is not None)
