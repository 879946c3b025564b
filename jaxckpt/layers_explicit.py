"""The explicit form of a stack: one `custom_vjp` over all its layers.

The forward pass is one loop per run of equal parts and returns what is kept as a stack
for each run. The backward pass is one reverse loop per run; it runs again what was not
kept and puts the run's gradients in a stack of their own. Parameters stay one stack,
indexed by layer, in both.

There is no forward mode through a `custom_vjp` (`jax.jvp` of the stack itself); forward
mode over the gradient (`hessian`, Hessian-vector products) works.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxckpt import _jax
from jaxckpt.graph.gradient import is_inexact, is_inexact_type
from jaxckpt.layers_backward import Backward, Flow, spread
from jaxckpt.layers_body import Flat, LayerProgram
from jaxckpt.layers_forward import Arrays, Forward, Kept, Tapes, Wrt
from jaxckpt.layers_plain import Plain
from jaxckpt.layers_runs import Run, find_runs
from jaxckpt.schedule_tree import Node


def run_explicit(
    program: LayerProgram,
    nodes: Sequence[Node],
    consts: Flat,
    carry: Flat,
    stacked: Flat,
) -> tuple[Flat, Flat]:
    """Run the nodes over stacked parameters `[layers, ...]`, all flat."""
    plain = Plain(program, scan=True)
    runs = find_runs(nodes, patterns=True)

    # `graph` knows a stack by the name of this function (`inline.STACK_FUNCTION`).
    @jax.custom_vjp
    def jaxckpt_layers(consts: Flat, carry: Flat, stacked: Flat) -> tuple[Flat, Flat]:
        return plain(nodes, consts, carry, stacked)

    def forward(consts: Flat, carry: Flat, stacked: Flat) -> Any:
        inexact = tuple(is_inexact(x.value) for x in carry)
        tapes = Tapes(program, Wrt(perturbed(consts), inexact, perturbed(stacked)))
        given = Arrays(_values(consts), _values(stacked))
        after, outputs, kept = Forward(tapes, given).runs(
            runs, 0, _values(carry), alone=True
        )
        rule = functools.partial(_backward, tapes, runs)
        return (after, outputs), jax.tree_util.Partial(rule, given, kept)

    def backward(residuals: Any, cotangents: Any) -> Any:
        return residuals(*cotangents)

    jaxckpt_layers.defvjp(forward, backward, symbolic_zeros=True)
    return jaxckpt_layers(consts, carry, stacked)


def _backward(
    tapes: Tapes,
    runs: Sequence[Run],
    given: Arrays,
    kept: Kept,
    d_carry: Sequence[Any],
    d_outputs: Sequence[Any],
) -> tuple[Flat, Flat, Flat]:
    """Return the cotangents of consts, carry and stacks; None where not asked."""
    wrt = tapes.wrt
    zeros = [
        jnp.zeros_like(x) for x, w in zip(given.consts, wrt.consts, strict=True) if w
    ]
    flow, d_stacked = Backward(tapes, given).runs(
        runs,
        0,
        kept,
        Flow(instantiated(d_carry), zeros),
        [None if is_zero(x) else x for x in d_outputs],
        alone=True,
    )
    return (
        spread(flow.consts, wrt.consts),
        spread(flow.carry, wrt.carry),
        spread(d_stacked, wrt.layer),
    )


def perturbed(inputs: Sequence[Any]) -> tuple[bool, ...]:
    """Return which inputs of a forward rule are differentiated."""
    return tuple(bool(x.perturbed) and is_inexact(x.value) for x in inputs)


def _values(inputs: Sequence[Any]) -> Flat:
    return [x.value for x in inputs]


def instantiated(cotangents: Sequence[Any]) -> Flat:
    """Return the cotangents of the arrays that have one, zeros filled in."""
    wanted = [x for x in cotangents if is_inexact_type(x)]
    return [_jax.zeros(x.aval) if is_zero(x) else x for x in wanted]


def is_zero(x: Any) -> bool:
    """Return whether a cotangent is known to be zero."""
    return isinstance(x, jax.custom_derivatives.SymbolicZero)
