"""Exact FLOPs of matmul-like operations, counted on a jaxpr; elementwise work apart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxckpt import _jax
from jaxckpt.matmul import find_matmul

_FREE = frozenset(
    (
        "reshape",
        "broadcast_in_dim",
        "transpose",
        "squeeze",
        "slice",
        "convert_element_type",
    )
    + ("concatenate", "pad", "iota", "copy", "name", "gather", "dynamic_slice", "rev")
    + ("dynamic_update_slice", "optimization_barrier", "select_n", "stop_gradient")
)


@dataclass(frozen=True)
class Flops:
    """Work of one program.

    Attributes:
        matmul: FLOPs of matmul-like operations; a multiply and an add count as two.
        elementwise: Arithmetic results computed besides, one each.
        unbounded_loops: Number of `while` loops whose trips are unknown: counted once.
    """

    matmul: int
    elementwise: int
    unbounded_loops: int = 0


def count_flops(closed: Any) -> Flops:
    """Count the work of a jaxpr: scan bodies times their length, the dearest branch.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.ones((4, 8)); w = jnp.ones((8, 2))
        >>> count_flops(jax.make_jaxpr(lambda x, w: jnp.tanh(x @ w))(x, w)).matmul
        128
    """
    counts: Counter[str] = Counter()
    for eqn, times in equations(closed):
        outputs = [v.aval for v in eqn.outvars]
        matmul = find_matmul(eqn.primitive.name)
        if matmul:
            inputs = [v.aval for v in eqn.invars]
            counts["matmul"] += times * matmul.flops(inputs, outputs, eqn.params)
        elif eqn.primitive.name == "while":
            counts["loops"] += 1
        elif not _jax.inner_jaxprs(eqn) and eqn.primitive.name not in _FREE:
            counts["elementwise"] += times * sum(map(_arithmetic_results, outputs))
    return Flops(counts["matmul"], counts["elementwise"], counts["loops"])


def matmul_flops(closed: Any) -> int:
    """Return the matmul FLOPs of a jaxpr (`count_flops(...).matmul`)."""
    return count_flops(closed).matmul


def equations(closed: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yield each equation of a program, inner ones too, with how often it runs.

    A `cond` yields only the branch with the most FLOPs; a `while` body counts once.
    """
    for eqn in _jax.open_jaxpr(closed).eqns:
        yield eqn, times
        inner = _jax.inner_jaxprs(eqn)
        if eqn.primitive.name == "cond":
            inner = {"": max(inner.values(), key=lambda j: count_flops(j).matmul)}
        length = _repetitions(eqn)
        for jaxpr in inner.values():
            yield from equations(jaxpr, times * length)


def _repetitions(eqn: Any) -> int:
    match eqn.primitive.name:
        case "scan":
            return eqn.params["length"]
        case "shard_map":  # its body is the work of one device
            return eqn.params["mesh"].size
        case "pallas_call":
            return math.prod(eqn.params["grid_mapping"].grid)
    return 1


def _arithmetic_results(aval: Any) -> int:
    dtype = getattr(aval, "dtype", None)
    inexact = dtype is not None and jax.dtypes.issubdtype(dtype, np.inexact)
    return aval.size if inexact else 0
