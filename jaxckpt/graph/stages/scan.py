"""Loops over layers, told apart from loops over time, chunks and microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxckpt import _jax
from jaxckpt.graph.flops import matmul_flops
from jaxckpt.graph.gradient import is_inexact_type
from jaxckpt.graph.stages.program import Program, variables
from jaxckpt.matmul import find_matmul

# What a value inside a loop's body depends on.
_WEIGHT, _CARRY, _SHARED = 1, 2, 4


def is_layer_scan(program: Program, number: int) -> bool:
    """Return whether an equation is a loop over layers.

    In a loop over layers, what is carried starts from the program's inputs, and is
    multiplied by what is scanned: by parameters. Loops over time, chunks and
    microbatches start from zeros, scan activations or data, or multiply only by what
    all turns share. A loop that scans nothing but multiplies what it carries by shared
    parameters is a stack of tied layers, where it does most of the program's work.

    Args:
        program: The jaxpr.
        number: Number of the equation in it.
    """
    eqn = program.eqns[number]
    if eqn.primitive.name != "scan" or not program.flops[number]:
        return False
    consts, carries = _jax.scan_counts(eqn)
    carried = [
        not isinstance(v, _jax.Literal) and v not in program.constants
        for v in eqn.invars[consts : consts + carries]
    ]
    length = eqn.params["length"]
    scanned = [
        _is_parameter(program, v, length) for v in eqn.invars[consts + carries :]
    ]
    flags = [_SHARED] * consts
    flags += [_CARRY if c else 0 for c in carried]
    flags += [_WEIGHT if s else 0 for s in scanned]
    body = eqn.params["jaxpr"]
    if multiplies(body, flags, _WEIGHT):
        return True
    most = 2 * program.flops[number] >= sum(program.flops)
    scans_data = any(
        v.aval.ndim > 1 and is_inexact_type(v.aval)
        for v in variables(eqn.invars[consts + carries :])
    )
    return most and not scans_data and multiplies(body, flags, _SHARED)


def carries_products(eqn: Any) -> bool:
    """Return whether any product of a loop's body depends on what the loop carries."""
    consts, carries = _jax.scan_counts(eqn)
    flags = [0] * consts + [_CARRY] * carries
    flags += [0] * (len(eqn.invars) - len(flags))
    return _walk(eqn.params["jaxpr"], flags, None)[1]


def multiplies(body: Any, flags: Sequence[int], weight: int) -> bool:
    """Return whether a body multiplies what is carried by something else.

    Args:
        body: The body's jaxpr.
        flags: What each of its inputs is.
        weight: What the other operand of the product must be, alone.
    """
    return _walk(body, flags, weight)[1]


def _is_parameter(program: Program, atom: Any, length: int) -> bool:
    """Return whether what is scanned comes from inputs of the program, layer by layer.

    Adapters are merged into frozen weights by a product of their own for each layer.
    """
    if isinstance(atom, _jax.Literal):
        return False
    products = (i for i in program.ancestors(atom) if program.flops[i])
    return all(_by_layer(program.eqns[i], length) for i in products)


def _by_layer(eqn: Any, length: int) -> bool:
    if eqn.primitive.name != "dot_general" or eqn.outvars[0].aval.shape[:1] != (
        length,
    ):
        return False
    _, (lhs, rhs) = eqn.params["dimension_numbers"]
    return 0 in lhs and 0 in rhs


def _walk(
    body: Any, flags: Sequence[int], weight: int | None
) -> tuple[list[int], bool]:
    """Follow what the values of a body depend on.

    Args:
        body: A jaxpr.
        flags: What each of its inputs is.
        weight: As for `multiplies`; None for any product of what is carried.

    Returns:
        What the outputs depend on, and whether there is such a product.
    """
    jaxpr = _jax.open_jaxpr(body)
    known: dict[Any, int] = dict(zip(jaxpr.invars, flags, strict=True))
    found = False

    def get(atom: Any) -> int:
        return 0 if isinstance(atom, _jax.Literal) else known.get(atom, 0)

    for eqn in jaxpr.eqns:
        inputs = [get(v) for v in eqn.invars]
        together = 0
        for flag in inputs:
            together |= flag
        inner = _opened(eqn)
        if inner is not None:
            outputs, inside = _walk(inner, inputs, weight)
            found = found or inside
        else:
            outputs = [together] * len(eqn.outvars)
            found = found or (_has_product(eqn) and _is_such(inputs, weight))
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [get(v) for v in jaxpr.outvars], found


def _is_such(inputs: Sequence[int], weight: int | None) -> bool:
    carried = any(flag & _CARRY for flag in inputs)
    if weight is None:
        return carried
    return carried and any(flag == weight for flag in inputs)


def _opened(eqn: Any) -> Any | None:
    """Return what a call runs on just its own operands, else None."""
    inner = list(_jax.inner_jaxprs(eqn).values())
    if len(inner) != 1 or eqn.primitive.name in ("scan", "while", "pallas_call"):
        return None
    jaxpr = _jax.open_jaxpr(inner[0])
    fits = len(jaxpr.invars) == len(eqn.invars)
    return inner[0] if fits and len(jaxpr.outvars) == len(eqn.outvars) else None


def _has_product(eqn: Any) -> bool:
    if find_matmul(eqn.primitive.name) is not None:
        return True
    return any(map(matmul_flops, _jax.inner_jaxprs(eqn).values()))
