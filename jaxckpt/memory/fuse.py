"""Which values lie in memory, and which are worked out where they are read.

XLA:GPU fuses an operation into all that read it where the kernels then take less time
together; a value that is fused everywhere is never stored. The same comparison is made
here, the greatest saving first: bytes over the memory's rate, arithmetic over the
chip's. What the compiler does besides stands here too, one function each.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator

from jaxckpt.memory.chip import Chip
from jaxckpt.memory.program import Buffer, Kind, Op, Program

_TAKES_IN = (Kind.FUSED, Kind.REDUCE, Kind.STORE, Kind.UPDATE)
_MOST_READS = 48  # of one kernel; XLA stops at 96 inputs and outputs together


def fuse(program: Program, chip: Chip) -> None:
    """Fuse the operations of a program, in place; those of inner programs too.

    Afterwards its operations are kernels, and what they read and write is stored.
    """
    for op in program.ops:
        for inner in op.inner:
            fuse(inner, chip)
    graph = _Uses(program)
    _add_into_target(graph)
    _cut_inputs_in_place(graph)
    _fuse_by_saving(graph, chip)
    if chip.widens_bfloat16:
        _widen(graph)
    program.ops = _constants_together(graph.rest())


class _Uses:
    """Who makes and who reads each buffer of a program, while it changes."""

    def __init__(self, program: Program) -> None:
        self.ops = program.ops
        self.kept = program.kept
        self.order = {op: i for i, op in enumerate(program.ops)}
        self.maker = {b: op for op in program.ops for b in op.writes}
        self.readers: dict[Buffer, dict[Op, None]] = defaultdict(dict)
        self.gone: set[Op] = set()
        for op in program.ops:
            for buffer in op.reads:
                self.readers[buffer][op] = None

    def rest(self) -> Iterator[Op]:
        return (op for op in self.ops if op not in self.gone)

    def read_instead(self, reader: Op, gone: Buffer, instead: Iterable[Buffer]) -> None:
        reader.read_instead(gone, instead)
        self.readers[gone].pop(reader, None)
        for buffer in reader.reads:
            self.readers[buffer][reader] = None

    def remove(self, op: Op) -> None:
        self.gone.add(op)
        for buffer in op.reads:
            self.readers[buffer].pop(op, None)

    def is_constant(self, buffer: Buffer) -> bool:
        maker = self.maker.get(buffer)
        return maker is not None and maker.kind is Kind.FUSED and not maker.reads


def _add_into_target(uses: _Uses) -> None:
    """Scatter into what the result is added to, instead of into zeros.

    XLA makes one scatter of `add(x, scatter(zeros, ...))`: a token embedding's gradient
    goes into that of the output head with the same table. Where `x` is elementwise
    work, as in a loss, zeros are made, but not before they are needed.
    """
    for add in uses.ops:
        if add.primitive not in ("add", "add_any") or len(add.reads) != 2:
            continue
        for scattered, other in (tuple(add.reads), tuple(reversed(add.reads))):
            scatter = uses.maker.get(scattered)
            if scatter is None or scatter.kind is not Kind.UPDATE:
                continue
            target = scatter.target
            alone = len(uses.readers[scattered]) == 1 and scattered not in uses.kept
            begins = target is not None and uses.is_constant(target)
            if not (alone and begins) or scatter.primitive == "dynamic_update_slice":
                continue
            source = uses.maker.get(other)
            if source is not None and source.kind is Kind.FUSED:
                scatter.target = None
            else:
                assert target is not None
                updates = [b for b in scatter.reads if b is not target]
                add.kind, add.target = Kind.UPDATE, other
                uses.remove(scatter)
                uses.read_instead(add, scattered, updates)
                if not uses.readers[target] and target not in uses.kept:
                    uses.remove(uses.maker[target])
            break


def _cut_inputs_in_place(uses: _Uses) -> None:
    """Let whoever can cut its part of the program's inputs do so itself.

    A layer's slice of a stack of parameters, say. Behind a barrier that the slice goes
    through it cannot: there the slice is what is read.
    """
    for op in uses.ops:
        cuts = op.kind is Kind.FUSED and not op.work and op.reads
        if not cuts or not all(b.external for b in op.reads):
            continue
        (result,) = op.writes
        readers = list(uses.readers[result])
        barriers = [uses.order[r] for r in readers if r.kind is Kind.BARRIER]
        until = min(barriers, default=len(uses.ops))
        for reader in readers:
            if _takes_in(reader, op) and uses.order[reader] < until:
                uses.read_instead(reader, result, op.reads)
        if not uses.readers[result] and result not in uses.kept:
            uses.remove(op)


def _fuse_by_saving(uses: _Uses, chip: Chip) -> None:
    """Fuse operations into all that read them, the greatest saving first."""
    heap = [(-_saving(uses, op, chip), i) for op, i in uses.order.items()]
    heapq.heapify(heap)
    while heap:
        priority, number = heapq.heappop(heap)
        op = uses.ops[number]
        if op in uses.gone or not _can_fuse(uses, op):
            continue
        saving = _saving(uses, op, chip)
        if saving < 0:
            continue
        if saving < -priority:  # its neighbours have changed since
            heapq.heappush(heap, (-saving, number))
            continue
        for changed in _fuse_into_readers(uses, op):
            entry = (-_saving(uses, changed, chip), uses.order[changed])
            heapq.heappush(heap, entry)


def _fuse_into_readers(uses: _Uses, op: Op) -> set[Op]:
    """Fuse an operation; return those whose saving this changes."""
    (result,) = op.writes
    changed = {uses.maker[b] for b in op.reads if b in uses.maker}
    for reader in list(uses.readers[result]):
        uses.read_instead(reader, result, op.reads)
        reader.work += op.work
        changed.add(reader)
        changed.update(uses.maker[b] for b in reader.reads if b in uses.maker)
    uses.remove(op)
    return changed - uses.gone


def _can_fuse(uses: _Uses, op: Op) -> bool:
    if op.kind is not Kind.FUSED or len(op.writes) != 1:
        return False
    (result,) = op.writes
    readers = uses.readers[result]
    stored = result in uses.kept or result.host or not readers
    return not stored and all(_takes_in(reader, op) for reader in readers)


def _takes_in(reader: Op, op: Op) -> bool:
    """Return whether a kernel can work out an operation's result itself.

    Products read memory: XLA's kernels for them take no cast of a weight in. What is
    written in place has to lie in memory before.
    """
    if reader.kind not in _TAKES_IN or reader.target is op.writes[0]:
        return False
    return len(reader.reads) + len(op.reads) <= _MOST_READS


def _saving(uses: _Uses, op: Op, chip: Chip) -> float:
    """Return what fusing an operation saves, as bytes of traffic."""
    if len(op.writes) != 1 or op.kind is not Kind.FUSED:
        return -1.0
    (result,) = op.writes
    readers = uses.readers[result]
    rate = chip.operations_per_byte
    apart = sum(b.bytes for b in op.reads) + result.bytes * (1 + len(readers))
    saving = apart + op.work * result.elements / rate
    for reader in readers:
        saving -= sum(b.bytes for b in op.reads if b not in reader.reads)
        saving -= op.work * max(result.elements, _elements(reader)) / rate
    return saving


def _elements(op: Op) -> int:
    """Return how many elements a kernel goes over."""
    made = max((b.elements for b in op.writes), default=0)
    if op.kind is Kind.REDUCE and op.eqn is not None:
        return max(made, *(getattr(v.aval, "size", 1) for v in op.eqn.invars))
    return made


def _widen(uses: _Uses) -> None:
    """Store what passes between elementwise kernels in float32.

    For chips without bfloat16 arithmetic (`chip.widens_bfloat16`).
    """
    between = (Kind.FUSED, Kind.REDUCE)
    for op in uses.rest():
        if op.kind is not Kind.FUSED or not op.work:
            continue
        for buffer in op.writes:
            readers = uses.readers[buffer]
            inside = bool(readers) and all(r.kind in between for r in readers)
            if buffer.dtype == "bfloat16" and inside and buffer not in uses.kept:
                buffer.bytes *= 2


def _constants_together(ops: Iterable[Op]) -> list[Op]:
    """Let one kernel make all constants of one size.

    XLA joins the fills of equal shape, such as the zeros that loops begin with: they
    are all there as soon as the first is needed.
    """
    found: list[Op] = []
    kernels: dict[tuple[int, int], Op] = {}
    for op in ops:
        if op.reads or op.kind is not Kind.FUSED or not op.writes:
            found.append(op)
            continue
        size = op.writes[0].bytes, op.writes[0].elements
        if size in kernels:
            kernels[size].writes = [*kernels[size].writes, *op.writes]
        else:
            kernels[size] = op
            found.append(op)
    return found
