"""A program as a chain of stages: what stands before the layers, the layers, the head.

`stages` cuts a program where little is live. A loop over stacked parameters is a run of
equal stages; layers that stand one after another are found by what repeats, and equal
ones are known by a key of their structure, so that they are solved once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import groupby
from typing import Any

from jaxckpt import _jax
from jaxckpt.errors import WorkloadError
from jaxckpt.graph.inline import Remat, flattened
from jaxckpt.graph.stages.keys import Keys
from jaxckpt.graph.stages.names import stack_names, stage_names
from jaxckpt.graph.stages.pieces import Part, cut_program
from jaxckpt.graph.trace import Graph
from jaxckpt.graph.values import Path


@dataclass(frozen=True, eq=False)
class Stage:
    """One link of the chain that a program is cut into.

    Attributes:
        name: `"embedding"`, `"layers[3]"`, `"head"`; from the module path or the user's
            mark where there is one. Unique in the chain.
        kind: Equal numbers are equal programs.
        layers: How many equal layers it holds: the length of a loop over stacked
            parameters, else 1.
        scanned: Whether it is such a loop.
        place: Path of the jaxpr in which it stands, () for the program itself (equation
            numbers and parameter names, as in `jaxckpt.graph.values`).
        start: Its first equation there.
        stop: The equation behind its last.
        body: Closed jaxpr of one layer: the loop's body, or the equations as a function
            from `inputs` to `outputs`.
        inputs: The variables there that it reads.
        outputs: The variables that it makes and something behind it reads.
        flops: Matmul FLOPs of one layer, in one run of the place.
        carry_bytes: Bytes of the values computed before it that it or something behind
            it reads; arguments, casts and parts of them are not counted. In a loop, of
            what is carried and of what stays alive past it.
        times: How often its place is run (a loop over microbatches).
    """

    name: str
    kind: int
    layers: int
    scanned: bool
    place: Path
    start: int
    stop: int
    body: Any
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    flops: int
    carry_bytes: int
    times: int = 1


_OF_PART = tuple(f.name for f in fields(Stage) if f.name not in ("name", "kind"))


@dataclass(frozen=True, eq=False)
class Stack:
    """Layers that one schedule rules, in order.

    Attributes:
        name: Its name, unique in the chain.
        stages: One stage for each layer; one in all, where they are a loop.
        num_layers: How many layers.
        scanned: Whether they are a loop.
    """

    name: str
    stages: tuple[Stage, ...]
    num_layers: int
    scanned: bool


@dataclass(frozen=True, eq=False)
class Chain:
    """A program, cut into stages.

    Attributes:
        closed: The flattened program that places refer to. It computes what the
            function computes; its operations may stand in another order.
        stages: The stages, in order; each operation belongs to one of them.
        stacks: The runs of layers among them, in order.
    """

    closed: Any
    stages: tuple[Stage, ...]
    stacks: tuple[Stack, ...]

    @cached_property
    def kinds(self) -> int:
        """How many different programs the stages are."""
        return len({stage.kind for stage in self.stages})

    def stack(self, name: str) -> Stack | None:
        """Return the stack of a name, None where there is none."""
        return next((s for s in self.stacks if s.name == name), None)

    def __str__(self) -> str:
        from jaxckpt.graph.stages.text import chain_text

        return chain_text(self)


def stages(graph_or_closed: Any, *, remat: Remat = True) -> Chain:
    """Cut a program into a chain of stages where little is live.

    Layers are known by their structure alone: loops over stacked parameters, and what
    repeats in a program whose layers stand one after another. `jaxckpt.mark_stage`
    cuts where a program says so.

    Args:
        graph_or_closed: A `Graph` (`jaxckpt.trace`), or a closed jaxpr.
        remat: Whether `jax.checkpoint` and stacks of `jaxckpt` are taken away first, or
            a function that says so of each such equation.

    Raises:
        WorkloadError: It is no traced program.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def loss(weights, x):
        ...     layer = lambda x, w: (x + jnp.tanh(x @ w), None)
        ...     return jnp.sum(jax.lax.scan(layer, x @ weights["in"], weights["w"])[0])
        >>> weights = {"in": jnp.ones((2, 4)), "w": jnp.ones((6, 4, 4))}
        >>> chain = stages(jax.make_jaxpr(loss)(weights, jnp.ones((3, 2))))
        >>> [(stage.name, stage.layers, stage.carry_bytes) for stage in chain.stages]
        [('embedding', 1, 0), ('layers', 6, 48), ('head', 1, 48)]
    """
    is_graph = isinstance(graph_or_closed, Graph)
    if not is_graph and not hasattr(graph_or_closed, "consts"):
        raise WorkloadError(
            f"`{graph_or_closed!r}` is no traced program. Give "
            "`jaxckpt.trace(fn, *args)` or `jax.make_jaxpr(fn)(*args)`."
        )
    closed = graph_or_closed.jaxpr if is_graph else graph_or_closed
    closed = _jax.without_dead_code(flattened(closed, remat=remat))
    jaxpr, parts = cut_program(_jax.open_jaxpr(closed))
    found, stacks = _records(parts)
    return Chain(_jax.with_jaxpr(closed, jaxpr), tuple(found), tuple(stacks))


def _records(parts: Sequence[Part]) -> tuple[list[Stage], list[Stack]]:
    keys = Keys(constants=True)
    kinds: dict[int, int] = {}
    of_stack = stack_names(parts)
    found = []
    for part, name in zip(parts, stage_names(parts, of_stack), strict=True):
        kind = kinds.setdefault(keys.program(part.body), len(kinds))
        given = {field: getattr(part, field) for field in _OF_PART}
        found.append(Stage(name=name, kind=kind, **given))
    stacks = []
    pairs = zip(found, parts, strict=True)
    for number, group in groupby(pairs, key=lambda pair: pair[1].stack):
        if number is not None:
            layers = tuple(stage for stage, _ in group)
            count = sum(stage.layers for stage in layers)
            scanned = layers[0].scanned
            stacks.append(Stack(of_stack[number], layers, count, scanned))
    return found, stacks
