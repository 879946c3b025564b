"""The orders in which XLA considers to run a program's kernels.

It tries three and takes the one with the lowest peak (`DefaultMemoryScheduler` in
OpenXLA): one that always runs what frees most, and two that walk the program from what
it returns.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from jaxckpt.memory.program import Buffer, Kind, Op, Program

Waits = Mapping[Op, Sequence[Op]]
"""What each kernel has to wait for, in the order of its operands."""


def orders(program: Program, inner_bytes: Mapping[Op, int]) -> Iterator[list[Op]]:
    """Yield the orders to choose from.

    Args:
        program: What runs.
        inner_bytes: The peak of the programs that a kernel holds.
    """
    waits, roots = _waits(program)
    yield _freeing_first(program, waits, inner_bytes)
    yield _from_results(program, roots, lambda ops: ops, waits)
    weights = _weights(program, waits)

    def heaviest_first(ops: Sequence[Op]) -> Sequence[Op]:
        return sorted(ops, key=lambda op: weights[op], reverse=True)

    yield _from_results(program, heaviest_first(roots), heaviest_first, waits)


def _waits(program: Program) -> tuple[Waits, list[Op]]:
    """Return what each kernel waits for, and what makes the results.

    What went through a barrier is there when the barrier has been passed.
    """
    maker: dict[Buffer, Op] = {}
    waits: dict[Op, Sequence[Op]] = {}
    for op in program.ops:
        waits[op] = list(dict.fromkeys(maker[b] for b in op.reads if b in maker))
        made = op.reads if op.kind is Kind.BARRIER else op.made
        maker.update(dict.fromkeys(made, op))
    returned = [b for b in program.outputs if b is not None]
    return waits, list(dict.fromkeys(maker[b] for b in returned if b in maker))


def _freeing_first(
    program: Program, waits: Waits, inner_bytes: Mapping[Op, int]
) -> list[Op]:
    """Run, of what can run, always what frees most bytes less those that it makes.

    A loop writes into memory that is there; it needs what its body needs.
    """
    ops, kept = program.ops, program.kept
    number = {op: i for i, op in enumerate(ops)}
    readers: dict[Buffer, list[Op]] = defaultdict(list)
    after: dict[Op, list[Op]] = defaultdict(list)
    for op in ops:
        for buffer in op.reads:
            readers[buffer].append(op)
        for earlier in waits[op]:
            after[earlier].append(op)
    unread = {buffer: len(found) for buffer, found in readers.items()}
    missing = {op: len(waits[op]) for op in ops}
    heap: list[tuple[int, int, int]] = []
    current: dict[Op, tuple[int, int, int]] = {}

    def offer(op: Op) -> None:
        last = (b for b in op.reads if unread[b] == 1 and not b.external)
        freed = sum(b.bytes for b in last if b not in kept)
        made = inner_bytes.get(op, 0)
        if op.kind is not Kind.LOOP:
            made += sum(b.bytes for b in op.writes)
        users = sum(len(readers[b]) for b in op.writes)
        current[op] = (made - freed, -users, number[op])
        heapq.heappush(heap, current[op])

    for op in ops:
        if not missing[op]:
            offer(op)
    done: dict[Op, None] = {}
    while heap:
        entry = heapq.heappop(heap)
        op = ops[entry[2]]
        if op in done or current[op] != entry:
            continue
        done[op] = None
        for buffer in op.reads:
            unread[buffer] -= 1
            if unread[buffer] == 1:
                for other in readers[buffer]:
                    if other not in done and not missing[other]:
                        offer(other)
        for later in after[op]:
            missing[later] -= 1
            if not missing[later]:
                offer(later)
    assert len(done) == len(ops)
    return list(done)


def _weights(program: Program, waits: Waits) -> dict[Op, tuple[int, int]]:
    """Return (further uses, bytes) of all that leads to each kernel, added up."""
    users: dict[Op, int] = defaultdict(int)
    for earlier in waits.values():
        for op in earlier:
            users[op] += 1
    most = len(program.ops), sum(b.bytes for op in program.ops for b in op.writes)
    weights: dict[Op, tuple[int, int]] = {}
    for op in program.ops:
        further = max(0, users[op] - 1)
        size = sum(b.bytes for b in op.writes)
        for earlier in waits[op]:
            further += weights[earlier][0]
            size += weights[earlier][1]
        weights[op] = min(further, most[0]), min(size, most[1])
    return weights


def _from_results(
    program: Program,
    roots: Sequence[Op],
    arranged: Callable[[Sequence[Op]], Sequence[Op]],
    waits: Waits,
) -> list[Op]:
    """Run what each result needs, one result after the other."""
    done: dict[Op, None] = {}
    for root in [*roots, *program.ops]:
        stack = [(root, False)]
        while stack:
            op, ready = stack.pop()
            if op in done:
                continue
            if ready:
                done[op] = None
                continue
            stack.append((op, True))
            earlier = reversed(arranged(waits[op]))
            stack.extend((e, False) for e in earlier if e not in done)
    return list(done)
