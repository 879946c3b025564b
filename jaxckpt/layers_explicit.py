"""The explicit form of a stack: one `custom_vjp` over all its layers.

The forward pass is one loop per run of equal parts and returns what is kept as a stack
for each run. The backward pass is one reverse loop per run; it runs again what was not
kept and puts the run's gradients in a stack of their own. Parameters stay one stack,
indexed by layer, in both. A segment runs again inside its backward pass by the same
rules, level by level.

There is no forward mode through a `custom_vjp` (`jax.jvp` of the stack itself); forward
mode over the gradient (`hessian`, Hessian-vector products) works.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxckpt import _jax
from jaxckpt.graph.gradient import STACK_FUNCTION, is_inexact
from jaxckpt.layers_body import Flat, LayerProgram
from jaxckpt.layers_plain import Plain, by_part, flattened, joined
from jaxckpt.layers_runs import Run, find_runs, straight
from jaxckpt.layers_tape import Tape
from jaxckpt.policy_algebra import Nothing
from jaxckpt.schedule_tree import Keep, Node, Remat, Segment, keeps_input_only

Kept = Any
"""What stays of a part for its backward pass; stacked, of a run."""


def run_explicit(
    program: LayerProgram,
    nodes: Sequence[Node],
    consts: Flat,
    carry: Flat,
    stacked: Flat,
) -> tuple[Flat, Flat]:
    """Run the nodes over stacked parameters `[layers, ...]`, all flat."""
    plain = Plain(program, scan=True)

    def primal(consts: Flat, carry: Flat, stacked: Flat) -> tuple[Flat, Flat]:
        return plain(nodes, consts, carry, stacked)

    def forward(consts: Flat, carry: Flat, stacked: Flat) -> Any:
        wrt = Wrt(_perturbed(consts), _inexact(carry), _perturbed(stacked))
        engine = Engine(program, tuple(nodes), wrt)
        given = Arrays(_values(consts), _values(stacked))
        carry, outputs, kept = engine.forward(given, _values(carry))
        return (carry, outputs), jax.tree_util.Partial(engine.backward, given, kept)

    def backward(residuals: Any, cotangents: Any) -> Any:
        return residuals(*cotangents)

    primal.__name__ = STACK_FUNCTION  # how `graph` knows it
    stack = jax.custom_vjp(primal)
    stack.defvjp(forward, backward, symbolic_zeros=True)
    return stack(consts, carry, stacked)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Arrays:
    """What all layers share: closed-over arrays, and the stacks `[layers, ...]`."""

    consts: Flat
    stacked: Flat


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


class Engine:
    """Forward and backward pass of the nodes, for one choice of what is differentiated.

    Both passes walk the same runs. In what follows `start` is the first layer of a
    part, a number or traced; `alone` says that a part is not the body of a loop, so
    that its second run needs a barrier to be one.
    """

    def __init__(
        self, program: LayerProgram, nodes: tuple[Node, ...], wrt: Wrt
    ) -> None:
        self.program = program
        self.runs = find_runs(nodes, patterns=True)
        self.wrt = wrt
        self.tape = functools.cache(self._tape)

    # The forward pass.

    def forward(self, given: Arrays, carry: Flat) -> tuple[Flat, Flat, Kept]:
        """Return carry, outputs `[layers, ...]` and what is kept of each run."""
        return self._forward_runs(self.runs, given, 0, carry, alone=True)

    def _forward_runs(
        self,
        runs: Sequence[Run],
        given: Arrays,
        start: Any,
        carry: Flat,
        *,
        alone: bool,
        again: bool = False,
    ) -> tuple[Flat, Flat, Kept]:
        outputs, kept = [], []
        for number, run in enumerate(runs):
            # When a segment runs again, nothing reads its output.
            unread = again and number == len(runs) - 1
            carry, output, keep = self._forward_run(
                run, given, start, carry, alone=alone, unread=unread
            )
            outputs.append(output)
            kept.append(keep)
            start = start + run.layers
        return carry, [] if again else joined(outputs), kept

    def _forward_run(
        self,
        run: Run,
        given: Arrays,
        start: Any,
        carry: Flat,
        *,
        alone: bool,
        unread: bool,
    ) -> tuple[Flat, Flat, Kept]:
        input_only = unread and _keeps_input_only(run.part)
        times = run.times - 1 if input_only else run.times

        def body(carry: Flat, index: Any) -> tuple[Flat, tuple[Flat, Kept]]:
            first = start + index * run.part_layers
            carry, outputs, kept = self._forward_part(
                run.part, given, first, carry, alone=False
            )
            return carry, (outputs, kept)

        if run.times == 1:
            if input_only:
                return carry, [], self._kept_input(run.part, carry)
            return self._forward_part(run.part, given, start, carry, alone=alone)
        carry, (outputs, kept) = lax.scan(body, carry, jnp.arange(times))
        if input_only:
            kept = _appended(kept, self._kept_input(run.part, carry))
        return carry, flattened(outputs), kept

    def _forward_part(
        self,
        part: Node | tuple[Run, ...],
        given: Arrays,
        start: Any,
        carry: Flat,
        *,
        alone: bool,
    ) -> tuple[Flat, Flat, Kept]:
        if isinstance(part, tuple):
            return self._forward_runs(part, given, start, carry, alone=alone)
        if isinstance(part, Segment) and isinstance(part.policy, Nothing):
            after, outputs = self._advance(part.layers, given, start, carry)
            return after, outputs, carry
        tape = self.tape(part, alone)
        layer = _slices(given.stacked, start, tape.layers)
        results, kept = tape.forward(given.consts, carry, layer)
        count = self.program.num_carry
        outputs = results[count:]
        if not isinstance(part, Segment):
            outputs = [x[None] for x in outputs]
        return results[:count], outputs, kept

    def _advance(
        self, layers: int, given: Arrays, start: Any, carry: Flat
    ) -> tuple[Flat, Flat]:
        """Run layers for their results only."""
        layer = self.program.under(None, prevent_cse=False)

        def body(carry: Flat, index: Any) -> tuple[Flat, Flat]:
            slices = _slices(given.stacked, start + index, None)
            return layer(given.consts, carry, slices)

        if layers == 1:
            carry, outputs = body(carry, 0)
            return carry, [x[None] for x in outputs]
        return lax.scan(body, carry, jnp.arange(layers))

    def _kept_input(self, part: Any, carry: Flat) -> Kept:
        """Return what `_forward_part` keeps of a part that keeps only its input."""
        if isinstance(part, Segment):
            return carry
        return self.tape(part, False).kept_of_carry(carry)

    # The backward pass.

    def backward(self, given: Arrays, kept: Kept, d_carry: Any, d_outputs: Any) -> Any:
        """Return the cotangents of consts, carry and stacks; None where not asked."""
        d_carry = _instantiated(d_carry)
        d_outputs = [None if _is_zero(x) else x for x in d_outputs]
        zeros = [jnp.zeros_like(x) for x in _chosen(given.consts, self.wrt.consts)]
        d_carry, d_consts, d_stacked = self._backward_runs(
            self.runs, given, 0, kept, d_carry, d_outputs, zeros, alone=True
        )
        return (
            _spread(d_consts, self.wrt.consts),
            _spread(d_carry, self.wrt.carry),
            _spread(d_stacked, self.wrt.layer),
        )

    def _backward_runs(
        self,
        runs: Sequence[Run],
        given: Arrays,
        start: Any,
        kept: Sequence[Kept],
        d_carry: Flat,
        d_outputs: Flat,
        d_consts: Flat,
        *,
        alone: bool,
    ) -> tuple[Flat, Flat, Flat]:
        end = sum(run.layers for run in runs)
        gradients: list[Flat] = []
        for run, keep in zip(reversed(runs), reversed(kept), strict=True):
            first = end - run.layers
            part = [None if x is None else x[first:end] for x in d_outputs]
            d_carry, d_consts, d_layers = self._backward_run(
                run, given, start + first, keep, d_carry, part, d_consts, alone=alone
            )
            gradients.insert(0, d_layers)
            end = first
        return d_carry, d_consts, joined(gradients)

    def _backward_run(
        self,
        run: Run,
        given: Arrays,
        start: Any,
        kept: Kept,
        d_carry: Flat,
        d_outputs: Flat,
        d_consts: Flat,
        *,
        alone: bool,
    ) -> tuple[Flat, Flat, Flat]:
        if run.times == 1:
            return self._backward_part(
                run.part, given, start, kept, d_carry, d_outputs, d_consts, alone=alone
            )

        def body(state: tuple[Flat, Flat], xs: Any) -> tuple[tuple[Flat, Flat], Flat]:
            (d_carry, d_consts), (index, kept, d_outputs) = state, xs
            first = start + index * run.part_layers
            d_carry, d_consts, d_layers = self._backward_part(
                run.part, given, first, kept, d_carry, d_outputs, d_consts, alone=False
            )
            return (d_carry, d_consts), d_layers

        d_outputs = jax.tree.map(lambda x: by_part([x], run.times)[0], d_outputs)
        xs = (jnp.arange(run.times), kept, d_outputs)
        (d_carry, d_consts), d_layers = lax.scan(
            body, (d_carry, d_consts), xs, reverse=True
        )
        return d_carry, d_consts, flattened(d_layers)

    def _backward_part(
        self,
        part: Node | tuple[Run, ...],
        given: Arrays,
        start: Any,
        kept: Kept,
        d_carry: Flat,
        d_outputs: Flat,
        d_consts: Flat,
        *,
        alone: bool,
    ) -> tuple[Flat, Flat, Flat]:
        if isinstance(part, tuple):
            return self._backward_runs(
                part, given, start, kept, d_carry, d_outputs, d_consts, alone=alone
            )
        if alone:
            start, kept, d_carry = _in_turn(part, start, kept, d_carry)
        if isinstance(part, Segment) and isinstance(part.policy, Nothing):
            runs = straight(find_runs(part.children))
            _, _, inner = self._forward_runs(
                runs, given, start, kept, alone=True, again=True
            )
            return self._backward_runs(
                runs, given, start, inner, d_carry, d_outputs, d_consts, alone=True
            )
        return self._backward_tape(
            self.tape(part, alone), given, start, kept, d_carry, d_outputs, d_consts
        )

    def _backward_tape(
        self,
        tape: Tape,
        given: Arrays,
        start: Any,
        kept: Kept,
        d_carry: Flat,
        d_outputs: Flat,
        d_consts: Flat,
    ) -> tuple[Flat, Flat, Flat]:
        layer = _slices(given.stacked, start, tape.layers)
        if tape.layers is None:
            d_outputs = [None if x is None else x[0] for x in d_outputs]
        cotangents = [*_spread(d_carry, self.wrt.carry), *d_outputs]
        gradients = tape.backward(given.consts, layer, kept, cotangents)
        consts, carry = sum(self.wrt.consts), sum(self.wrt.carry)
        d_consts = list(map(_jax.add_any, d_consts, gradients[:consts]))
        d_layer = gradients[consts + carry :]
        if tape.layers is None:
            d_layer = [x[None] for x in d_layer]
        return gradients[consts : consts + carry], d_consts, d_layer

    def _tape(self, part: Keep | Remat | Segment, alone: bool) -> Tape:
        """Trace one layer, or a segment whose policy keeps values."""
        if isinstance(part, Segment):
            fn = Plain(self.program, scan=True).segment(part, not alone)
            return Tape.of_segment(self.program, fn, self.wrt.flat, part.layers)
        policy = part.policy if isinstance(part, Remat) else None
        fn = self.program.under(policy, prevent_cse=alone)
        return Tape.of_layer(self.program, fn, self.wrt.flat)


def _in_turn(part: Node, start: Any, kept: Kept, d_carry: Flat) -> Any:
    """Return the inputs of a part's backward pass, bound to its turn by a barrier.

    Without it the compiler would take the first run for the second, or begin the second
    long before its turn. Of a kept layer only the parameters are fetched again.
    """
    start = jnp.asarray(start, jnp.int32)
    if isinstance(part, Keep):
        start, d_carry = lax.optimization_barrier((start, d_carry))
        return start, kept, d_carry
    return lax.optimization_barrier((start, kept, d_carry))


def _keeps_input_only(part: Any) -> bool:
    return not isinstance(part, tuple) and keeps_input_only(part)


def _appended(kept: Kept, last: Kept) -> Kept:
    """Return what is kept of a run with that of one more part behind it."""
    return jax.tree.map(lambda xs, x: jnp.concatenate([xs, x[None]]), kept, last)


def _slices(stacked: Flat, start: Any, layers: int | None) -> Flat:
    """Return one layer of the stacks, or several as a shorter stack."""
    return [_slice(x, start, layers) for x in stacked]


def _slice(x: Any, start: Any, layers: int | None) -> Any:
    starts = (jnp.asarray(start, jnp.int32), *[0] * (x.ndim - 1))
    sizes = (layers or 1, *x.shape[1:])
    part = lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)
    return part[0] if layers is None else part


def _perturbed(inputs: Sequence[Any]) -> tuple[bool, ...]:
    return tuple(bool(x.perturbed) and is_inexact(x.value) for x in inputs)


def _inexact(inputs: Sequence[Any]) -> tuple[bool, ...]:
    return tuple(is_inexact(x.value) for x in inputs)


def _values(inputs: Sequence[Any]) -> Flat:
    return [x.value for x in inputs]


def _is_zero(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.SymbolicZero)


def _instantiated(cotangents: Sequence[Any]) -> Flat:
    """Return the cotangents of the arrays that have one, zeros filled in."""
    wanted = [x for x in cotangents if is_inexact_type(x)]
    return [_jax.zeros(x.aval) if _is_zero(x) else x for x in wanted]


def is_inexact_type(x: Any) -> bool:
    """Return whether a cotangent is of an array that is differentiated."""
    return jax.dtypes.issubdtype(x.dtype, jnp.inexact)


def _chosen(values: Sequence[Any], wanted: Sequence[bool]) -> Flat:
    return [x for x, w in zip(values, wanted, strict=True) if w]


def _spread(values: Sequence[Any], wanted: Sequence[bool]) -> Flat:
    """Put the values where `wanted` is true, None elsewhere."""
    rest = iter(values)
    return [next(rest) if w else None for w in wanted]
