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
from jaxckpt.graph.kinds import MOVES, is_known
from jaxckpt.graph.names import Where
from jaxckpt.matmul import find_matmul


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


@dataclass(frozen=True)
class Unknown:
    """What is known of an operation whose work is not: a kernel, a solver, a callback.

    Attributes:
        times: How often it runs.
        bytes: Bytes that all its runs read and write, at the least.
    """

    times: int
    bytes: int


@dataclass(frozen=True)
class Operation:
    """An equation of a program, and what stands around it.

    Attributes:
        equation: The equation of a jaxpr.
        times: How often it runs, on all devices of a `shard_map` together.
        where: Where it stands in the program's text.
        devices: On how many devices of a `shard_map` around it.
    """

    equation: Any
    times: int
    where: Where
    devices: int

    @property
    def flops(self) -> int:
        """Matmul FLOPs of all its runs."""
        return self.times * equation_flops(self.equation)

    @property
    def bytes(self) -> int:
        """Bytes that all its runs on one device read and write."""
        return self.times // self.devices * equation_bytes(self.equation)


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
        if find_matmul(eqn.primitive.name):
            counts["matmul"] += times * _flops_of(eqn)
        elif eqn.primitive.name == "while":
            counts["loops"] += 1
        elif not _jax.inner_jaxprs(eqn) and eqn.primitive.name not in MOVES:
            # What a scatter adds is its updates; the rest stays as it was.
            updates = eqn.primitive.name.startswith("scatter")
            results = [eqn.invars[2]] if updates else eqn.outvars
            counts["elementwise"] += times * sum(map(_arithmetic_results, results))
    return Flops(counts["matmul"], counts["elementwise"], counts["loops"])


def matmul_flops(closed: Any) -> int:
    """Return the matmul FLOPs of a jaxpr (`count_flops(...).matmul`)."""
    return count_flops(closed).matmul


def equation_flops(eqn: Any) -> int:
    """Return the matmul FLOPs of one run of an equation; of a kernel, of its grid."""
    if is_kernel(eqn):
        inside = sum(matmul_flops(inner) for inner in _jax.inner_jaxprs(eqn).values())
        return _repetitions(eqn) * inside
    return _flops_of(eqn)


def equation_bytes(eqn: Any) -> int:
    """Return the bytes that one run of an equation reads and writes, on one device.

    What slices, gathers and updates leave alone is not moved: as in XLA's own count
    (`HloCostAnalysis`), they move what they take out or put in, twice.
    """
    inputs = [_jax.nbytes(v.aval) for v in eqn.invars]
    outputs = [_jax.nbytes(v.aval) for v in eqn.outvars]
    match eqn.primitive.name:
        case "slice" | "dynamic_slice":
            return 2 * sum(outputs)
        case "gather":
            return 2 * sum(outputs) + sum(inputs[1:])
        case "dynamic_update_slice":
            return 2 * inputs[1]
        case name if name.startswith("scatter"):
            return 2 * inputs[2] + inputs[1]
    return sum(inputs) + sum(outputs)


def operations(closed: Any) -> Iterator[Operation]:
    """Yield what runs as one operation.

    Calls and loops are opened; a kernel is one operation, since what it reads and
    writes inside is no traffic of the device's memory.
    """
    for found in _walk(closed, Operation(None, 1, Where(), 1), kernels=False):
        if is_kernel(found.equation) or not _jax.inner_jaxprs(found.equation):
            yield found


def find_unknown(closed: Any) -> dict[str, Unknown]:
    """Return the operations of which only the bytes are known, most bytes first.

    They are those that are no product in `jaxckpt.matmul`'s list, no elementwise
    operation, reduction or move of data that `jaxckpt.graph.kinds` lists, and kernels
    in which such an operation stands. `jaxckpt.matmul.register_matmul` makes one known.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> find_unknown(jax.make_jaxpr(jnp.fft.fft)(jnp.ones(8, jnp.complex64)))
        {'fft': Unknown(times=1, bytes=128)}
    """
    found: dict[str, Unknown] = {}
    for operation in operations(closed):
        if not _is_known(operation.equation):
            name = operation.equation.primitive.name
            so_far = found.get(name, Unknown(0, 0))
            found[name] = Unknown(
                so_far.times + operation.times, so_far.bytes + operation.bytes
            )
    return dict(sorted(found.items(), key=lambda item: -item[1].bytes))


def _is_known(eqn: Any) -> bool:
    if is_kernel(eqn):
        inner = _jax.inner_jaxprs(eqn).values()
        inside = (e for jaxpr in inner for e, _ in equations(jaxpr))
        return all(_jax.inner_jaxprs(e) or _is_known(e) for e in inside)
    name = eqn.primitive.name
    return find_matmul(name) is not None or is_known(eqn)


def equations(closed: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yield each equation of a program, inner ones too, with how often it runs.

    A `cond` yields only the branch with the most FLOPs; a `while` body counts once.
    """
    for found in _walk(closed, Operation(None, times, Where(), 1), kernels=True):
        yield found.equation, found.times


def _walk(closed: Any, around: Operation, *, kernels: bool) -> Iterator[Operation]:
    for eqn in _jax.open_jaxpr(closed).eqns:
        where = around.where.of(eqn)
        yield Operation(eqn, around.times, where, around.devices)
        if is_kernel(eqn) and not kernels:
            continue
        inner = _jax.inner_jaxprs(eqn)
        if eqn.primitive.name == "cond":
            inner = {"": max(inner.values(), key=matmul_flops)}
        times = around.times * _repetitions(eqn)
        devices = around.devices * _jax.shards(eqn)
        for jaxpr in inner.values():
            inside = Operation(None, times, where, devices)
            yield from _walk(jaxpr, inside, kernels=kernels)


def is_kernel(eqn: Any) -> bool:
    """Return whether an equation is a hand-written kernel whose program is known."""
    return eqn.primitive.name == "pallas_call"


def _repetitions(eqn: Any) -> int:
    match eqn.primitive.name:
        case "scan":
            return eqn.params["length"]
        case "shard_map":  # its body is the work of one device
            return _jax.shards(eqn)
        case "pallas_call":
            return math.prod(eqn.params["grid_mapping"].grid)
    return 1


def _flops_of(eqn: Any) -> int:
    matmul = find_matmul(eqn.primitive.name)
    if matmul is None:
        return 0
    inputs = [v.aval for v in eqn.invars]
    return matmul.flops(inputs, [v.aval for v in eqn.outvars], eqn.params)


def _arithmetic_results(atom: Any) -> int:
    dtype = getattr(atom.aval, "dtype", None)
    inexact = dtype is not None and jax.dtypes.issubdtype(dtype, np.inexact)
    return atom.aval.size if inexact else 0
