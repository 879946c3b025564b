"""Which part of each value one device holds, followed from sharded arguments.

Over explicit mesh axes a value's type says how it is sharded, and so it is inside
`shard_map`. Over axes that the compiler shards by itself (`AxisType.Auto`) only it
knows; what is done here is what it does in the usual case: each operation's result is
sharded as its operands are. Nothing is followed backwards (to a mask that is drawn for
a sharded value, say): such a value counts whole, too much and never too little.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import AxisType, NamedSharding

from jaxckpt import _jax
from jaxckpt.graph.kinds import ELEMENTWISE, VIEWS_IN_PLACE

Spec = tuple[tuple[str, ...], ...]
"""Of each dimension, the mesh axes that it is cut over."""

Key = tuple[tuple[Any, ...], Any]
"""Path of a jaxpr (as in `graph.values`), and a variable in it."""


class Shards:
    """How the values of a program are sharded over the axes that the compiler shards.

    Args:
        closed: The program.
        shardings: Of each flat input; None for one that is whole.
    """

    def __init__(self, closed: Any, shardings: Sequence[Any]) -> None:
        self._specs: dict[Key, Spec] = {}
        self._sizes: dict[str, int] = {}
        jaxpr = _jax.open_jaxpr(closed)
        if any(s is not None for s in shardings) or _mentions(closed):
            inputs = map(self._given, jaxpr.invars, shardings)
            self._jaxpr(jaxpr, (), list(inputs))

    def bytes(self, path: tuple[Any, ...], variable: Any) -> int:
        """Return the bytes of a value on one device."""
        spec = self._specs.get((path, variable), ())
        whole = _jax.nbytes(variable.aval)
        size = math.prod(variable.aval.shape) if spec else 0
        if not size:
            return whole
        parts = [math.prod(self._sizes[a] for a in axes) for axes in spec]
        dims = zip(variable.aval.shape, parts, strict=True)
        return whole * math.prod(-(-n // part) for n, part in dims) // size

    def _given(self, variable: Any, sharding: Any) -> Spec:
        """Return the spec of a sharding over automatic axes."""
        names, sizes = _automatic_axes(sharding)
        self._sizes |= sizes
        rank = len(variable.aval.shape)
        return (*names, *[()] * (rank - len(names)))[:rank]

    def _jaxpr(
        self, jaxpr: Any, path: tuple[Any, ...], inputs: Sequence[Spec]
    ) -> list[Spec]:
        """Follow a jaxpr, and return the specs of its outputs."""
        known = dict(zip(jaxpr.invars, inputs, strict=True))

        def get(atom: Any) -> Spec:
            plain = ((),) * len(getattr(atom.aval, "shape", ()))
            return plain if isinstance(atom, _jax.Literal) else known.get(atom, plain)

        for number, eqn in enumerate(jaxpr.eqns):
            results = self._equation(eqn, (*path, number), [get(v) for v in eqn.invars])
            for variable, spec in zip(eqn.outvars, results, strict=True):
                known[variable] = spec
                if any(spec):
                    self._specs[path, variable] = spec
        return [get(v) for v in jaxpr.outvars]

    def _equation(
        self, eqn: Any, here: tuple[Any, ...], inputs: list[Spec]
    ) -> list[Spec]:
        name = eqn.primitive.name
        if name in ("sharding_constraint", "reshard"):
            sharding = eqn.params.get("sharding", eqn.params.get("dst_sharding"))
            return [self._given(v, sharding) for v in eqn.outvars]
        if name == "shard_map":
            return [self._given(v, s) for v, s in _results_of_shard_map(eqn)]
        inner = _jax.inner_jaxprs(eqn)
        if name == "scan":
            return self._scan(eqn, (*here, "jaxpr"), inputs)
        if name == "cond":
            results = [
                self._jaxpr(_jax.open_jaxpr(branch), (*here, key), inputs[1:])
                for key, branch in inner.items()
            ]
            return [_merged(specs) for specs in zip(*results, strict=True)]
        called = _jax.same_inputs_jaxpr(eqn)
        if called is not None:
            key = "jaxpr" if "jaxpr" in inner else "call_jaxpr"
            return self._jaxpr(called, (*here, key), inputs)
        shapes = [tuple(getattr(v.aval, "shape", ())) for v in eqn.outvars]
        rule = _RULES.get(name, _elementwise if name in ELEMENTWISE else _whole)
        return [rule(eqn, inputs, shape) for shape in shapes]

    def _scan(self, eqn: Any, path: tuple[Any, ...], inputs: list[Spec]) -> list[Spec]:
        """Follow a loop's body twice: what it carries may be sharded in it first."""
        consts, carries = _jax.scan_counts(eqn)
        body = _jax.open_jaxpr(eqn.params["jaxpr"])
        fixed, carry = inputs[:consts], inputs[consts : consts + carries]
        slices = [spec[1:] for spec in inputs[consts + carries :]]
        first = self._jaxpr(body, path, [*fixed, *carry, *slices])
        carry = [_merged(pair) for pair in zip(carry, first, strict=False)]
        results = self._jaxpr(body, path, [*fixed, *carry, *slices])
        return [*carry, *(((), *spec) for spec in results[carries:])]


def _mentions(closed: Any) -> bool:
    """Return whether a program says anything about shardings."""
    return any(
        eqn.primitive.name in ("sharding_constraint", "shard_map")
        or any(map(_mentions, _jax.inner_jaxprs(eqn).values()))
        for eqn in _jax.open_jaxpr(closed).eqns
    )


def _automatic_axes(
    sharding: Any,
) -> tuple[list[tuple[str, ...]], dict[str, int]]:
    """Return the axes that each dimension is cut over, and the axes' sizes.

    Only those of `AxisType.Auto`: types tell of the others.
    """
    spec, mesh = getattr(sharding, "spec", None), getattr(sharding, "mesh", None)
    if spec is None or mesh is None or mesh.empty:
        return [], {}
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    auto = {name for name, kind in types if kind == AxisType.Auto}
    names = [tuple(a for a in _jax.mesh_axes(entry) if a in auto) for entry in spec]
    return names, {name: mesh.shape[name] for name in auto}


def _results_of_shard_map(eqn: Any) -> list[tuple[Any, Any]]:
    """Return each output of a `shard_map` with the sharding that it comes out in."""
    mesh, specs = eqn.params["mesh"], eqn.params["out_specs"]
    shardings = (NamedSharding(mesh, spec) for spec in specs)
    return list(zip(eqn.outvars, shardings, strict=True))


def _merged(specs: Iterable[Spec]) -> Spec:
    """Return for each dimension the first axes of any spec, each axis once."""
    merged, used = [], set()
    for entries in zip(*specs, strict=True):
        axes = next((e for e in entries if e and not used & set(e)), ())
        used |= set(axes)
        merged.append(axes)
    return tuple(merged)


def _whole(eqn: Any, inputs: list[Spec], shape: tuple[int, ...]) -> Spec:
    """Keep what is sharded of an operand of equal rank, in dimensions of equal size."""
    sizes = [getattr(v.aval, "shape", ()) for v in eqn.invars]
    for spec, size in zip(inputs, sizes, strict=True):
        if any(spec) and len(size) == len(shape) and eqn.primitive.name in _ALONG:
            pairs = zip(spec, size, shape, strict=True)
            return tuple(axes if n == m else () for axes, n, m in pairs)
    return ((),) * len(shape)


def _elementwise(eqn: Any, inputs: list[Spec], shape: tuple[int, ...]) -> Spec:
    """Merge the operands; a dimension of one is repeated along the result's."""
    found = [_none(shape)]
    for variable, spec in zip(eqn.invars, inputs, strict=True):
        size = getattr(variable.aval, "shape", ())
        if len(size) == len(shape):
            pairs = zip(spec, size, shape, strict=True)
            found.append(tuple(axes if n == m else () for axes, n, m in pairs))
    return _merged(found)


def _dot(eqn: Any, inputs: list[Spec], shape: tuple[int, ...]) -> Spec:
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs, rhs = inputs[:2]
    pairs = zip(lhs_batch, rhs_batch, strict=True)
    spec = [lhs[i] or rhs[j] for i, j in pairs]
    spec += [e for i, e in enumerate(lhs) if i not in (*lhs_sum, *lhs_batch)]
    spec += [e for i, e in enumerate(rhs) if i not in (*rhs_sum, *rhs_batch)]
    return _once(spec)


def _once(spec: Iterable[tuple[str, ...]]) -> Spec:
    """Drop axes that an earlier dimension is cut over already."""
    used: set[str] = set()
    kept = []
    for axes in spec:
        kept.append(() if used & set(axes) else axes)
        used |= set(axes)
    return tuple(kept)


def _broadcast(eqn: Any, inputs: list[Spec], shape: tuple[int, ...]) -> Spec:
    spec: list[tuple[str, ...]] = [()] * len(shape)
    sizes = eqn.invars[0].aval.shape
    for i, target in enumerate(eqn.params["broadcast_dimensions"]):
        spec[target] = inputs[0][i] if sizes[i] == shape[target] else ()
    return tuple(spec)


def _transpose(eqn: Any, inputs: list[Spec], shape: tuple[int, ...]) -> Spec:
    return tuple(inputs[0][i] for i in eqn.params["permutation"])


def _reduce(eqn: Any, inputs: list[Spec], shape: tuple[int, ...]) -> Spec:
    axes = eqn.params["axes"]
    kept = (e for i, e in enumerate(inputs[0]) if i not in axes)
    return tuple(kept) if len(inputs[0]) - len(axes) == len(shape) else _none(shape)


def _squeeze(eqn: Any, inputs: list[Spec], shape: tuple[int, ...]) -> Spec:
    dims = eqn.params["dimensions"]
    return tuple(e for i, e in enumerate(inputs[0]) if i not in dims)


def _reshape(eqn: Any, inputs: list[Spec], shape: tuple[int, ...]) -> Spec:
    """Keep an axis on the first dimension of what its dimension becomes part of."""
    sizes = eqn.invars[0].aval.shape
    ends = list(itertools.accumulate(sizes, lambda a, b: a * b, initial=1))
    starts = {end: i for i, end in enumerate(ends[:-1]) if sizes[i] > 1}
    spec, before = [], 1
    for size in shape:
        index = starts.get(before) if size > 1 else None
        spec.append(() if index is None else inputs[0][index])
        before *= size
    return tuple(spec)


def _gather(eqn: Any, inputs: list[Spec], shape: tuple[int, ...]) -> Spec:
    """Rows that are looked up are sharded as what they are looked up by."""
    offsets = eqn.params["dimension_numbers"].offset_dims
    rows = iter(inputs[1])
    return tuple(() if i in offsets else next(rows, ()) for i in range(len(shape)))


def _conv(eqn: Any, inputs: list[Spec], shape: tuple[int, ...]) -> Spec:
    numbers = eqn.params["dimension_numbers"]
    spec: list[tuple[str, ...]] = [()] * len(shape)
    spec[numbers.out_spec[0]] = inputs[0][numbers.lhs_spec[0]]
    spec[numbers.out_spec[1]] = inputs[1][numbers.rhs_spec[0]]
    return _once(spec)


def _none(shape: tuple[int, ...]) -> Spec:
    return ((),) * len(shape)


# Operations along a dimension, which leave the others as they are.
_ALONG = frozenset(
    ("slice", "split", "dynamic_slice", "dynamic_update_slice", "concatenate", "pad")
    + ("rev", "sort", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
    + ("reduce_window", "reduce_window_max", "select_and_scatter_add")
    + ("scatter", "scatter-add")
)

_RULES: Mapping[str, Callable[[Any, list[Spec], tuple[int, ...]], Spec]] = {
    **dict.fromkeys(VIEWS_IN_PLACE, _elementwise),
    **{
        f"reduce_{kind}": _reduce for kind in ("sum", "max", "min", "prod", "and", "or")
    },
    **dict.fromkeys(("argmax", "argmin"), _reduce),
    "dot_general": _dot,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "gather": _gather,
    "conv_general_dilated": _conv,
}
