"""The cuts of a program, and the program with each piece's equations side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from jaxckpt import _jax
from jaxckpt.graph.flops import matmul_flops
from jaxckpt.graph.inline import flattened_inside
from jaxckpt.graph.stages.cut import Piece, cut_layers
from jaxckpt.graph.stages.marks import cut_at_marks
from jaxckpt.graph.stages.program import Program, variables
from jaxckpt.graph.stages.scan import carries_products
from jaxckpt.graph.values import Path

_MOST = 0.9
"""Share of a program's work that a call must hold to be cut in its place."""


@dataclass(frozen=True, eq=False)
class Part:
    """A stage before it has a name; attributes as those of `stages.Stage`.

    Attributes:
        stack: Number of the stack that it belongs to, None for none.
        mark: The name that the user gave it.
        scopes: The name stacks of its equations.
    """

    place: Path
    start: int
    stop: int
    body: Any
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    flops: int
    carry_bytes: int
    layers: int = 1
    scanned: bool = False
    times: int = 1
    stack: int | None = None
    mark: str | None = None
    scopes: tuple[str, ...] = field(default=(), repr=False)


def cut_program(jaxpr: Any) -> tuple[Any, list[Part]]:
    """Return the program in an order that suits its stages, and the stages.

    Args:
        jaxpr: An open jaxpr, flattened, without dead code.
    """
    return _cut(jaxpr, (), 1, count())


def _cut(
    jaxpr: Any, place: Path, times: int, numbers: count[int]
) -> tuple[Any, list[Part]]:
    program = Program(jaxpr)
    pieces = cut_at_marks(program)
    inside = None
    if pieces is None:
        pieces = cut_layers(program)
        inside = _holder(program, pieces)
    if inside is None:
        return _assembled(program, pieces, place, times, numbers)
    return _opened(program, inside, place, times, numbers)


def _holder(program: Program, pieces: Sequence[Piece]) -> tuple[int, str] | None:
    """Return the equation that holds the layers, and its parameter, else None.

    It is a call or a loop over microbatches in which nearly all the work is done.
    """
    if any(piece.stack is not None for piece in pieces) or not program.products:
        return None
    number = max(program.products, key=lambda i: program.flops[i])
    if program.flops[number] < _MOST * sum(program.flops):
        return None
    key = _held_in(program.eqns[number])
    return None if key is None else (number, key)


def _held_in(eqn: Any) -> str | None:
    """Return the parameter with what an equation runs in its place, else None."""
    match eqn.primitive.name:
        case "shard_map" | "jit" | "pjit":
            return "jaxpr"
        case "scan":
            return None if carries_products(eqn) else "jaxpr"
        case "cond":
            inner = _jax.inner_jaxprs(eqn)
            return max(inner, key=lambda branch: matmul_flops(inner[branch]))
    return None if _jax.remat_parameters(eqn) is None else "jaxpr"


def _opened(
    program: Program,
    inside: tuple[int, str],
    place: Path,
    times: int,
    numbers: count[int],
) -> tuple[Any, list[Part]]:
    """Cut what stands inside an equation, and what stands before and behind it."""
    number, key = inside
    before = [i for i in range(len(program.eqns)) if i < number]
    behind = [i for i in range(len(program.eqns)) if i > number]
    pieces = [Piece(before), Piece([number]), Piece(behind)]
    jaxpr, outer = _assembled(program, pieces, place, times, numbers)
    at = len(before)
    eqn = jaxpr.eqns[at]
    inner = _jax.inner_jaxprs(eqn)[key]
    flat = _jax.without_dead_code(_jax.close_jaxpr(flattened_inside(inner)))
    length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    here = (*place, at, key)
    changed, parts = _cut(_jax.open_jaxpr(flat), here, times * length, numbers)
    changed = _jax.replace_inner(eqn, {key: _jax.with_jaxpr(inner, changed)})
    eqns = [*jaxpr.eqns[:at], changed, *jaxpr.eqns[at + 1 :]]
    first = [part for part in outer if part.stop <= at]
    last = [part for part in outer if part.start > at]
    return jaxpr.replace(eqns=eqns), [*first, *parts, *last]


def _assembled(
    program: Program,
    pieces: Sequence[Piece],
    place: Path,
    times: int,
    numbers: count[int],
) -> tuple[Any, list[Part]]:
    """Return the jaxpr in the order of its pieces, and the stages that they are."""
    pieces = [piece for piece in pieces if piece.numbers]
    eqns = [program.eqns[i] for piece in pieces for i in piece.numbers]
    jaxpr = program.jaxpr.replace(eqns=eqns)
    stacks = {piece.stack for piece in pieces if piece.stack is not None}
    global_number = {stack: next(numbers) for stack in sorted(stacks)}
    boundaries = _Boundaries(program, pieces)
    parts = []
    for index, piece in enumerate(pieces):
        inputs, outputs = boundaries.variables(index)
        start = boundaries.starts[index]
        part = Part(
            place=place,
            start=start,
            stop=start + len(piece.numbers),
            body=_jax.cut_jaxpr(jaxpr, boundaries.eqns(index), inputs, outputs),
            inputs=inputs,
            outputs=outputs,
            flops=sum(program.flops[i] for i in piece.numbers),
            carry_bytes=boundaries.crossing(index),
            times=times,
            stack=None if piece.stack is None else global_number[piece.stack],
            mark=piece.mark,
            scopes=tuple(_scope("", eqn) for eqn in boundaries.eqns(index)),
        )
        parts.append(_looped(part, eqns[start]) if piece.scanned else part)
    return jaxpr, parts


def _looped(part: Part, eqn: Any) -> Part:
    """Return a stage that is a loop over layers."""
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    inside = tuple(_scope(part.scopes[0], e) for e in _jax.open_jaxpr(body).eqns)
    return replace(
        part,
        body=body,
        layers=length,
        scanned=True,
        flops=matmul_flops(body),
        scopes=inside,
    )


def _scope(outer: str, eqn: Any) -> str:
    """Return the whole name stack of an equation, without the formulas of `einsum`."""
    inner = (part for part in _jax.scope(eqn).split("/") if "->" not in part)
    return "/".join(filter(None, (outer, *inner)))


class _Boundaries:
    """What crosses from piece to piece.

    Args:
        program: The program.
        pieces: Its pieces, in order, none of them empty.
    """

    def __init__(self, program: Program, pieces: Sequence[Piece]) -> None:
        self._program = program
        self._pieces = pieces
        sizes = [len(piece.numbers) for piece in pieces]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self._made: dict[Any, int] = {}
        self._last: dict[Any, int] = {}
        for index in range(len(pieces)):
            for eqn in self.eqns(index):
                self._last.update(dict.fromkeys(variables(eqn.invars), index))
                made = (v for v in eqn.outvars if not _jax.is_drop(v))
                self._made.update(dict.fromkeys(made, index))
        results = variables(program.jaxpr.outvars)
        self._last.update(dict.fromkeys(results, len(pieces)))
        self._crossing = self._all_crossing()

    def eqns(self, index: int) -> list[Any]:
        """Return the equations of a piece."""
        return [self._program.eqns[i] for i in self._pieces[index].numbers]

    def variables(self, index: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return what a piece reads, and what it makes that is read behind it."""
        inputs: dict[Any, None] = {}
        outputs = []
        for eqn in self.eqns(index):
            read = variables(eqn.invars)
            inputs.update((v, None) for v in read if self._made.get(v) != index)
            made = (v for v in eqn.outvars if not _jax.is_drop(v))
            outputs += [v for v in made if self._last.get(v, index) > index]
        return tuple(inputs), tuple(outputs)

    def crossing(self, index: int) -> int:
        """Return the bytes that cross the start of a piece."""
        total = self._crossing[index]
        if not self._pieces[index].scanned:
            return total
        (eqn,) = self.eqns(index)
        consts, carries = _jax.scan_counts(eqn)
        ends = {v for v in variables(eqn.invars[consts:]) if self._crosses(v, index)}
        ends -= set(variables(eqn.invars[:consts]))
        carried = _jax.open_jaxpr(eqn.params["jaxpr"]).invars[consts : consts + carries]
        total -= sum(_jax.nbytes(v.aval) for v in ends)
        return total + sum(_jax.nbytes(v.aval) for v in carried)

    def _crosses(self, variable: Any, index: int) -> bool:
        """Return whether the start of a piece is the last that a value crosses."""
        computed = variable in self._made and variable not in self._program.arguments
        return computed and self._last[variable] == index

    def _all_crossing(self) -> list[int]:
        changes = [0] * (len(self._pieces) + 2)
        for variable, made in self._made.items():
            last = self._last.get(variable, made)
            if last > made and variable not in self._program.arguments:
                changes[made + 1] += _jax.nbytes(variable.aval)
                changes[last + 1] -= _jax.nbytes(variable.aval)
        totals, total = [], 0
        for change in changes:
            total += change
            totals.append(total)
        return totals
