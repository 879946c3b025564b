"""The backward pass of the explicit form: one reverse loop per run of equal parts.

What was not kept runs again here, and a segment's second run keeps what its children
say, level by level. `start` and `alone` are those of `layers_forward.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxckpt import _jax
from jaxckpt.layers_body import Flat
from jaxckpt.layers_forward import Arrays, Forward, Kept, Tapes, numbers
from jaxckpt.layers_plain import by_part, flattened, joined
from jaxckpt.layers_runs import Run, find_runs, straight
from jaxckpt.policy_algebra import Nothing
from jaxckpt.schedule_tree import Keep, Node, Segment


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Flow:
    """The cotangents that go back from layer to layer.

    Attributes:
        carry: Of the arrays carried.
        consts: Of what all layers share, the sum over the layers so far.
    """

    carry: Flat
    consts: Flat


class Backward:
    """Runs parts of a stack backward.

    Args:
        tapes: The stack's.
        given: What all layers share.
    """

    def __init__(self, tapes: Tapes, given: Arrays) -> None:
        self.tapes = tapes
        self.given = given
        self.forward = Forward(tapes, given)

    def runs(
        self,
        runs: Sequence[Run],
        start: Any,
        kept: Sequence[Kept],
        flow: Flow,
        d_outputs: Sequence[Any],
        *,
        alone: bool,
    ) -> tuple[Flow, Flat]:
        """Return the flow before the runs, and gradients `[layers, ...]`.

        Args:
            runs: What was run forward.
            start: Its first layer.
            kept: What was kept of each run.
            flow: The flow behind the runs.
            d_outputs: Cotangents of the outputs `[layers, ...]`, None for zeros.
            alone: Whether the runs stand outside of loops.
        """
        end = sum(run.layers for run in runs)
        gradients: list[Flat] = []
        for run, keep in zip(reversed(runs), reversed(kept), strict=True):
            first = end - run.layers
            part = [None if x is None else x[first:end] for x in d_outputs]
            flow, d_layers = self._run(
                run, start + first, keep, flow, part, alone=alone
            )
            gradients.insert(0, d_layers)
            end = first
        return flow, joined(gradients)

    def _run(
        self,
        run: Run,
        start: Any,
        kept: Kept,
        flow: Flow,
        d_outputs: Flat,
        *,
        alone: bool,
    ) -> tuple[Flow, Flat]:
        if run.times == 1:
            return self._part(run.part, start, kept, flow, d_outputs, alone=alone)

        def body(flow: Flow, xs: Any) -> tuple[Flow, Flat]:
            index, kept, d_outputs = xs
            first = start + index * run.part_layers
            return self._part(run.part, first, kept, flow, d_outputs, alone=False)

        d_outputs = jax.tree.map(lambda x: by_part([x], run.times)[0], d_outputs)
        xs = (numbers(run.times), kept, d_outputs)
        stacks = self._late_stacks(run.layers, flow)
        if stacks is None:
            flow, d_layers = lax.scan(body, flow, xs, reverse=True)
            return flow, flattened(d_layers)

        def write(state: tuple[Flow, Flat], xs: Any) -> tuple[tuple[Flow, Flat], None]:
            flow, stacks = state
            flow, d_layers = body(flow, xs)
            first = xs[0] * run.part_layers
            return (flow, _written(stacks, d_layers, first)), None

        return lax.scan(write, (flow, stacks), xs, reverse=True)[0]

    def _late_stacks(self, layers: int, flow: Flow) -> Flat | None:
        """Return stacks `[layers, ...]` for gradients, made no earlier than the flow.

        The stacks that `lax.scan` makes depend on nothing, so that the compiler makes
        them when the program begins and holds them all along: 3.7 of 22.06 GiB where
        Llama-3-1b's loss is at its peak (jax 0.10.2). These are filled with a number
        of the flow; all of them is written over.
        """
        wanted = zip(self.given.stacked, self.tapes.wrt.layer, strict=True)
        stacked = [x for x, w in wanted if w]
        known = [*flow.carry, *flow.consts, *stacked]
        if not flow.carry or any(_jax.typed_by_mesh(jax.typeof(x)) for x in known):
            return None
        number = flow.carry[0].ravel()[0].real
        return [
            jnp.broadcast_to(number.astype(x.dtype), (layers, *x.shape[1:]))
            for x in stacked
        ]

    def _part(
        self,
        part: Node | tuple[Run, ...],
        start: Any,
        kept: Kept,
        flow: Flow,
        d_outputs: Flat,
        *,
        alone: bool,
    ) -> tuple[Flow, Flat]:
        if isinstance(part, tuple):
            return self.runs(part, start, kept, flow, d_outputs, alone=alone)
        if alone:
            start, kept, flow = _in_turn(part, start, kept, flow)
        if isinstance(part, Segment) and isinstance(part.policy, Nothing):
            runs = straight(find_runs(part.children))
            _, _, inner = self.forward.runs(runs, start, kept, alone=True, again=True)
            return self.runs(runs, start, inner, flow, d_outputs, alone=True)
        return self._tape(part, start, kept, flow, d_outputs, alone=alone)

    def _tape(
        self,
        part: Node,
        start: Any,
        kept: Kept,
        flow: Flow,
        d_outputs: Flat,
        *,
        alone: bool,
    ) -> tuple[Flow, Flat]:
        tape, wrt = self.tapes.of(part, alone), self.tapes.wrt
        layer = self.given.slices(start, tape.layers)
        if tape.layers is None:
            d_outputs = [None if x is None else x[0] for x in d_outputs]
        cotangents = [*spread(flow.carry, wrt.carry), *d_outputs]
        gradients = tape.backward(self.given.consts, layer, kept, cotangents)
        if alone:
            # Else the compiler may go on to the layers before, and leave parameters'
            # gradients for the end, with the residuals that they are made of.
            gradients = lax.optimization_barrier(gradients)
        first, second = sum(wrt.consts), sum(wrt.consts) + sum(wrt.carry)
        d_consts = list(map(_jax.add_any, flow.consts, gradients[:first]))
        d_layers = gradients[second:]
        if tape.layers is None:
            d_layers = [x[None] for x in d_layers]
        return Flow(gradients[first:second], d_consts), d_layers


def _written(stacks: Flat, parts: Flat, first: Any) -> Flat:
    """Write parts `[some layers, ...]` into stacks, from layer `first` on."""
    return [
        lax.dynamic_update_slice_in_dim(stack, part, first, 0)
        for stack, part in zip(stacks, parts, strict=True)
    ]


def _in_turn(part: Node, start: Any, kept: Kept, flow: Flow) -> Any:
    """Return the inputs of a part's backward pass, bound to its turn by a barrier.

    Without it the compiler would take the first run for the second, or begin the second
    long before its turn. Of a kept layer only the parameters are fetched again.
    """
    start = jnp.asarray(start, jnp.int32)
    if isinstance(part, Keep):
        start, carry = lax.optimization_barrier((start, flow.carry))
    else:
        start, kept, carry = lax.optimization_barrier((start, kept, flow.carry))
    return start, kept, Flow(carry, flow.consts)


def spread(values: Sequence[Any], wanted: Sequence[bool]) -> Flat:
    """Put the values where `wanted` is true, None elsewhere.

    Example:
        >>> spread([1, 2], [True, False, True])
        [1, None, 2]
    """
    rest = iter(values)
    return [next(rest) if w else None for w in wanted]
