"""Every value of a program that could be kept, and which of them hold the same data.

A jaxpr is walked once. `jit`, `scan`, `cond`, `while`, `shard_map` and the forward
rules of `custom_vjp` calls are opened. A value's place is a path, the same at each
re-tracing: equation numbers, with the name of the parameter that holds an inner jaxpr
in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxckpt import _jax
from jaxckpt.graph.names import Where
from jaxckpt.graph.sharding import Shards
from jaxckpt.graph.value import Path as Path
from jaxckpt.graph.value import Place as Place
from jaxckpt.graph.value import Value as Value
from jaxckpt.graph.value import Values as Values
from jaxckpt.matmul import find_matmul

FORWARD_RULE = "forward rule"

NAMING = frozenset(("name", "call_hi_primitive"))
"""Primitives that `checkpoint_name` binds, in JAX's two remat engines."""

VIEWS = NAMING | frozenset(
    ("reshape", "squeeze", "expand_dims", "transpose", "copy", "stop_gradient")
    + ("reduce_precision", "pvary", "optimization_barrier")
)
"""Primitives whose output is the input's bytes, seen in another shape."""

SAME_DATA = VIEWS | {
    "convert_element_type",
    "broadcast_in_dim",
    "sharding_constraint",
    "reshard",
    "device_put",
}
"""Primitives whose output can be had again from the input at no product's cost."""

# What fused attention calls return, under the standard names of a transformer layer.
_IMPLIED_NAMES = {
    (f"dot_product_attention_fwd{suffix}", index): name
    for suffix in ("", "_wrapper")
    for index, name in enumerate(("context", "context_lse"))
}


class ForwardRuleError(Exception):
    """A `custom_vjp` forward rule refuses what its primal function takes.

    cuDNN attention does, for a sequence of one token.
    """


def find_values(
    closed: Any, *, opaque_rules: bool = False, shardings: Sequence[Any] = ()
) -> Values:
    """Return every value of a closed jaxpr that could be kept.

    Args:
        closed: The program.
        opaque_rules: Whether a `custom_vjp` call whose forward rule refuses to be
            traced counts as one operation.
        shardings: Of the flat inputs, where they are sharded.

    Raises:
        ForwardRuleError: There is such a call, and it does not.
    """
    values = Values()
    jaxpr = _jax.open_jaxpr(closed)
    shards = Shards(closed, shardings or [None] * len(jaxpr.invars))
    walk = _Walk(values, opaque_rules, shards)
    walk.jaxpr(jaxpr, _Around((), 1, Where()))
    return values


def gives_name(value: Value) -> bool:
    """Return whether what makes a value names it, by itself or inside itself."""
    named_inside = value.primitive.startswith("custom_jvp") and value.name is not None
    return value.primitive in NAMING or named_inside


def is_view(eqn: Any) -> bool:
    """Return whether an equation's output is its input's bytes, in another shape."""
    if eqn.primitive.name == "broadcast_in_dim":  # how JAX inserts a dimension of one
        return eqn.invars[0].aval.size == eqn.outvars[0].aval.size
    return eqn.primitive.name in VIEWS


@dataclass(frozen=True)
class _Around:
    """What stands around a jaxpr: its path, how often it runs, where it is written."""

    path: Path
    times: int
    where: Where

    def inside(self, eqn: Any, number: int, key: str) -> _Around:
        """Return where an inner jaxpr of an equation stands."""
        length = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        path = (*self.path, number, key)
        return _Around(path, self.times * length, self.where.of(eqn))


class _Walk:
    """Adds the values of a jaxpr, and of what it calls, to `values`."""

    def __init__(self, values: Values, opaque_rules: bool, shards: Shards) -> None:
        self.values = values
        self.opaque_rules = opaque_rules
        self.shards = shards

    def jaxpr(self, jaxpr: Any, around: _Around) -> None:
        for number, eqn in enumerate(jaxpr.eqns):
            self.equation(eqn, number, around)

    def equation(self, eqn: Any, number: int, around: _Around) -> None:
        if eqn.primitive.name == "custom_vjp_call":
            # In a forward rule, which nothing differentiates, it is one operation.
            in_rule = FORWARD_RULE in around.path
            if not in_rule and self._opened_rule(eqn, number, around):
                return
        elif opens(eqn):
            for key, inner in _jax.inner_jaxprs(eqn).items():
                inside = around.inside(eqn, number, key)
                self.jaxpr(_jax.open_jaxpr(inner), inside)
                if _jax.called_jaxpr(eqn) is not None:
                    opened = _jax.open_jaxpr(inner)
                    _link_call(self.values, eqn, opened, around.path, inside.path)
                    return
        _link_same_data(self.values, eqn, around.path)
        for index, variable in enumerate(eqn.outvars):
            if not _jax.is_drop(variable):
                place = (*around.path, number), index
                size = self.shards.bytes(around.path, variable)
                value = _value(eqn, place, around, size)
                self.values.add((around.path, variable), value)

    def _opened_rule(self, eqn: Any, number: int, around: _Around) -> bool:
        """Open the forward rule: it is what runs where a gradient is taken."""
        try:
            rule = _jax.forward_rule(eqn)
        except Exception as error:  # whatever the user's rule raises
            if self.opaque_rules:
                return False
            raise ForwardRuleError from error
        assert rule is not None
        jaxpr, _, num_residuals = rule
        inside = around.inside(eqn, number, FORWARD_RULE)
        first = len(self.values)
        self.jaxpr(jaxpr, inside)
        here = inside.path
        outputs = [(here, v) for v in jaxpr.outvars if not isinstance(v, _jax.Literal)]
        dot = contained_dot(jaxpr)
        self.values.close_rule(first, outputs, around.times, dot)
        arguments = eqn.invars[eqn.params["num_consts"] :]
        path = around.path
        _link_variables(self.values, arguments, path, jaxpr.invars, here)
        results = jaxpr.outvars[num_residuals:]
        _link_variables(self.values, results, here, eqn.outvars, path)
        return True


def opens(eqn: Any) -> bool:
    """Return whether what an equation runs is looked into, for values to keep.

    A `jax.checkpoint` follows a policy of its own. A `custom_jvp` call runs its rule in
    a gradient, not what it holds. A kernel's values never reach the device's memory.
    """
    if _jax.remat_parameters(eqn) is not None:
        return False
    name = eqn.primitive.name
    return not name.startswith("custom_jvp") and name != "pallas_call"


def _link_call(values: Values, eqn: Any, inner: Any, path: Path, inside: Path) -> None:
    _link_variables(values, eqn.invars, path, inner.invars, inside)
    _link_variables(values, inner.outvars, inside, eqn.outvars, path)


def _link_variables(
    values: Values, sources: Any, source_path: Path, targets: Any, target_path: Path
) -> None:
    for source, target in zip(sources, targets, strict=True):
        if not isinstance(source, _jax.Literal) and not _jax.is_drop(target):
            values.link((source_path, source), (target_path, target))


def _link_same_data(values: Values, eqn: Any, path: Path) -> None:
    if eqn.primitive.name == "add":
        _link_biased(values, eqn, path)
    if eqn.primitive.name not in SAME_DATA:
        return
    view = is_view(eqn)
    name = _jax.bound_name(eqn)
    for source, target in zip(eqn.invars, eqn.outvars, strict=False):
        if not isinstance(source, _jax.Literal) and not _jax.is_drop(target):
            values.link((path, source), (path, target), name, view)


def _link_biased(values: Values, eqn: Any, path: Path) -> None:
    """Link a sum with a bias to what it is added to: it costs no product either."""
    output = eqn.outvars[0]
    whole = [v for v in eqn.invars if v.aval.size == output.aval.size]
    if len(whole) == 1 and not isinstance(whole[0], _jax.Literal):
        values.link((path, whole[0]), (path, output), view=False)


def _value(eqn: Any, place: Place, around: _Around, size: int) -> Value:
    aval = eqn.outvars[place[1]].aval
    primitive = eqn.primitive.name
    where = around.where.of(eqn)
    name = _jax.bound_name(eqn) or _IMPLIED_NAMES.get((primitive, place[1]))
    return Value(
        place=place,
        name=name or _name_inside(eqn, place[1]),
        primitive=primitive,
        dot=_dot_of(eqn),
        shape=tuple(getattr(aval, "shape", ())),
        dtype=str(getattr(aval, "dtype", "")),
        bytes=size,
        times=around.times,
        source=where.source,
        scope=where.scope,
        in_rule=False,
        label=where.label(primitive),
    )


def _name_inside(eqn: Any, index: int) -> str | None:
    """Return the name that a `custom_jvp` function gives to what it returns."""
    if not eqn.primitive.name.startswith("custom_jvp"):
        return None
    body = _jax.open_jaxpr(eqn.params["call_jaxpr"])
    made_by = (e for e in body.eqns if body.outvars[index] in e.outvars)
    return next(map(_jax.bound_name, made_by), None)


def _dot_of(eqn: Any) -> str | None:
    matmul = find_matmul(eqn.primitive.name)
    if matmul is None:
        return None
    batched = matmul.batched([v.aval for v in eqn.invars], eqn.params)
    return "batched" if batched else "unbatched"


def contained_dot(jaxpr: Any) -> str | None:
    """Return `"batched"` if any dot inside is, `"unbatched"` if none, None without."""
    kinds = {_dot_of(eqn) for eqn in _jax.open_jaxpr(jaxpr).eqns}
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        for inner in _jax.inner_jaxprs(eqn).values():
            kinds.add(contained_dot(inner))
    return "batched" if "batched" in kinds else "unbatched" if len(kinds) > 1 else None
