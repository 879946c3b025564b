"""A program as the compiler sees it: operations over buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Kind(Enum):
    """How the compiler treats an operation.

    FUSED becomes part of the kernels that read it, where that pays. REDUCE is a kernel
    that takes fused operations in, UPDATE one that writes into its first operand, STORE
    writes one layer's part of a loop's stack. KERNEL reads and writes memory and takes
    nothing in: products, sorts, custom calls. BARRIER only orders; LOOP and BRANCH hold
    programs.
    """

    FUSED = "fused"
    REDUCE = "reduce"
    UPDATE = "update"
    STORE = "store"
    KERNEL = "kernel"
    BARRIER = "barrier"
    LOOP = "loop"
    BRANCH = "branch"


@dataclass(eq=False)
class Buffer:
    """Memory that one value takes.

    Attributes:
        bytes: Its size on one device.
        elements: Its number of elements.
        label: How reports call it: a name, or the name stack and the operation.
        dtype: Name of its dtype.
        host: Whether it lies in host memory.
        external: Whether it belongs to whoever runs the program.
    """

    bytes: int
    elements: int
    label: str = ""
    dtype: str = ""
    host: bool = False
    external: bool = False


@dataclass(eq=False)
class Op:
    """One operation, or after fusion one kernel.

    Attributes:
        primitive: Its name.
        kind: How it is treated.
        reads: Buffers that it reads, each once, in the order of its operands.
        writes: Buffers that it makes.
        eqn: The equation that it comes from; None for what the compiler adds.
        work: Arithmetic per element, in additions; of what is fused into it as well.
        inner: Programs that it holds: a loop's body, the branches of a `cond`.
        times: How often they run.
        carried: Of a loop: (what goes in, what comes out) of each value that it
            carries; None where a number goes in.
        stacked: Of a loop: the stacks that its layers fill; they are among its reads.
        target: Of an UPDATE: the buffer that it writes into; None for one of its own.
    """

    primitive: str
    kind: Kind
    reads: list[Buffer]
    writes: list[Buffer]
    eqn: Any = None
    work: float = 0.0
    inner: tuple[Program, ...] = ()
    times: int = 1
    carried: tuple[tuple[Buffer | None, Buffer], ...] = ()
    stacked: tuple[Buffer, ...] = ()
    target: Buffer | None = None

    @property
    def made(self) -> tuple[Buffer, ...]:
        """The buffers whose readers have to wait for it."""
        return (*self.writes, *self.stacked)

    def read_instead(self, gone: Buffer, instead: Iterable[Buffer]) -> None:
        """Read other buffers in the place of one."""
        rest = (b for b in self.reads if b is not gone)
        self.reads = list(dict.fromkeys([*rest, *instead]))


@dataclass(eq=False)
class Program:
    """Operations in an order that works.

    Attributes:
        ops: What runs.
        inputs: Buffers that it is given.
        outputs: Buffers that it returns; None for numbers.
        returned: Of a loop's body: (carried in, carried out).
    """

    ops: list[Op]
    inputs: list[Buffer]
    outputs: list[Buffer | None]
    returned: tuple[tuple[Buffer, Buffer | None], ...] = ()

    @property
    def kept(self) -> set[Buffer]:
        """The buffers that it returns."""
        return {b for b in self.outputs if b is not None}

    def kernels(self, times: int = 1) -> Iterator[tuple[Op, int]]:
        """Yield what runs, inner programs opened, with how often it runs."""
        for op in self.ops:
            if op.kind not in (Kind.LOOP, Kind.BRANCH):
                yield op, times
            for inner in op.inner:
                yield from inner.kernels(times * op.times)
