"""Operations whose derivative reads their own result, and how to name that result.

The derivative of `tanh`, `exp`, `softmax` and the like is written in terms of what they
return, as it was before it got a name. A policy that keeps the name would compute the
operation again for its derivative, and all that leads to it. Here such an operation is
replaced by itself with a derivative rule that reads the named result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxckpt import _jax
from jaxckpt.graph.gradient import is_inexact, struct_of
from jaxckpt.matmul import find_matmul


def derivative_reads_result(eqn: Any) -> bool:
    """Return whether an operation's derivative rule reads what it returns."""
    opaque = eqn.primitive.name.startswith("custom_jvp")
    if find_matmul(eqn.primitive.name) or (_jax.inner_jaxprs(eqn) and not opaque):
        return False
    inputs = [struct_of(v.aval) for v in eqn.invars]
    if eqn.effects or not any(map(is_inexact, inputs)):
        return False
    if any(_jax.varies_over_mesh(v.aval) for v in eqn.invars):
        # Inside `shard_map`, whose axes are not known when a rule is traced apart: the
        # operation runs again there for its derivative.
        return False
    try:
        jaxpr = _jax.open_jaxpr(_derivative(eqn, inputs))
    except Exception:  # it has no derivative (`nextafter` of a random draw, a callback)
        return False
    results = set(_results(jaxpr, eqn))
    return any(v in results for e in jaxpr.eqns for v in e.invars if _is_variable(v))


def named_operation(eqn: Any, names: Mapping[int, str]) -> list[Any]:
    """Return equations that do the same, with results named for the derivative too.

    Args:
        eqn: An operation whose derivative reads its result.
        names: Name by number of the output.
    """

    @jax.custom_jvp
    def operation(*arguments: Any) -> list[Any]:
        outputs = _bind(eqn, arguments)
        return [_named(o, names.get(i)) for i, o in enumerate(outputs)]

    @operation.defjvp
    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        closed = _derivative(eqn, primals, tangents)
        jaxpr = _jax.open_jaxpr(closed)
        wanted = {_results(jaxpr, eqn)[i]: name for i, name in names.items()}
        named = _jax.with_jaxpr(closed, _with_names(jaxpr, wanted))
        leaves = jax.tree.leaves((tuple(primals), tuple(tangents)))
        outputs = _jax.jaxpr_function(named)(*leaves)
        half = len(outputs) // 2
        return outputs[:half], outputs[half:]

    traced = jax.make_jaxpr(operation)(*(struct_of(v.aval) for v in eqn.invars))
    (call,) = _jax.open_jaxpr(traced).eqns
    return [call.replace(invars=eqn.invars, outvars=eqn.outvars)]


def _derivative(eqn: Any, primals: Sequence[Any], tangents: Any = None) -> Any:
    """Trace an operation's derivative: primals, tangents -> results, their tangents."""

    def both(primals: Any, tangents: Any) -> Any:
        return jax.jvp(lambda *arguments: _bind(eqn, arguments), primals, tangents)

    if tangents is None:
        tangents = tuple(map(_tangent, primals))
    return jax.make_jaxpr(both)(tuple(primals), tuple(tangents))


def _tangent(primal: Any) -> Any:
    if is_inexact(primal):
        return primal
    return jax.ShapeDtypeStruct(primal.shape, jax.dtypes.float0)


def _bind(eqn: Any, arguments: Sequence[Any]) -> list[Any]:
    parameters = eqn.primitive.get_bind_params(eqn.params)
    outputs = eqn.primitive.bind(*arguments, **parameters)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def _results(jaxpr: Any, eqn: Any) -> list[Any]:
    return list(jaxpr.outvars[: len(eqn.outvars)])


def _named(value: Any, name: str | None) -> Any:
    return value if name is None else _jax.checkpoint_name(value, name)


def _with_names(jaxpr: Any, wanted: Mapping[Any, str]) -> Any:
    """Name variables where they are made, so that everything reads the named ones."""
    equations: list[Any] = []
    for eqn in jaxpr.eqns:
        outputs, after = list(eqn.outvars), []
        for index, variable in enumerate(eqn.outvars):
            if variable in wanted:
                raw = outputs[index] = _jax.new_variable(variable)
                name = wanted[variable]
                after.append(_jax.name_equation(raw, variable, name, eqn))
        equations += [eqn.replace(outvars=outputs), *after]
    return jaxpr.replace(eqns=equations)


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, _jax.Literal)
