"""The forms of a stack that JAX differentiates itself, forward mode included.

A run of equal parts is one `lax.scan` over their parameters, a segment one
`jax.checkpoint` around its layers; or, unrolled, everything stands one after another.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxckpt.layers_body import Flat, LayerFunction, LayerProgram
from jaxckpt.layers_runs import Run, find_runs
from jaxckpt.policy_algebra import Nothing
from jaxckpt.remat import remat_jaxpr
from jaxckpt.schedule_tree import Keep, Node, Remat, Segment, keeps_input_only


class Plain:
    """A stack under a schedule as scans and checkpoints.

    Args:
        program: One layer.
        scan: Whether equal parts are a scan; else they are unrolled.
    """

    def __init__(self, program: LayerProgram, *, scan: bool) -> None:
        self.program = program
        self.scan = scan
        self.segment = functools.cache(self._segment)

    def __call__(
        self, nodes: Sequence[Node], consts: Flat, carry: Flat, stacked: Flat
    ) -> tuple[Flat, Flat]:
        """Run the nodes over stacked parameters `[layers, ...]`, all flat."""
        runs = find_runs(nodes, patterns=self.scan)
        return self._sequence(runs, consts, carry, stacked, looped=False)

    def _sequence(
        self,
        runs: Sequence[Run],
        consts: Flat,
        carry: Flat,
        stacked: Flat,
        *,
        looped: bool,
    ) -> tuple[Flat, Flat]:
        outputs: list[Flat] = []
        parts = _cut(stacked, [run.layers for run in runs])
        for run, part in zip(runs, parts, strict=True):
            carry, output = self._run(run, consts, carry, part, looped=looped)
            outputs.append(output)
        return carry, joined(outputs)

    def _run(
        self, run: Run, consts: Flat, carry: Flat, stacked: Flat, *, looped: bool
    ) -> tuple[Flat, Flat]:
        if run.times == 1:
            return self._part(run.part, consts, carry, stacked, looped=looped)
        if not self.scan:
            single = [Run(run.part, 1)] * run.times
            return self._sequence(single, consts, carry, stacked, looped=False)

        if isinstance(run.part, (Keep, Remat)):
            single = self._layer(run.part, looped=True)
            return lax.scan(functools.partial(single, consts), carry, stacked)

        def body(carry: Flat, layers: Flat) -> tuple[Flat, Flat]:
            return self._part(run.part, consts, carry, layers, looped=True)

        carry, outputs = lax.scan(body, carry, by_part(stacked, run.times))
        return carry, flattened(outputs)

    def _part(
        self,
        part: Node | tuple[Run, ...],
        consts: Flat,
        carry: Flat,
        layers: Flat,
        *,
        looped: bool,
    ) -> tuple[Flat, Flat]:
        if isinstance(part, tuple):
            return self._sequence(part, consts, carry, layers, looped=looped)
        if isinstance(part, Segment):
            return self.segment(part, looped)(consts, carry, layers)
        layer = self._layer(part, looped=looped)
        carry, outputs = layer(consts, carry, [x[0] for x in layers])
        return carry, [x[None] for x in outputs]

    def _layer(self, part: Keep | Remat, *, looped: bool) -> LayerFunction:
        policy = part.policy if isinstance(part, Remat) else None
        # Forward and backward pass of a loop are two loops, which the compiler does not
        # merge; elsewhere it needs a barrier, or no layer would really run again.
        return self.program.under(policy, prevent_cse=not looped)

    def _segment(self, segment: Segment, looped: bool) -> LayerFunction:
        runs = find_runs(segment.children)
        if keeps_input_only(segment.children[-1]) and runs[-1].times > 1:
            # Apart, what comes last does not run again when nothing reads its output.
            last = runs[-1]
            runs = (*runs[:-1], Run(last.part, last.times - 1), Run(last.part, 1))

        def inside(consts: Flat, carry: Flat, layers: Flat) -> tuple[Flat, Flat]:
            return self._sequence(runs, consts, carry, layers, looped=False)

        if isinstance(segment.policy, Nothing):
            return jax.checkpoint(inside, prevent_cse=not looped)
        return self._segment_under(segment, inside, looped)

    def _segment_under(
        self, segment: Segment, inside: LayerFunction, looped: bool
    ) -> LayerFunction:
        """Return a segment that keeps values of its layers, by their names."""

        def rematerialised(consts: Flat, carry: Flat, layers: Flat) -> Any:
            leaves, tree = jax.tree.flatten((consts, carry, layers))

            def flat(*values: Any) -> Any:
                return inside(*tree.unflatten(values))

            closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
            run = remat_jaxpr(
                closed,
                segment.policy,
                label=f"a segment of {self.program.label}",
                prevent_cse=not looped,
            )
            return jax.tree.unflatten(jax.tree.structure(shapes), run(*leaves))

        return rematerialised


def by_part(stacked: Flat, times: int) -> Flat:
    """Return `[times, layers of one part, ...]` of `[layers, ...]`."""
    return [x.reshape(times, x.shape[0] // times, *x.shape[1:]) for x in stacked]


def flattened(outputs: Flat) -> Flat:
    """Return `[layers, ...]` of `[times, layers of one part, ...]`."""
    return [x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in outputs]


def joined(parts: Sequence[Flat]) -> Flat:
    """Join lists of arrays along their first axis."""
    if len(parts) == 1:
        return parts[0]
    return [jnp.concatenate(xs) for xs in zip(*parts, strict=True)]


def _cut(stacked: Flat, sizes: Sequence[int]) -> list[Flat]:
    """Cut arrays along their first axis; the gradient is one concatenation."""
    if len(sizes) == 1:
        return [stacked]
    pieces = [lax.split(x, sizes) for x in stacked]
    return [list(xs) for xs in zip(*pieces, strict=True)]
