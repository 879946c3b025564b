"""The most bytes that a program holds at once, when, and who holds them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxckpt.memory.order import orders
from jaxckpt.memory.program import Buffer, Kind, Op, Program


@dataclass(frozen=True)
class Moment:
    """What a program holds while one kernel runs.

    Attributes:
        bytes: On the device, besides the program's inputs.
        at: The kernel that runs.
        live: What is held, with the bytes that count.
        inner: What the program holds that the kernel runs (a loop's body), if any.
    """

    bytes: int
    at: Op | None
    live: Mapping[Buffer, int]
    inner: Moment | None = None

    def holders(self) -> list[tuple[str, int]]:
        """Return (label, bytes) of all that is held, the largest first."""
        found = [(b.label, n) for b, n in self.live.items() if n and not b.host]
        if self.inner is not None:
            found += self.inner.holders()
        return sorted(found, key=lambda holder: -holder[1])


@dataclass(frozen=True)
class Walk:
    """A program run in the order that the compiler takes.

    Attributes:
        worst: The moment of the peak.
        host_bytes: The most bytes in host memory.
        loops: The moment of each loop, in order.
    """

    worst: Moment
    host_bytes: int
    loops: tuple[Moment, ...]


_NOTHING = Moment(0, None, {})


def find_peak(program: Program, aliased: Collection[Buffer] = ()) -> Walk:
    """Walk a fused program in each order and return the walk of the lowest peak.

    Args:
        program: What runs, after `fuse`.
        aliased: Results that are written into inputs.
    """
    inner = {op: _worst_inside(op) for op in program.ops if op.inner}
    sizes = {op: moment.bytes for op, moment in inner.items()}
    walks = [
        _walk(program, order, frozenset(aliased), inner)
        for order in orders(program, sizes)
    ]
    return min(walks, key=lambda walk: walk.worst.bytes)


def _worst_inside(op: Op) -> Moment:
    moments = (find_peak(program).worst for program in op.inner)
    return max(moments, key=lambda moment: moment.bytes)


class _Held:
    """The buffers that are live, and their bytes."""

    def __init__(self) -> None:
        self.live: dict[Buffer, int] = {}
        self.device = self.host = 0

    def put(self, buffer: Buffer, size: int) -> None:
        change = size - self.live.get(buffer, 0)
        self.live[buffer] = size
        if buffer.host:
            self.host += change
        else:
            self.device += change

    def drop(self, buffer: Buffer) -> None:
        self.put(buffer, 0)
        del self.live[buffer]


def _walk(
    program: Program,
    order: Sequence[Op],
    aliased: Collection[Buffer],
    inner: Mapping[Op, Moment],
) -> Walk:
    worst = most_host = at = 0
    loops: list[Moment] = []
    for number, (op, held) in enumerate(_steps(program, order, aliased)):
        inside = inner.get(op, _NOTHING)
        total = held.device + inside.bytes
        most_host = max(most_host, held.host)
        if total > worst:
            worst, at = total, number
        if op.kind is Kind.LOOP:
            loops.append(Moment(total, op, {}, inside))
    # What is held at the peak is copied once, when it is known where that is.
    steps = itertools.islice(_steps(program, order, aliased), at, at + 1)
    for op, held in steps:
        moment = Moment(worst, op, dict(held.live), inner.get(op))
        return Walk(moment, most_host, tuple(loops))
    return Walk(_NOTHING, 0, ())


def _steps(
    program: Program, order: Sequence[Op], aliased: Collection[Buffer]
) -> Iterator[tuple[Op, _Held]]:
    """Yield each kernel with what is held while it runs."""
    last = {buffer: i for i, op in enumerate(order) for buffer in op.reads}
    kept = program.kept
    homes = {new: old for old, new in program.returned if new is not None}
    held = _Held()

    def ends(buffer: Buffer, number: int) -> bool:
        return last.get(buffer, -1) <= number and buffer not in kept

    for number, op in enumerate(order):
        for new in op.writes:
            at_home = new in homes and last.get(homes[new], -1) <= number
            held.put(new, 0 if at_home or new in aliased else new.bytes)
        ending = [b for b in op.reads if b in held.live and ends(b, number)]
        for old in written_over(op, ending):
            held.put(old, 0)
        yield op, held
        for buffer in [*ending, *op.writes]:
            if buffer in held.live and ends(buffer, number):
                held.drop(buffer)


def written_over(op: Op, ending: Sequence[Buffer]) -> list[Buffer]:
    """Return those of the buffers read last that a kernel writes its results over.

    A loop carries its values in the memory of what goes in; elementwise kernels,
    reductions and updates write a result of the same size over what they read.
    """
    if op.kind is Kind.LOOP:
        return [old for old, _ in op.carried if old is not None and old in ending]
    if op.kind not in (Kind.FUSED, Kind.UPDATE, Kind.REDUCE):
        return []
    free, found = [b for b in ending if b.bytes], []
    for new in op.writes:
        same = next((b for b in free if b.bytes == new.bytes), None)
        if same is not None:
            free.remove(same)
            found.append(same)
    return found
