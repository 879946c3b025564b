"""The forward pass of the explicit form: results, and what is kept of each run.

In what follows `start` is the first layer of a part, a number or traced; `alone` says
that a part is not the body of a loop, so that its second run needs a barrier to be one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxckpt.layers_body import Flat, LayerProgram
from jaxckpt.layers_plain import Plain, flattened, joined
from jaxckpt.layers_runs import Run
from jaxckpt.layers_tape import Tape
from jaxckpt.policy_algebra import Nothing
from jaxckpt.schedule_tree import Keep, Node, Remat, Segment, keeps_input_only

Kept = Any
"""What stays of a part for its backward pass; stacked, of a run."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Arrays:
    """What all layers share: closed-over arrays, and the stacks `[layers, ...]`."""

    consts: Flat
    stacked: Flat

    def slices(self, start: Any, layers: int | None) -> Flat:
        """Return one layer of the stacks, or several as a shorter stack."""
        return [_slice(x, start, layers) for x in self.stacked]


@dataclass(frozen=True)
class Wrt:
    """Which of the flat inputs of a layer are differentiated."""

    consts: tuple[bool, ...]
    carry: tuple[bool, ...]
    layer: tuple[bool, ...]

    @property
    def flat(self) -> tuple[bool, ...]:
        """All of them, in the order of the program's inputs."""
        return self.consts + self.carry + self.layer


class Tapes:
    """The tapes of a stack's parts, each traced once for both passes."""

    def __init__(self, program: LayerProgram, wrt: Wrt) -> None:
        self.program = program
        self.wrt = wrt
        self.of = functools.cache(self._of)

    def _of(self, part: Keep | Remat | Segment, alone: bool) -> Tape:
        """Trace one layer, or a segment whose policy keeps values."""
        if isinstance(part, Segment):
            fn = Plain(self.program, scan=True).segment(part, not alone)
            return Tape.of_segment(self.program, fn, self.wrt.flat, part.layers)
        policy = part.policy if isinstance(part, Remat) else None
        fn = self.program.under(policy, prevent_cse=alone)
        return Tape.of_layer(self.program, fn, self.wrt.flat)


class Forward:
    """Runs parts of a stack forward and keeps what their backward pass needs.

    Args:
        tapes: The stack's.
        given: What all layers share.
    """

    def __init__(self, tapes: Tapes, given: Arrays) -> None:
        self.tapes = tapes
        self.program = tapes.program
        self.given = given

    def runs(
        self,
        runs: Sequence[Run],
        start: Any,
        carry: Flat,
        *,
        alone: bool,
        again: bool = False,
    ) -> tuple[Flat, Flat, Kept]:
        """Return carry, outputs `[layers, ...]`, and what is kept of each run.

        Args:
            runs: What to run.
            start: Its first layer.
            carry: What that takes.
            alone: Whether the runs stand outside of loops.
            again: Whether this is a segment's second run, whose results nothing reads:
                there are no outputs then, and no carry behind the last layer.
        """
        outputs, kept = [], []
        for number, run in enumerate(runs):
            unread = again and number == len(runs) - 1
            carry, output, keep = self._run(
                run, start, carry, alone=alone, unread=unread
            )
            outputs.append(output)
            kept.append(keep)
            start = start + run.layers
        return carry, [] if again else joined(outputs), kept

    def _run(
        self, run: Run, start: Any, carry: Flat, *, alone: bool, unread: bool
    ) -> tuple[Flat, Flat, Kept]:
        input_only = unread and _keeps_input_only(run.part)
        if run.times == 1:
            if input_only:
                return carry, [], self._kept_input(run.part, carry)
            return self._part(run.part, start, carry, alone=alone)

        def body(carry: Flat, index: Any) -> tuple[Flat, tuple[Flat, Kept]]:
            first = start + index * run.part_layers
            carry, outputs, kept = self._part(run.part, first, carry, alone=False)
            return carry, (outputs, kept)

        times = run.times - 1 if input_only else run.times
        carry, (outputs, kept) = lax.scan(body, carry, numbers(times))
        if input_only:
            kept = _appended(kept, self._kept_input(run.part, carry))
        return carry, flattened(outputs), kept

    def _part(
        self,
        part: Node | tuple[Run, ...],
        start: Any,
        carry: Flat,
        *,
        alone: bool,
    ) -> tuple[Flat, Flat, Kept]:
        if isinstance(part, tuple):
            return self.runs(part, start, carry, alone=alone)
        if isinstance(part, Segment) and isinstance(part.policy, Nothing):
            after, outputs = self._advance(part.layers, start, carry)
            return after, outputs, carry
        tape = self.tapes.of(part, alone)
        layer = self.given.slices(start, tape.layers)
        results, kept = tape.forward(self.given.consts, carry, layer)
        count = self.program.num_carry
        outputs = results[count:]
        if tape.layers is None:
            outputs = [x[None] for x in outputs]
        return results[:count], outputs, kept

    def _advance(self, layers: int, start: Any, carry: Flat) -> tuple[Flat, Flat]:
        """Run layers for their results only."""
        layer = self.program.under(None, prevent_cse=False)

        def body(carry: Flat, index: Any) -> tuple[Flat, Flat]:
            slices = self.given.slices(start + index, None)
            return layer(self.given.consts, carry, slices)

        if layers == 1:
            carry, outputs = body(carry, 0)
            return carry, [x[None] for x in outputs]
        return lax.scan(body, carry, numbers(layers))

    def _kept_input(self, part: Any, carry: Flat) -> Kept:
        """Return what `_part` keeps of a part that keeps only its input."""
        if isinstance(part, Segment):
            return carry
        return self.tapes.of(part, False).kept_of_carry(carry)


def numbers(count: int) -> Any:
    """Return 0, 1, ... as int32, also where 64-bit types are on."""
    return jnp.arange(count, dtype=jnp.int32)


def _keeps_input_only(part: Any) -> bool:
    return not isinstance(part, tuple) and keeps_input_only(part)


def _appended(kept: Kept, last: Kept) -> Kept:
    """Return what is kept of a run with that of one more part behind it."""
    return jax.tree.map(lambda xs, x: jnp.concatenate([xs, x[None]]), kept, last)


def _slice(x: Any, start: Any, layers: int | None) -> Any:
    starts = (jnp.asarray(start, jnp.int32), *[jnp.int32(0)] * (x.ndim - 1))
    sizes = (layers or 1, *x.shape[1:])
    part = lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)
    return part[0] if layers is None else part
