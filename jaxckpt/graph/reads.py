"""Which values the backward pass, or a recomputation for it, reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxckpt import _jax
from jaxckpt.graph.gradient import Differentiable, struct_of
from jaxckpt.graph.tag import mark
from jaxckpt.graph.values import Values, gives_name


def find_reads(values: Values, closed: Any) -> frozenset[int]:
    """Return the values that are worth keeping in a rematerialised program.

    The program is rematerialised whole: what the backward pass then computes again, it
    or the recomputation reads. A value that is not among them (the last projection of a
    layer, whose sum the layer returns) costs memory when kept and saves nothing.

    Args:
        values: `find_values(closed)`.
        closed: A closed jaxpr whose inexact inputs are all differentiated.
    """
    return find_recomputed(values, closed, None)


def find_recomputed(
    values: Values, closed: Any, policy: Callable[..., Any] | None
) -> frozenset[int]:
    """Return the values that the backward pass computes again under a JAX policy.

    Every value gets a numbered mark, the program is rematerialised under the policy and
    JAX's own dead code elimination decides: a mark that is still in the backward
    program belongs to a value that is computed again there.
    """
    # A policy keeps what comes out of a name, and a mark behind it is no computation.
    keeps_names = policy is not None
    numbers = {
        v.place: i
        for i, v in enumerate(values.items)
        if not (keeps_names and gives_name(v))
    }
    marked = _jax.jaxpr_function(mark(closed, numbers))
    arguments = [struct_of(v.aval) for v in _jax.open_jaxpr(closed).invars]
    split = Differentiable.of(jax.checkpoint(marked, policy=policy), arguments, None)
    return frozenset(_marks_in_remat(split.gradient(), inside=False))


def _marks_in_remat(closed: Any, inside: bool) -> Iterator[int]:
    for eqn in _jax.open_jaxpr(closed).eqns:
        index = _jax.mark_index(eqn)
        if inside and index is not None:
            yield index
        here = inside or _jax.remat_parameters(eqn) is not None
        for inner in _jax.inner_jaxprs(eqn).values():
            yield from _marks_in_remat(inner, here)
