"""From a jaxpr to a program over buffers: calls opened, views seen through.

Loops stay loops, their bodies are programs of their own; a loop of one round is opened,
as the compiler does it. Equal work is there once, except across barriers.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from jaxckpt import _jax
from jaxckpt.graph.kinds import ELEMENTWISE, MOVES
from jaxckpt.graph.values import NAMING, is_view
from jaxckpt.memory.chip import Chip, split_parts
from jaxckpt.memory.program import Buffer, Kind, Op, Program

Known = dict[Any, Buffer | None]
"""The buffer of each variable; None for a number."""

_REDUCTIONS = frozenset(
    ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")
    + ("reduce_xor", "reduce", "argmax", "argmin")
)
_UPDATES = frozenset(
    ("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul")
    + ("scatter-sub", "scatter_min", "scatter_max", "dynamic_update_slice")
)
_CALLS = frozenset(
    ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")
    + ("shard_map", "eval_jaxpr")
)
# Additions that one element takes: lengths of the instruction sequences, rounded.
_WORK = {
    **dict.fromkeys(MOVES, 0.0),
    **dict.fromkeys(("select_n", "gather", "concatenate", "pad", "rev"), 1.0),
    **dict.fromkeys(("exp", "exp2", "log", "logistic", "div", "sqrt", "rsqrt"), 12.0),
    **dict.fromkeys(("sin", "cos", "tan", "atan2", "log1p", "expm1", "cbrt"), 40.0),
    **dict.fromkeys(("tanh", "erf", "erf_inv", "erfc", "pow", "lgamma"), 90.0),
    "digamma": 90.0,
}


def lower(closed: Any, chip: Chip) -> Program:
    """Return the program of a closed jaxpr."""
    jaxpr = _jax.open_jaxpr(closed)
    inputs = [_external(v.aval) for v in jaxpr.invars]
    known: Known = dict(zip(jaxpr.invars, inputs, strict=True))
    known |= {v: _external(v.aval) for v in jaxpr.constvars}
    lowering = _Lowering(chip)
    lowering.equations(jaxpr.eqns, known)
    outputs = [_read(known, v) for v in jaxpr.outvars]
    return Program(lowering.ops, inputs, outputs)


class _Lowering:
    """Collects the operations of one program."""

    def __init__(self, chip: Chip) -> None:
        self.chip = chip
        self.ops: list[Op] = []
        self._equal: dict[Any, list[Buffer]] = {}
        self._constants: dict[Buffer, Op] = {}
        self._barriers: dict[Buffer, int] = defaultdict(int)

    def equations(self, eqns: Iterable[Any], known: Known) -> None:
        for eqn in eqns:
            given = [_read(known, v) for v in eqn.invars]
            known.update(zip(eqn.outvars, self._equation(eqn, given), strict=True))

    def _equation(
        self, eqn: Any, given: Sequence[Buffer | None]
    ) -> Sequence[Buffer | None]:
        name = eqn.primitive.name
        if name == "optimization_barrier":
            self._barrier(eqn, given)
            return given
        if name in NAMING or is_view(eqn):
            return _named(eqn, given)
        called = _opened(eqn)
        if called is not None:
            if _keeps_apart(eqn):
                self._barrier(eqn, given)
            return self._call(called, given)
        match name:
            case "scan":
                return self._scan(eqn, given)
            case "while":
                return self._while(eqn, given)
            case "cond":
                return self._cond(eqn, given)
            case "split":
                return [self._made("slice", eqn, v, given) for v in eqn.outvars]
        return self._operation(eqn, given)

    def _barrier(self, eqn: Any, given: Sequence[Buffer | None]) -> None:
        """Order what reads the given buffers from now on behind what made them.

        Work on them before and after is not the same to the compiler.
        """
        self.ops.append(Op("barrier", Kind.BARRIER, _distinct(given), [], eqn))
        for buffer in _distinct(given):
            self._barriers[buffer] += 1

    def _call(self, called: Any, given: Sequence[Buffer | None]) -> list[Buffer | None]:
        jaxpr = _jax.open_jaxpr(called)
        known: Known = dict(zip(jaxpr.invars, given, strict=True))
        known |= {v: _external(v.aval) for v in jaxpr.constvars}
        self.equations(jaxpr.eqns, known)
        return [_read(known, v) for v in jaxpr.outvars]

    def _operation(self, eqn: Any, given: Sequence[Buffer | None]) -> list[Buffer]:
        key = self._key(eqn, given)
        if key is not None and key in self._equal:
            return self._equal[key]
        writes = [_buffer(v.aval, eqn) for v in eqn.outvars]
        kind, name = _kind(eqn), eqn.primitive.name
        if name in ("ragged_dot", "ragged_dot_general"):
            given = [self._masked(eqn, given), *given[1:]]
        op = Op(name, kind, _distinct(given), writes, eqn, _WORK.get(name, 1.0))
        op.target = given[0] if kind is Kind.UPDATE else None
        self.ops.append(op)
        self._split(op)
        if key is not None:
            self._equal[key] = writes
        if kind is Kind.FUSED and all(b in self._constants for b in op.reads):
            self._constants[writes[0]] = op
        return writes

    def _key(self, eqn: Any, given: Sequence[Buffer | None]) -> Any:
        """Return a key that equal work shares; None for what is never merged."""
        if eqn.effects or _jax.inner_jaxprs(eqn):
            return None
        inputs = tuple(
            str(v.val) if isinstance(v, _jax.Literal) else (id(b), self._passed(b))
            for v, b in zip(eqn.invars, given, strict=True)
        )
        return eqn.primitive.name, str(eqn.params), inputs, str(eqn.outvars[0].aval)

    def _passed(self, buffer: Buffer | None) -> int:
        return 0 if buffer is None else self._barriers.get(buffer, 0)

    def _masked(self, eqn: Any, given: Sequence[Buffer | None]) -> Buffer:
        """Add the left operand of a ragged product, once for each group of rows.

        XLA:GPU has no kernel of its own for it (jax 0.10.2): it multiplies the rows of
        all groups by each group's weights, with zeros for rows of other groups.
        """
        left, groups = eqn.invars[0].aval, eqn.invars[2].aval.shape[-1]
        key = "masked", *((b and id(b), self._passed(b)) for b in (given[0], given[2]))
        if key in self._equal:
            return self._equal[key][0]
        made = _buffer(left, eqn)
        self._equal[key] = [made]
        made.bytes, made.elements = groups * made.bytes, groups * made.elements
        op = Op("masked", Kind.FUSED, _distinct([given[0], given[2]]), [made], eqn)
        self.ops.append(op)
        return made

    def _split(self, op: Op) -> None:
        """Cut a product of few tiles in parts, which a reduction adds up."""
        parts = _parts(op.eqn, self.chip)
        if parts > 1:
            result = op.writes[0]
            count = parts * result.elements
            op.writes = [Buffer(4 * count, count, f"{result.label} parts", "float32")]
            total = Op("reduce_sum", Kind.REDUCE, list(op.writes), [result], work=1.0)
            self.ops.append(total)

    def _made(
        self, primitive: str, eqn: Any, variable: Any, given: Sequence[Buffer | None]
    ) -> Buffer:
        """Add a fused operation of one result and no arithmetic."""
        made = _buffer(variable.aval, eqn)
        self.ops.append(Op(primitive, Kind.FUSED, _distinct(given), [made], eqn))
        return made

    def _own(self, buffer: Buffer | None) -> Buffer | None:
        """Return a buffer that a loop may write into: constants are shared."""
        if buffer is None or buffer not in self._constants:
            return buffer
        copy = dataclasses.replace(buffer)
        op = self._constants[buffer]
        self.ops.append(dataclasses.replace(op, writes=[copy], reads=list(op.reads)))
        return copy

    def _scan(
        self, eqn: Any, given: Sequence[Buffer | None]
    ) -> Sequence[Buffer | None]:
        if eqn.params["length"] == 1:
            return self._once(eqn, given)
        num_consts, num_carry = _jax.scan_counts(eqn)
        first = num_consts + num_carry
        carry = [self._own(b) for b in given[num_consts:first]]
        body, results = _scan_body(eqn, num_consts, num_carry, self.chip)
        stacks = self._stacks(eqn, eqn.outvars[num_carry:], results)
        after = [_buffer(v.aval, eqn) for v in eqn.outvars[:num_carry]]
        reads = [*carry, *stacks, *given[first:], *given[:num_consts]]
        self.ops.append(
            Op(
                "scan",
                Kind.LOOP,
                _distinct(reads),
                after,
                eqn,
                inner=(body,),
                times=eqn.params["length"],
                carried=tuple(zip(carry, after, strict=True)),
                stacked=tuple(dict.fromkeys(stacks)),
            )
        )
        return [*after, *stacks]

    def _stacks(
        self, eqn: Any, variables: Sequence[Any], results: Sequence[Buffer | None]
    ) -> list[Buffer]:
        """Add the zeros that a loop's stacks begin with.

        What a body stacks twice, once under a name say, is one stack to the compiler;
        but not in another shape.
        """
        known: dict[Any, Buffer] = {}
        stacks = []
        for variable, result in zip(variables, results, strict=True):
            key = (result or variable, variable.aval.shape)
            if key not in known:
                known[key] = self._made("zeros", eqn, variable, ())
                if result is not None and result.label:
                    known[key].label = result.label
            stacks.append(known[key])
        return stacks

    def _once(
        self, eqn: Any, given: Sequence[Buffer | None]
    ) -> Sequence[Buffer | None]:
        """Open a loop of one round."""
        return self._call(eqn.params["jaxpr"], given)

    def _while(self, eqn: Any, given: Sequence[Buffer | None]) -> list[Buffer]:
        skip = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        body = lower(eqn.params["body_jaxpr"], self.chip)
        inputs = body.inputs[eqn.params["body_nconsts"] :]
        body.returned = tuple(zip(inputs, body.outputs, strict=True))
        carry = [self._own(b) for b in given[skip:]]
        after = [_buffer(v.aval, eqn) for v in eqn.outvars]
        op = Op("while", Kind.LOOP, _distinct([*carry, *given[:skip]]), after, eqn)
        op.inner, op.carried = (body,), tuple(zip(carry, after, strict=True))
        self.ops.append(op)
        return after

    def _cond(self, eqn: Any, given: Sequence[Buffer | None]) -> list[Buffer]:
        made = [_buffer(v.aval, eqn) for v in eqn.outvars]
        branches = tuple(lower(b, self.chip) for b in eqn.params["branches"])
        op = Op("cond", Kind.BRANCH, _distinct(given), made, eqn, inner=branches)
        self.ops.append(op)
        return made


def _scan_body(
    eqn: Any, num_consts: int, num_carry: int, chip: Chip
) -> tuple[Program, list[Buffer | None]]:
    """Lower a scan's body: its slices are cut from stacks, its results go into stacks.

    A result is written into its stack as soon as it is there.

    Returns:
        The body, and what it puts into each stack.
    """
    jaxpr = _jax.open_jaxpr(eqn.params["jaxpr"])
    first = num_consts + num_carry
    inputs = [_external(v.aval) for v in jaxpr.invars]
    known: Known = dict(zip(jaxpr.invars, inputs, strict=True))
    known |= {v: _external(v.aval) for v in jaxpr.constvars}
    lowering = _Lowering(chip)
    for variable, stack in zip(jaxpr.invars[first:], inputs[first:], strict=True):
        known[variable] = lowering._made("dynamic_slice", eqn, variable, [stack])
    lowering.equations(jaxpr.eqns, known)
    outputs = [_read(known, v) for v in jaxpr.outvars]
    for result in _distinct(outputs[num_carry:]):
        place = next(
            (i for i, op in enumerate(lowering.ops) if result in op.writes), -1
        )
        lowering.ops.insert(place + 1, Op("store", Kind.STORE, [result], [], eqn))
    carry = inputs[num_consts:first]
    returned = tuple(zip(carry, outputs[:num_carry], strict=True))
    body = Program(lowering.ops, inputs, outputs[:num_carry], returned)
    return body, outputs[num_carry:]


def _kind(eqn: Any) -> Kind:
    name = eqn.primitive.name
    if name in _REDUCTIONS:
        return Kind.REDUCE
    if name in _UPDATES:
        return Kind.UPDATE
    moves_memory = name == "device_put" or bool(eqn.effects) or len(eqn.outvars) != 1
    fused = name in ELEMENTWISE or name in MOVES
    return Kind.FUSED if fused and not moves_memory else Kind.KERNEL


def _parts(eqn: Any, chip: Chip) -> int:
    if eqn.primitive.name != "dot_general":
        return 1
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval.shape
    depth = math.prod(left[d] for d in contracted)
    rows = math.prod(left) // max(1, depth)
    columns = eqn.outvars[0].aval.size // max(1, rows)
    if batch:  # tiles do not reach across the matrices of a batch
        matrices = math.prod(left[d] for d in batch)
        rows = matrices * 128 * -(-rows // matrices // 128)
    return split_parts(rows, columns, depth, chip)


def _opened(eqn: Any) -> Any | None:
    """Return the jaxpr of a call that the compiler inlines, else None."""
    remat = _jax.remat_parameters(eqn)
    if remat is not None:
        return remat["jaxpr"]
    if eqn.primitive.name not in _CALLS:
        return None
    return next(iter(_jax.inner_jaxprs(eqn).values()), None)


def _keeps_apart(eqn: Any) -> bool:
    """Return whether a rematerialised call stands behind a barrier."""
    remat = _jax.remat_parameters(eqn)
    return remat is not None and remat.get("prevent_cse", True) is not False


def _named(eqn: Any, given: Sequence[Buffer | None]) -> Sequence[Buffer | None]:
    name, source = _jax.bound_name(eqn), given[0]
    if name is not None and source is not None and not source.external:
        source.label = name
    return given[: len(eqn.outvars)]


def _read(known: Known, atom: Any) -> Buffer | None:
    return None if isinstance(atom, _jax.Literal) else known[atom]


def _distinct(buffers: Iterable[Buffer | None]) -> list[Buffer]:
    return list(dict.fromkeys(b for b in buffers if b is not None))


def _external(aval: Any) -> Buffer:
    return dataclasses.replace(_buffer(aval, None), external=True)


def _buffer(aval: Any, eqn: Any) -> Buffer:
    label = ""
    if eqn is not None:
        label = "/".join(filter(None, (_jax.scope(eqn), eqn.primitive.name)))
    host = _jax.memory_space(aval) == "host"
    dtype = str(getattr(aval, "dtype", ""))
    return Buffer(_jax.nbytes(aval), getattr(aval, "size", 1), label, dtype, host)
