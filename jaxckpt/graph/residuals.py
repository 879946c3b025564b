"""Residuals: the arrays between forward and backward pass, traced to what made them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import _jax
from .gradient import Linearized
from .values import VIEWS


@dataclass(frozen=True)
class Residual:
    """One array that the backward pass reads, as `jax.vjp`'s closure holds it.

    Attributes:
        name: The name that the program or the policy gave it, if any.
        primitive: The operation that made it.
        shape: Its shape; residuals of a scan are stacked, `[layers, ...]`.
        dtype: Its dtype's name.
        bytes: Its bytes on one device, of all layers together.
        layers: The product of the lengths of the scans that made it; 1 outside a scan.
        decision: `"save"`, or `"offload"` where it is kept in host memory.
        argument: Whether it is an argument of the program (or a constant), or a view of
            one: such a residual costs nothing.
        carried: Whether it is the value carried from layer to layer of a scan.
        source: `file:line (function)` that made it.
        scope: Name stack of what made it.
    """

    name: str | None
    primitive: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    layers: int
    decision: str
    argument: bool
    carried: bool
    source: str
    scope: str

    @property
    def label(self) -> str:
        """The name, or where there is none the name stack and the operation."""
        if self.name:
            return self.name
        if self.carried:
            return "carry (layer input)"
        return "/".join(filter(None, (self.scope, self.primitive)))


@dataclass(frozen=True)
class _Origin:
    name: str | None = None
    primitive: str = "argument"
    layers: int = 1
    argument: bool = True
    carried: bool = False
    source: str = ""
    scope: str = ""


def find_residuals(linearized: Linearized) -> tuple[Residual, ...]:
    """Return the residuals of a linearised program, one for each distinct array."""
    jaxpr = _jax.open_jaxpr(linearized.closed)
    outputs = dict.fromkeys(
        v
        for v in jaxpr.outvars[linearized.num_outputs :]
        if not isinstance(v, _jax.Literal)
    )
    return tuple(_residual(v, _origin(jaxpr, v)) for v in outputs)


def _residual(variable: Any, origin: _Origin) -> Residual:
    aval = variable.aval
    offloaded = _jax.memory_space(aval) == "host"
    return Residual(
        name=origin.name,
        primitive=origin.primitive,
        shape=tuple(aval.shape),
        dtype=str(aval.dtype),
        bytes=_jax.nbytes(aval),
        layers=origin.layers,
        decision="offload" if offloaded else "save",
        argument=origin.argument,
        carried=origin.carried,
        source=origin.source,
        scope=origin.scope,
    )


def _origin(jaxpr: Any, variable: Any) -> _Origin:
    """Follow a variable to the operation that made its bytes."""
    producers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    name = None
    while variable in producers:
        eqn = producers[variable]
        name = name or _jax.bound_name(eqn)
        primitive = eqn.primitive.name
        index = eqn.outvars.index(variable)
        if primitive in VIEWS or (primitive == "device_put" and _moves(eqn, index)):
            source = eqn.invars[index if len(eqn.outvars) > 1 else 0]
        elif primitive in ("jit", "pjit", "closed_call"):
            source = _through_call(eqn, index)
        elif primitive == "scan":
            source = _through_scan(eqn, index)
        else:
            source = None
        if isinstance(source, _Origin):
            if source.argument or source.carried:
                return _named(source, name)
            return _named(source, name)
        if source is None:
            return _Origin(
                name, primitive, 1, False, False, _jax.source_line(eqn), _jax.scope(eqn)
            )
        if isinstance(source, _jax.Literal):
            return _Origin(name, "constant")
        variable = source
    return _Origin(name)


def _named(origin: _Origin, name: str | None) -> _Origin:
    from dataclasses import replace

    return replace(origin, name=name or origin.name)


def _moves(eqn: Any, index: int) -> bool:
    """Whether a `device_put` moves between memories (an offload), not between devices."""
    return _jax.memory_space(eqn.outvars[index].aval) == "host"


def _through_call(eqn: Any, index: int) -> Any:
    inner = _jax.open_jaxpr(eqn.params["jaxpr"])
    output = inner.outvars[index]
    if isinstance(output, _jax.Literal):
        return output
    origin = _origin(inner, output)
    if not origin.argument:
        return origin
    position = _input_behind(inner, output)
    return eqn.invars[position] if position is not None else origin


def _through_scan(eqn: Any, index: int) -> Any:
    """A stacked output is the body's; a carried one is the scan's own result."""
    body = _jax.open_jaxpr(eqn.params["jaxpr"])
    consts, carries = _jax.scan_counts(eqn)
    if index < carries or isinstance(body.outvars[index], _jax.Literal):
        return None
    origin = _origin(body, body.outvars[index])
    layers = eqn.params["length"] * origin.layers
    if not origin.argument:
        return _stacked(origin, layers)
    position = _input_behind(body, body.outvars[index])
    if position is None:
        return origin
    if position < consts or position >= consts + carries:
        return _Origin(origin.name)
    carry = _Origin(origin.name, "carry", layers, False, True)
    return _located(carry, eqn)


def _stacked(origin: _Origin, layers: int) -> _Origin:
    from dataclasses import replace

    return replace(origin, layers=layers)


def _located(origin: _Origin, eqn: Any) -> _Origin:
    from dataclasses import replace

    return replace(origin, source=_jax.source_line(eqn), scope=_jax.scope(eqn))


def _input_behind(jaxpr: Any, variable: Any) -> int | None:
    """Return the position of the input that a variable is a view of, if it is one."""
    producers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    while variable in producers:
        eqn = producers[variable]
        index = eqn.outvars.index(variable)
        if eqn.primitive.name in ("jit", "pjit", "closed_call"):
            inner = _jax.open_jaxpr(eqn.params["jaxpr"])
            position = _input_behind(inner, inner.outvars[index])
            if position is None:
                return None
            variable = eqn.invars[position]
        else:
            variable = eqn.invars[index if len(eqn.outvars) > 1 else 0]
        if isinstance(variable, _jax.Literal):
            return None
    inputs = list(jaxpr.invars)
    return inputs.index(variable) if variable in inputs else None
