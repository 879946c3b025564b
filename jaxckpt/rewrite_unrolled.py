"""Layers that stand one after another, under a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxckpt import _jax
from jaxckpt.policy_algebra import Nothing
from jaxckpt.remat import refuse_callbacks, remat_jaxpr
from jaxckpt.rewrite_cut import Cutter, Env, Flat, Piece
from jaxckpt.schedule_tree import Keep, Node, Segment


class Unrolled:
    """A stack whose layers are pieces of a program; they need not be equal.

    A node of the schedule is a piece, under a `jax.checkpoint` unless it keeps all.
    What stands between two layers and belongs to neither is rematerialised only in a
    segment around both.

    Args:
        cutter: Cuts the program in which the layers stand.
        ranges: The equations `[start, stop)` of each layer, in order.
        name: The stack's name, for errors.
    """

    def __init__(
        self, cutter: Cutter, ranges: Sequence[tuple[int, int]], name: str
    ) -> None:
        self._cutter = cutter
        self._ranges = ranges
        self._name = name

    def run(self, nodes: Sequence[Node], env: Env, first: int = 0) -> None:
        """Run the nodes, the first of them from layer `first` on."""
        position = self._ranges[first][0]
        for node in nodes:
            for part in _one_by_one(node):
                start = self._ranges[first][0]
                stop = self._ranges[first + part.layers - 1][1]
                self._cutter.cut(position, start).run(env)
                self._run_part(part, first, self._cutter.cut(start, stop), env)
                first, position = first + part.layers, stop

    def _run_part(self, part: Node, first: int, piece: Piece, env: Env) -> None:
        """Run one rematerialised layer, a segment, or layers that keep everything."""
        if isinstance(part, Keep):
            piece.run(env)
            return
        refuse_callbacks(piece.closed, f"A layer of `{self._name}`")
        if isinstance(part, Segment):
            piece.run(env, self._segment(part, first, piece))
            return
        assert part.policy is not None, "the tree is canonical"
        label = f"layer {first} of `{self._name}`"
        piece.run(
            env, remat_jaxpr(piece.closed, part.policy, label=label, prevent_cse=True)
        )

    def _segment(self, segment: Segment, first: int, piece: Piece) -> Any:
        """Return a segment as a function of its piece's inputs."""

        def inside(*values: Any) -> Flat:
            env = dict(zip(piece.inputs, values, strict=True))
            self.run(segment.children, env, first)
            return [env[v] for v in piece.outputs]

        if isinstance(segment.policy, Nothing):
            return jax.checkpoint(inside)
        closed = jax.make_jaxpr(inside)(*(abstract(v) for v in piece.inputs))
        last = first + segment.layers - 1
        label = f"the segment of layers {first}-{last} of `{self._name}`"
        return remat_jaxpr(closed, segment.policy, label=label, prevent_cse=True)


def abstract(variable: Any) -> Any:
    """Return an abstract array of a variable's type."""
    return _jax.abstract_array(variable.aval)


def _one_by_one(node: Node) -> list[Node]:
    """Return a node's parts: of rematerialised layers each is one."""
    if isinstance(node, (Keep, Segment)):
        return [node]
    return [type(node)(node.policy, 1)] * node.layers
