"""Residuals: the arrays between forward and backward pass, traced to what made them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxckpt import _jax
from jaxckpt.graph.gradient import Linearized
from jaxckpt.graph.values import is_view


@dataclass(frozen=True)
class Residual:
    """One array that the backward pass reads, as `jax.vjp`'s closure holds it.

    Attributes:
        name: The name that the program or the policy gave it, if any.
        primitive: The operation that made it.
        shape: Its shape; residuals of a scan are stacked, `[layers, ...]`.
        dtype: Its dtype's name.
        bytes: Its bytes on one device, of all layers together.
        layers: The length of the outermost scan that made it; 1 outside a scan.
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
    name: str | None
    primitive: str
    layers: int = 1
    argument: bool = False
    carried: bool = False
    source: str = ""
    scope: str = ""


@dataclass(frozen=True)
class _Input:
    position: int
    name: str | None


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
    found = _follow(jaxpr, variable, None)
    if isinstance(found, _Origin):
        return found
    return _Origin(found.name, "argument", argument=True)


def _follow(jaxpr: Any, atom: Any, name: str | None) -> _Origin | _Input:
    """Follow a variable through views and calls to what made its bytes.

    Returns:
        The operation, or the input of the jaxpr that the bytes are; with the last name
        given on the way.
    """
    producers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    while not isinstance(atom, _jax.Literal) and atom in producers:
        eqn = producers[atom]
        index = eqn.outvars.index(atom)
        name = name or _jax.bound_name(eqn)
        inner = _jax.called_jaxpr(eqn)
        if is_view(eqn) or _moves_to_host(eqn, index):
            atom = eqn.invars[min(index, len(eqn.invars) - 1)]
            continue
        if inner is not None:
            found = _follow(inner, inner.outvars[index], name)
        elif eqn.primitive.name == "scan" and index >= _jax.scan_counts(eqn)[1]:
            found = _follow_stacked(eqn, index, name)
        else:
            found = _made_by(eqn, name, eqn.primitive.name)
        if isinstance(found, _Origin):
            return found
        atom, name = eqn.invars[found.position], found.name
    inputs = list(jaxpr.invars)
    if not isinstance(atom, _jax.Literal) and atom in inputs:
        return _Input(inputs.index(atom), name)
    return _Origin(name, "constant", argument=True)


def _follow_stacked(eqn: Any, index: int, name: str | None) -> _Origin | _Input:
    """Follow an output that a scan stacks, into the scan's body."""
    body = _jax.open_jaxpr(eqn.params["jaxpr"])
    length = eqn.params["length"]
    found = _follow(body, body.outvars[index], name)
    if isinstance(found, _Origin):
        return replace(found, layers=length)
    consts, carries = _jax.scan_counts(eqn)
    if consts <= found.position < consts + carries:
        return replace(_made_by(eqn, found.name, "carry"), layers=length, carried=True)
    return found


def _made_by(eqn: Any, name: str | None, primitive: str) -> _Origin:
    return _Origin(name, primitive, source=_jax.source_line(eqn), scope=_jax.scope(eqn))


def _moves_to_host(eqn: Any, index: int) -> bool:
    moved = eqn.primitive.name == "device_put"
    return moved and _jax.memory_space(eqn.outvars[index].aval) == "host"
