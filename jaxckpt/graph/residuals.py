"""Residuals: the arrays between forward and backward pass, traced to what made them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxckpt import _jax
from jaxckpt.graph.gradient import Linearized
from jaxckpt.graph.names import Where
from jaxckpt.graph.sharding import Shards
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
        label: The name, else the name stack (or the function) and the operation.
        shared: Whether it is a view of the same bytes as a residual before it, so that
            it costs nothing more.
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
    label: str
    shared: bool = False

    @property
    def held(self) -> bool:
        """Whether it takes memory of its own: no argument, no view of another one."""
        return not self.argument and not self.shared


_NOWHERE = Where()

# What a branch gives in the place of another branch's residuals.
_FILLERS = frozenset(("broadcast_in_dim", "empty", "empty2", "zeros_like"))


@dataclass(frozen=True)
class _Origin:
    name: str | None
    primitive: str
    layers: int = 1
    argument: bool = False
    carried: bool = False
    where: Where = _NOWHERE
    root: tuple[int, ...] = ()

    @property
    def computed(self) -> bool:
        return not self.argument and self.primitive not in _FILLERS

    @property
    def label(self) -> str:
        if self.name:
            return self.name
        if self.carried:
            return "carry (layer input)"
        return self.where.label(self.primitive)


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
    origins = _Origins()
    shards = Shards(linearized.closed, linearized.shardings)
    seen: set[Any] = set()
    residuals = []
    for variable in outputs:
        origin = origins.of(jaxpr, variable)
        residual = _residual(variable, origin, shards.bytes((), variable))
        key = origin.root, residual.decision
        residuals.append(replace(residual, shared=residual.held and key in seen))
        seen.add(key)
    return tuple(residuals)


def _residual(variable: Any, origin: _Origin, size: int) -> Residual:
    aval = variable.aval
    offloaded = _jax.memory_space(aval) == "host"
    return Residual(
        name=origin.name,
        primitive=origin.primitive,
        shape=tuple(aval.shape),
        dtype=str(aval.dtype),
        bytes=size,
        layers=origin.layers,
        decision="offload" if offloaded else "save",
        argument=origin.argument,
        carried=origin.carried,
        source=origin.where.source,
        scope=origin.where.scope,
        label=origin.label,
    )


class _Links:
    """Of one jaxpr: what makes each variable, and the positions of its inputs."""

    def __init__(self, jaxpr: Any) -> None:
        self.jaxpr = jaxpr  # held, so that its id stays its own
        self.made = {v: (e, i) for e in jaxpr.eqns for i, v in enumerate(e.outvars)}
        self.position = {v: i for i, v in enumerate(jaxpr.invars)}


class _Origins:
    """Follows variables through views, calls and loops to what made their bytes."""

    def __init__(self) -> None:
        self._links: dict[int, _Links] = {}

    def of(self, jaxpr: Any, variable: Any) -> _Origin:
        """Return what made a variable of a whole program."""
        found = self._follow(jaxpr, variable, None, Where())
        if isinstance(found, _Origin):
            return found
        return _Origin(found.name, "argument", argument=True)

    def _links_of(self, jaxpr: Any) -> _Links:
        if id(jaxpr) not in self._links:
            self._links[id(jaxpr)] = _Links(jaxpr)
        return self._links[id(jaxpr)]

    def _follow(
        self, jaxpr: Any, atom: Any, name: str | None, around: Where
    ) -> _Origin | _Input:
        """Follow a variable of a jaxpr that stands somewhere.

        Returns:
            The operation, or the input of the jaxpr that the bytes are; with the last
            name given on the way.
        """
        links = self._links_of(jaxpr)
        while not isinstance(atom, _jax.Literal) and atom in links.made:
            eqn, index = links.made[atom]
            name = name or _jax.bound_name(eqn)
            found = self._step(eqn, index, name, around.of(eqn))
            if isinstance(found, _Origin):
                return found
            atom, name = eqn.invars[found.position], found.name
        if not isinstance(atom, _jax.Literal) and atom in links.position:
            return _Input(links.position[atom], name)
        return _Origin(name, "constant", argument=True)

    def _step(
        self, eqn: Any, index: int, name: str | None, here: Where
    ) -> _Origin | _Input:
        """Follow one output of an equation to what made it, or to an input."""
        if is_view(eqn) or _moves_to_host(eqn, index):
            return _Input(min(index, len(eqn.invars) - 1), name)
        called = _jax.same_inputs_jaxpr(eqn)
        if called is not None:
            found = self._follow(called, called.outvars[index], name, here)
            return _inside(eqn, found)
        made = _Origin(name, eqn.primitive.name, where=here, root=(id(eqn), index))
        match eqn.primitive.name:
            case "scan":
                return self._scan(eqn, index, made)
            case "while":
                return self._while(eqn, index, made)
            case "cond":
                return self._cond(eqn, index, made)
        return made

    def _scan(self, eqn: Any, index: int, made: _Origin) -> _Origin | _Input:
        """Follow an output of a scan into its body."""
        body = _jax.open_jaxpr(eqn.params["jaxpr"])
        length = eqn.params["length"]
        consts, carries = _jax.scan_counts(eqn)
        found = self._follow(body, body.outvars[index], made.name, made.where)
        if index < carries:
            if isinstance(found, _Input) and found.position == consts + index:
                return found  # carried through as it is
            return made
        if isinstance(found, _Origin):
            return replace(found, layers=length, argument=False, root=made.root)
        if found.position < consts:  # once for each step
            return replace(made, name=found.name, layers=length)
        if found.position < consts + carries:
            carry = replace(made, name=found.name, primitive="carry", carried=True)
            return replace(carry, layers=length)
        return found

    def _while(self, eqn: Any, index: int, made: _Origin) -> _Origin | _Input:
        """Follow an output of a loop that its body hands on as it is."""
        body = _jax.open_jaxpr(eqn.params["body_jaxpr"])
        found = self._follow(body, body.outvars[index], made.name, made.where)
        consts = eqn.params["body_nconsts"]
        if isinstance(found, _Input) and found.position == consts + index:
            before = eqn.params["cond_nconsts"] + consts
            return _Input(before + index, found.name)
        return made

    def _cond(self, eqn: Any, index: int, made: _Origin) -> _Origin | _Input:
        """Follow an output of a branch; where it is none of its own, of another."""
        branches = map(_jax.open_jaxpr, eqn.params["branches"])
        found = [
            self._follow(branch, branch.outvars[index], made.name, made.where)
            for branch in branches
        ]
        inputs = {f.position for f in found if isinstance(f, _Input)}
        if len(inputs) == 1 and all(isinstance(f, _Input) for f in found):
            return _Input(inputs.pop() + 1, found[0].name)  # behind the index
        own = [f for f in found if isinstance(f, _Origin) and f.computed]
        named = [f for f in found if f.name]
        first = own[0] if own else made
        name = named[0].name if named else None
        return replace(first, name=name, argument=False, root=made.root)


def _inside(eqn: Any, found: _Origin | _Input) -> _Origin | _Input:
    """Tell apart what one operation makes in several calls of the same jaxpr."""
    if isinstance(found, _Input):
        return found
    return replace(found, root=(id(eqn), *found.root))


def _moves_to_host(eqn: Any, index: int) -> bool:
    moved = eqn.primitive.name == "device_put"
    return moved and _jax.memory_space(eqn.outvars[index].aval) == "host"
