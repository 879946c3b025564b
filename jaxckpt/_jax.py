"""The only place that touches JAX's internals, so that a new version changes one file.

Checked with jax 0.10.2 and 0.12.0. What differs between them, or sits behind JAX's
extension interface (`jax.extend.core`), gets one plain function here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import ad_util as _ad_util
from jax._src import config as _config
from jax._src import linear_util as _lu
from jax._src import source_info_util as _source_info_util
from jax._src.interpreters import partial_eval as _pe
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex
from jax.interpreters import ad as _ad

Var = jex.Var
Literal = jex.Literal

SAVEABLE = _pe.Saveable
RECOMPUTE = _pe.Recompute


def offloadable(source: str, destination: str) -> Any:
    """Return JAX's policy answer that moves a value between memory spaces."""
    return _pe.Offloadable(src=source, dst=destination)


def remat3_enabled() -> bool:
    """Return whether JAX's new remat engine (`JAX_REMAT3=1`) is switched on."""
    return bool(getattr(jax.config, "jax_remat3", False))


def trace_context() -> Any:
    """Return JAX's own key of what changes a trace from outside (x64, mesh, ...)."""
    return _config.trace_context()


def open_jaxpr(jaxpr: Any) -> Any:
    """Return the jaxpr without its constants (0.12 merged the two classes)."""
    return jaxpr.jaxpr if type(jaxpr).__name__ == "ClosedJaxpr" else jaxpr


def is_jaxpr(value: Any) -> bool:
    """Return whether a parameter of an equation is a jaxpr, closed or not."""
    return type(value).__name__ in ("Jaxpr", "ClosedJaxpr")


def close_jaxpr(jaxpr: Any) -> Any:
    """Return a closed jaxpr of one without constants (0.10 has a class for each)."""
    if type(jaxpr).__name__ == "Jaxpr" and not hasattr(jaxpr, "consts"):
        return jex.ClosedJaxpr(jaxpr, ())
    return jaxpr


def with_jaxpr(closed: Any, jaxpr: Any) -> Any:
    """Return `closed` with its open jaxpr replaced, constants kept."""
    if type(closed).__name__ == "ClosedJaxpr":
        return closed.replace(jaxpr=jaxpr)
    return jaxpr


def jaxpr_function(closed: Any) -> Callable[..., list[Any]]:
    """Return a function that evaluates a closed jaxpr on flat arguments."""
    return jex.jaxpr_as_fun(closed)


def bound_name(eqn: Any) -> str | None:
    """Return the name that a `checkpoint_name` equation gives, else None."""
    if eqn.primitive.name == "name":
        return eqn.params["name"]
    inner = eqn.params.get("_prim")
    return inner.name if type(inner).__name__.startswith("CheckpointName") else None


def rename(eqn: Any, name: str) -> Any:
    """Return a `checkpoint_name` equation that gives another name."""
    if eqn.primitive.name == "name":
        return eqn.replace(params=dict(eqn.params, name=name))
    inner = type(eqn.params["_prim"])(name, eqn.invars[0].aval)
    return eqn.replace(params=dict(eqn.params, _prim=inner))


def name_equation(variable: Any, named: Any, name: str, like: Any) -> Any:
    """Return `named = checkpoint_name(variable, name)` as an equation, as `like`."""
    aval = variable.aval
    abstract = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    template = open_jaxpr(jax.make_jaxpr(lambda x: checkpoint_name(x, name))(abstract))
    eqn = template.eqns[0]
    params = eqn.params
    if "_prim" in params:
        params = dict(params, _prim=type(params["_prim"])(name, aval))
    return jex.new_jaxpr_eqn(
        [variable], [named], eqn.primitive, params, eqn.effects, like.source_info
    )


def new_variable(like: Any) -> Any:
    """Return a fresh variable of the same type."""
    return Var(like.aval)


def is_drop(variable: Any) -> bool:
    """Return whether an output of an equation is thrown away."""
    return type(variable).__name__ == "DropVar"


def remat_parameters(eqn: Any) -> dict[str, Any] | None:
    """Return jaxpr, policy, `prevent_cse` of a rematerialised call, else None."""
    if eqn.primitive.name in ("checkpoint", "remat", "remat2"):
        return eqn.params
    inner = eqn.params.get("_prim")
    return inner.params if type(inner).__name__ == "RematTraced" else None


def inner_jaxprs(eqn: Any) -> dict[str, Any]:
    """Return the jaxprs that an equation runs, by parameter name.

    The solvers of a `custom_linear_solve` (a named tuple) are not looked into.
    Branches of a `cond` come as `branches[0]`, `branches[1]`, ... A `custom_vjp` call
    gives its primal function; its forward rule is `forward_rule`.
    """
    if "_prim" in eqn.params:
        inner = getattr(eqn.params["_prim"], "params", {})
        return {k: v for k, v in inner.items() if is_jaxpr(v)}
    found: dict[str, Any] = {}
    for key, value in eqn.params.items():
        if is_jaxpr(value):
            found[key] = value
        elif type(value) is tuple and value and all(map(is_jaxpr, value)):
            found.update({f"{key}[{i}]": v for i, v in enumerate(value)})
    return found


def called_jaxpr(eqn: Any) -> Any | None:
    """Return the jaxpr of a plain call (`jit` and the like), else None."""
    if eqn.primitive.name in ("jit", "pjit"):
        return open_jaxpr(eqn.params["jaxpr"])
    if eqn.primitive.name in ("closed_call", "core_call", "eval_jaxpr"):
        return open_jaxpr(eqn.params["call_jaxpr"])
    return None


def replace_inner(eqn: Any, replaced: dict[str, Any]) -> Any:
    """Return the equation with some of its `inner_jaxprs` replaced."""
    if not replaced:
        return eqn
    params: dict[str, Any] = dict(eqn.params)
    for key, value in replaced.items():
        if "[" in key:
            base, index = key[:-1].split("[")
            items = list(params[base])
            items[int(index)] = value
            params[base] = tuple(items)
        else:
            params[key] = value
    return eqn.replace(params=params)


def forward_rule(eqn: Any) -> tuple[Any, list[Any], int] | None:
    """Return a `custom_vjp` call's traced forward rule, or None for other equations.

    Returns:
        The open jaxpr of the rule, whose outputs are the residuals it makes followed by
        the call's outputs; its constants; and the number of those residuals.
    """
    if eqn.primitive.name != "custom_vjp_call":
        return None
    constants = eqn.params["num_consts"]
    nonzeros = (True,) * (len(eqn.invars) - constants)
    jaxpr, consts = eqn.params["fwd_jaxpr_thunk"].call_wrapped(*nonzeros)
    jaxpr = open_jaxpr(jaxpr)
    return jaxpr, list(consts), len(jaxpr.outvars) - len(eqn.outvars)


def with_forward_rule(eqn: Any, change: Callable[[Any], Any]) -> Any:
    """Return a `custom_vjp` call whose forward rule is `change(open jaxpr)`."""
    original = eqn.params["fwd_jaxpr_thunk"]

    def changed(*nonzeros: bool) -> tuple[Any, Sequence[Any]]:
        jaxpr, consts = original.call_wrapped(*nonzeros)
        return with_jaxpr(jaxpr, change(open_jaxpr(jaxpr))), consts

    thunk = _lu.wrap_init(changed, debug_info=original.debug_info)
    return eqn.replace(params=dict(eqn.params, fwd_jaxpr_thunk=thunk))


def called_function(eqn: Any) -> str | None:
    """Return the name of the function that a `custom_vjp` call runs, else None."""
    if eqn.primitive.name != "custom_vjp_call":
        return None
    info = getattr(open_jaxpr(eqn.params["call_jaxpr"]), "debug_info", None)
    return info.func_src_info.split(" ")[0] if info else None


def source_line(eqn: Any) -> str:
    """Return `file:line (function)` of the user's code that made an equation."""
    return _source_info_util.summarize(eqn.source_info)


def scope(eqn: Any) -> str:
    """Return the name stack of an equation: `jax.named_scope`s and flax module path.

    Flax also pushes its methods (`layers._attention`), JAX its transformations
    (`jvp(layers)`); both are left out.
    """
    stack = re.sub(r"\b(jvp|transpose|vmap)\(|\)", "", str(eqn.source_info.name_stack))
    return "/".join(p for p in stack.split("/") if p and "." not in p)


def memory_space(aval: Any) -> str:
    """Return `"host"` for a value whose type says host memory, else `"device"`."""
    space = str(getattr(aval, "memory_space", "device")).lower()
    return "host" if "host" in space else "device"


def nbytes(aval: Any) -> int:
    """Return the bytes of a value of this type on one device.

    A typed random key counts its words; a type without a dtype counts nothing.
    """
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return 0
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        key = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return aval.size * key.size * key.dtype.itemsize
    return aval.size * dtype.itemsize


def version() -> tuple[int, ...]:
    """Return JAX's version as numbers, (0, 12, 0) for `0.12.0.1`."""
    return tuple(map(int, jax.__version__.split(".")[:3]))


_mark_p = jex.Primitive("jaxckpt_mark")
_mark_p.def_impl(lambda x, *, index: x)
_mark_p.def_abstract_eval(lambda x, *, index: x)


def _mark_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, index: int) -> Any:
    return _mark_p.bind(primals[0], index=index), tangents[0]


_ad.primitive_jvps[_mark_p] = _mark_jvp


def mark_equation(variable: Any, marked: Any, index: int, like: Any) -> Any:
    """Return an identity equation that carries a number through differentiation.

    Unlike a name it is an operation as any other to both remat engines: it is in the
    backward program exactly where the value is computed there again.
    """
    params = {"index": index}
    return jex.new_jaxpr_eqn(
        [variable], [marked], _mark_p, params, set(), like.source_info
    )


def mark_index(eqn: Any) -> int | None:
    """Return the number of a `mark_equation`, else None."""
    return eqn.params["index"] if eqn.primitive is _mark_p else None


def scan_counts(eqn: Any) -> tuple[int, int]:
    """Return how many inputs of a scan are constants, and how many are carried."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def rule_sources(eqn: Any) -> list[str]:
    """Return `name at file:line` of each derivative rule that an equation carries."""
    rules = (eqn.params.get(key) for key in ("jvp_jaxpr_fun", "bwd"))
    return [r.debug_info.func_src_info for r in rules if hasattr(r, "debug_info")]


def varies_over_mesh(aval: Any) -> bool:
    """Return whether values of a type differ by device, inside `shard_map`."""
    kind = getattr(aval, "manual_axis_type", None)
    return kind is not None and bool(kind.varying)


def without_dead_code(closed: Any) -> Any:
    """Return a closed jaxpr without the operations that no output needs."""
    return select_outputs(closed, [True] * len(open_jaxpr(closed).outvars))


def constants_as_inputs(closed: Any) -> tuple[Any, list[Any]]:
    """Return a jaxpr whose constants come first among its inputs, and the constants."""
    opened = _pe.convert_constvars_jaxpr(open_jaxpr(closed))
    return close_jaxpr(opened), list(closed.consts)


def select_outputs(closed: Any, wanted: Sequence[bool], *, effects: bool = True) -> Any:
    """Return a closed jaxpr with some of its outputs only; its inputs stay.

    Args:
        closed: A closed jaxpr.
        wanted: Which outputs, in order.
        effects: Whether operations with effects (callbacks) stay that no output needs.
    """
    jaxpr = open_jaxpr(closed)
    if not effects:
        jaxpr = _without_unread(jaxpr, wanted)
    live, _ = _pe.dce_jaxpr(jaxpr, list(wanted), instantiate=True)
    return with_jaxpr(closed, live)


def _without_unread(jaxpr: Any, wanted: Sequence[bool]) -> Any:
    read = {id(v) for v, w in zip(jaxpr.outvars, wanted, strict=True) if w}
    kept: list[Any] = []
    for eqn in reversed(jaxpr.eqns):
        if any(id(v) in read for v in eqn.outvars):
            read.update(map(id, eqn.invars))
            kept.insert(0, eqn)
    effects = frozenset().union(*(eqn.effects for eqn in kept))
    return jaxpr.replace(eqns=kept, effects=effects)


def vmapped_axes(closed: Any) -> set[Any]:
    """Return the names of `vmap` axes that a program's collectives go over."""
    effects = open_jaxpr(closed).effects
    names = {e.name for e in effects if type(e).__name__ == "NamedAxisEffect"}
    return names - set(jax.sharding.get_abstract_mesh().manual_axes)


def abstract_array(aval: Any, leading: int | None = None) -> jax.ShapeDtypeStruct:
    """Return an abstract array of a type, or of a stack of them.

    Over which mesh axes it differs inside `shard_map` is part of the type.
    """
    shape = aval.shape if leading is None else (leading, *aval.shape)
    sharding = getattr(aval, "sharding", None) if leading is None else None
    return jax.ShapeDtypeStruct(
        shape,
        aval.dtype,
        sharding=sharding,
        manual_axis_type=getattr(aval, "manual_axis_type", None),
    )


def zeros(aval: Any) -> Any:
    """Return zeros of a type."""
    return _ad_util.zeros_like_aval(aval)


def add_any(x: Any, y: Any) -> Any:
    """Return the sum of two cotangents, as JAX adds them up."""
    return _ad.add_jaxvals(x, y)
