"""Stages that the user marks: a mark wins over what is found by structure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxckpt import _jax
from jaxckpt.errors import WorkloadError
from jaxckpt.graph.gradient import is_inexact
from jaxckpt.graph.stages.cut import Piece, owned, with_sources
from jaxckpt.graph.stages.keys import MARK
from jaxckpt.graph.stages.names import without_number
from jaxckpt.graph.stages.program import Program, variables
from jaxckpt.graph.stages.row import Row
from jaxckpt.graph.stages.scan import is_layer_scan


def mark_stage(x: Any, name: Any) -> Any:
    """Begin a stage of a program, by name, where `stages` would cut elsewhere.

    What follows belongs to the stage, up to the next mark. A program with marks is cut
    at its marks alone, so mark each layer. Neighbours whose names
    differ in nothing but a number at the end (`"block[0]"`, `"block[1]"`) are the
    layers of one stack. Inside a loop or a branch a mark has no effect.

    Args:
        x: What the stage takes: an array or a tree of arrays; use the result.
        name: The stage's name, a text.

    Returns:
        `x`, marked. Nothing is computed; values and gradients are the same.

    Raises:
        WorkloadError: The name is no text or empty, or `x` holds no floating value.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxckpt.graph.stages import stages
        >>> def model(weights, x):
        ...     for i, w in enumerate(weights):
        ...         x = jnp.tanh(mark_stage(x, f"layer[{i}]") @ w)
        ...     return jnp.sum(mark_stage(x, "loss"))
        >>> weights = [jnp.ones((4, 4))] * 3
        >>> chain = stages(jax.make_jaxpr(model)(weights, jnp.ones((2, 4))))
        >>> [stage.name for stage in chain.stages]
        ['layer[0]', 'layer[1]', 'layer[2]', 'loss']
    """
    if not isinstance(name, str) or not name.strip():
        raise WorkloadError(
            f"`name={name!r}` is no name of a stage. Give a text such as `block[0]`."
        )
    if not any(map(is_inexact, jax.tree.leaves(x))):
        raise WorkloadError(
            f"`mark_stage(x, {name!r})`: `x` holds no floating value. Mark what the "
            "stage takes and computes with."
        )
    return jax.tree.map(
        lambda leaf: checkpoint_name(leaf, MARK + name) if is_inexact(leaf) else leaf,
        x,
    )


def marked(eqn: Any) -> str | None:
    """Return the name of the stage that an equation begins, None for no mark."""
    name = _jax.bound_name(eqn)
    return name[len(MARK) :] if name and name.startswith(MARK) else None


def find_marks(program: Program) -> list[tuple[int, str]]:
    """Return the equation at which each marked stage begins, and its name.

    Marks of one tree stand side by side and are one.
    """
    found: list[tuple[int, str]] = []
    last = None
    for number, eqn in enumerate(program.eqns):
        name = marked(eqn)
        if name is not None and name != last:
            found.append((number, name))
        last = name
    return found


def held_back(program: Program, marks: list[tuple[int, str]]) -> set[int]:
    """Return what a mark's operand is made of without any product: the embedding."""
    queue = [
        program.maker[v]
        for number, _ in marks
        for v in variables(program.eqns[number].invars)
        if v in program.maker
    ]
    found: set[int] = set()
    while queue:
        number = queue.pop()
        if number not in found and program.sources[number]:
            found.add(number)
            queue += program.makers(number)
    return found


def marked_stacks(names: list[str]) -> list[int | None]:
    """Return which stack each stage belongs to: neighbours that a number tells apart.

    Example:
        >>> marked_stacks(["embed", "block[0]", "block[1]", "head"])
        [None, 1, 1, None]
    """
    bare = [without_number(name) for name in names]
    found: list[int | None] = []
    for i, name in enumerate(bare):
        if i and bare[i - 1] == name:
            found[-1] = i - 1 if found[-1] is None else found[-1]
            found.append(found[-1])
        else:
            found.append(None)
    return found


def cut_at_marks(program: Program) -> list[Piece] | None:
    """Return a marked program's equations as pieces; None where nothing is marked."""
    marks = find_marks(program)
    if not marks:
        return None
    row = Row(program)
    back = held_back(program, marks)
    edges = [0, *(number for number, _ in marks), len(program.eqns)]
    kept = [i for i, free in enumerate(program.sources) if not free or i in back]
    names = [name for _, name in marks]
    pieces = [Piece([])]
    for index, stack in enumerate([None, *marked_stacks(names)]):
        numbers = [i for i in kept if edges[index] <= i < edges[index + 1]]
        mark = names[index - 1] if index else None
        pieces += _with_loops(program, Piece(numbers, stack, mark=mark))
    taken = {i: n for n, piece in enumerate(pieces) for i in piece.numbers}
    for index, numbers in owned(row, taken).items():
        moved = [i for i in numbers if program.sources[i]]
        if pieces[index].stack is not None and not pieces[index].scanned:
            own = sorted([*pieces[index].numbers, *moved])
            pieces[index] = replace(pieces[index], numbers=own)
    return with_sources(program, pieces)


def _with_loops(program: Program, piece: Piece) -> Iterator[Piece]:
    """Cut a marked stage round the loops over layers in it."""
    loops = [i for i in piece.numbers if is_layer_scan(program, i)]
    if not loops:
        yield piece
        return
    part, part_name = [], f"{piece.mark or 'part'}/in"
    for number in piece.numbers:
        if number in loops:
            yield Piece(part, mark=part_name)
            yield Piece(
                [number], len(program.eqns) + number, scanned=True, mark=piece.mark
            )
            part, part_name = [], f"{piece.mark or 'part'}/out"
        else:
            part.append(number)
    yield Piece(part, mark=part_name)
