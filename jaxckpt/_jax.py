"""The only place that touches JAX's internals, so that a new version changes one file.

Checked with jax 0.10.2 and 0.12.0. What differs between them, or sits behind JAX's
extension interface (`jax.extend.core`), gets one plain function here.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import pathlib
import re
import types
from collections.abc import Callable, Iterator, Sequence
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

_PACKAGE = str(pathlib.Path(__file__).parent) + os.sep

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


def barrier_equation(variables: Sequence[Any], after: Sequence[Any], like: Any) -> Any:
    """Return `after = optimization_barrier(variables)` as an equation, as `like`."""
    return jex.new_jaxpr_eqn(
        list(variables),
        list(after),
        jax.lax.optimization_barrier_p,
        {},
        set(),
        like.source_info,
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

    The solvers of a `custom_linear_solve` (a named tuple) are not looked into, nor how
    scatters and reductions combine two numbers.
    Branches of a `cond` come as `branches[0]`, `branches[1]`, ... A `custom_vjp` call
    gives its primal function; its forward rule is `forward_rule`.
    """
    if "_prim" in eqn.params:
        inner = getattr(eqn.params["_prim"], "params", {})
        return {k: v for k, v in inner.items() if is_jaxpr(v)}
    found: dict[str, Any] = {}
    if eqn.primitive.name.startswith(("scatter", "reduce", "select_and")):
        return found
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
    """Return `file:line (function)` of the user's code that made an equation.

    It is the innermost that is neither JAX's nor ours; empty where there is none.
    """
    for frame in _source_info_util.user_frames(eqn.source_info.traceback):
        if not frame.file_name.startswith(_PACKAGE):
            return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
    return ""


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
    """Return the bytes of a value of this type on one device, as far as types say.

    A type says how a value is sharded where the mesh axes are explicit, and inside
    `shard_map`, where it is that of one device's part. Over axes that the compiler
    shards by itself (`AxisType.Auto`) it counts whole. A typed random key counts its
    words; a type without a dtype counts nothing.
    """
    dtype = getattr(aval, "dtype", None)
    if dtype is None or dtype == jax.dtypes.float0:
        return 0
    size = math.prod(local_shape(aval.shape, getattr(aval, "sharding", None)))
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        key = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return size * key.size * key.dtype.itemsize
    return size * dtype.itemsize


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


def typed_by_mesh(aval: Any) -> bool:
    """Return whether a type says how its values lie on a mesh."""
    spec = getattr(getattr(aval, "sharding", None), "spec", ())
    return varies_over_mesh(aval) or any(part is not None for part in spec)


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


def cut_jaxpr(jaxpr: Any, eqns: Sequence[Any], inputs: Any, outputs: Any) -> Any:
    """Return some equations of an open jaxpr as a closed jaxpr without constants."""
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    info: Any = jaxpr.debug_info
    names = info.with_unknown_names() if info else info
    opened = jex.Jaxpr([], list(inputs), list(outputs), list(eqns), effects, names)
    return close_jaxpr(opened)


@contextlib.contextmanager
def in_place_of(eqn: Any) -> Iterator[None]:
    """Trace what stands for an equation where it stands: name stack, line, mesh."""
    stack = _source_info_util.current_name_stack() + eqn.source_info.name_stack
    line = eqn.source_info.traceback
    with _source_info_util.user_context(line, name_stack=stack), eqn.ctx.manager:
        yield


class _Marked(_source_info_util.SourceInfo):
    """Where an equation was written, and a mark that goes with it wherever it goes."""

    __slots__ = ("mark",)

    def replace(self, **changes: Any) -> Any:
        info = _Marked(
            changes.get("traceback") or self.traceback,
            changes.get("name_stack") or self.name_stack,
        )
        info.mark = self.mark
        return info


def with_mark(eqn: Any, mark: Any) -> Any:
    """Return an equation with a mark that says nothing to JAX."""
    info = _Marked(eqn.source_info.traceback, eqn.source_info.name_stack)
    info.mark = mark
    return eqn.replace(source_info=info)


def mark_of(eqn: Any) -> Any:
    """Return the mark of an equation, None where it has none."""
    return getattr(eqn.source_info, "mark", None)


def local_shape(shape: Sequence[int], sharding: Any) -> tuple[int, ...]:
    """Return the shape of the largest part of an array on one device.

    A sharding without partition spec (of one device, of the compiler) says nothing.
    """
    spec, mesh = getattr(sharding, "spec", None), getattr(sharding, "mesh", None)
    if spec is None or mesh is None or mesh.empty:
        return tuple(shape)
    parts = [math.prod(mesh.shape[a] for a in mesh_axes(entry)) for entry in spec]
    parts += [1] * (len(shape) - len(parts))
    return tuple(-(-size // part) for size, part in zip(shape, parts, strict=True))


def mesh_axes(entry: Any) -> tuple[Any, ...]:
    """Return the mesh axes of one dimension's entry in a partition spec."""
    if isinstance(entry, (tuple, list)):
        return tuple(entry)
    return (entry,) if isinstance(entry, str) else ()


def shards(eqn: Any) -> int:
    """Return on how many devices a `shard_map` runs its body apart, else 1."""
    if eqn.primitive.name != "shard_map":
        return 1
    mesh = eqn.params["mesh"]
    axes = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes"))
    return math.prod(mesh.shape[axis] for axis in axes or mesh.axis_names)


def plain_call(eqn: Any) -> Any | None:
    """Return the closed jaxpr of a call that its equations can stand for, else None.

    A `jit` with shardings, layouts or compiler options of its own says more than they.
    """
    if called_jaxpr(eqn) is None:
        return None
    params = eqn.params
    for key in ("in_shardings", "out_shardings"):
        if any(type(s).__name__ != "UnspecifiedValue" for s in params.get(key, ())):
            return None
    layouts = (*params.get("in_layouts", ()), *params.get("out_layouts", ()))
    if any(x is not None for x in layouts) or params.get("compiler_options_kvs"):
        return None
    return params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]


def with_outer_scope(eqn: Any, outer: Any) -> Any:
    """Return an equation with the name stack of another one put before its own."""
    info = eqn.source_info
    if not outer.source_info.name_stack.stack:
        return eqn
    stack = outer.source_info.name_stack + info.name_stack
    return eqn.replace(source_info=info.replace(name_stack=stack))


def with_constants(closed: Any, jaxpr: Any, more: dict[Any, Any]) -> Any:
    """Return `closed` with its open jaxpr replaced and constants added to its own.

    Args:
        closed: A closed jaxpr.
        jaxpr: An open jaxpr with the same constants.
        more: Value by variable of what it reads besides.
    """
    if not more:
        return with_jaxpr(closed, jaxpr)
    variables = [*jaxpr.constvars, *more]
    values = [*closed.consts, *more.values()]
    if type(closed).__name__ == "ClosedJaxpr":
        return jex.ClosedJaxpr(jaxpr.replace(constvars=variables), values)
    return jaxpr.replace(constvars=variables, consts=values)


def same_inputs_jaxpr(eqn: Any) -> Any | None:
    """Return the jaxpr of a call that takes and gives what the equation does.

    Plain calls, rematerialised ones, primal functions of custom derivatives, and the
    body of a `shard_map`, which sees one device's part of each.
    """
    if eqn.primitive.name in ("scan", "while", "cond", "pallas_call"):
        return None
    found = inner_jaxprs(eqn)
    jaxpr = open_jaxpr(found.get("jaxpr", found.get("call_jaxpr")))
    if jaxpr is None:
        return None
    counts = len(jaxpr.invars), len(jaxpr.outvars)
    return jaxpr if counts == (len(eqn.invars), len(eqn.outvars)) else None


def policy_names(policy: Any) -> frozenset[str] | None:
    """Return the names that one of JAX's policies keeps or offloads.

    None for a policy that does not go by names, or is none of JAX's. JAX says it
    nowhere: the names are what the policy was made with.
    """
    if getattr(policy, "__module__", None) != jax.checkpoint.__module__:
        return None
    if (names := getattr(policy, "saveable_names", None)) is not None:
        return frozenset(names)
    if not isinstance(policy, types.FunctionType):
        return None
    made_with = inspect.getclosurevars(policy).nonlocals
    parts = [policy_names(made_with.get(f"policy_{i}")) for i in (1, 2)]
    parts += [made_with.get(f"names_which_can_be_{how}") for how in _HOW]
    found = [frozenset(part) for part in parts if part is not None]
    return frozenset().union(*found) if found else None


_HOW = ("saved", "offloaded")


def excepts_names(policy: Any) -> bool:
    """Return whether a policy is JAX's "save all but these", which saves all."""
    made_by = getattr(policy, "__qualname__", "").split(".")[0]
    return made_by == "save_anything_except_these_names"
