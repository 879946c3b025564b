"""How the stages that a chain is given make groups, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxckpt.errors import WorkloadError
from jaxckpt.executor.layout import Group, Layout
from jaxckpt.executor.program import StageProgram, TracedChain
from jaxckpt.executor.stage import Stage, as_stages
from jaxckpt.layers_body import Flat

PyTree = Any
Repeats = Sequence[int | None]
"""Of each entry that a chain is given: how many stages it stands for; None for one."""


@dataclass(frozen=True)
class Repeat:
    """Equal stages one after another, whose parameters are one stack.

    Attributes:
        stage: What stands for one of them.
        times: How many there are.
    """

    stage: Any
    times: int

    def __post_init__(self) -> None:
        times = self.times
        if isinstance(times, bool) or not isinstance(times, int) or times < 1:
            raise WorkloadError(
                f"`times={times!r}` is not a number of stages. Use 1 or more."
            )


def repeat(stage: Any, times: int) -> Repeat:
    """Return equal stages for `checkpoint_chain`, whose parameters are `[times, ...]`.

    Stages given one by one are stacked where they run in a loop, which takes a copy of
    their parameters and gradients; these are not.

    Args:
        stage: What stands for one of them.
        times: How many there are.

    Example:
        >>> repeat(abs, 4).times
        4
    """
    return Repeat(stage, times)


def as_links(stages: Any) -> tuple[list[int | None], list[Stage]]:
    """Return how often each entry stands (None for a single stage), and all stages."""
    is_list = isinstance(stages, Sequence) and not isinstance(stages, str)
    entries = list(stages) if is_list else as_stages(stages)
    repeats = [e.times if isinstance(e, Repeat) else None for e in entries]
    forms = as_stages([e.stage if isinstance(e, Repeat) else e for e in entries])
    links: list[Stage] = []
    for form, times in zip(forms, repeats, strict=True):
        name = form.label[form.label.index("(") :]
        for _ in range(times or 1):
            links.append(replace(form, label=f"stage {len(links)} {name}"))
    return repeats, links


def check_params(params: Any, repeats: Repeats) -> None:
    """Raise `WorkloadError` unless there are parameters for each entry."""
    if not isinstance(params, (list, tuple)) or len(params) != len(repeats):
        count = len(params) if isinstance(params, (list, tuple)) else None
        given = f"{count} trees" if count is not None else f"`{type(params).__name__}`"
        raise WorkloadError(
            f"`params` is {given}, and the chain is made of {len(repeats)} entries. "
            "Give a list with one tree of parameters for each: None where it has none, "
            "a stack for a `repeat`, `nnx.state(module, nnx.Param)` for an nnx Module."
        )
    for number, (own, times) in enumerate(zip(params, repeats, strict=True)):
        leaves = jax.tree.leaves(own) if times is not None else []
        wrong = [x for x in leaves if jnp.shape(x)[:1] != (times,)]
        if wrong:
            raise WorkloadError(
                f"Parameters of entry {number} have shapes such as "
                f"{jnp.shape(wrong[0])}. Those of `repeat(stage, {times})` are "
                f"stacked: `[{times}, ...]`."
            )


def stage_params(params: Sequence[PyTree], repeats: Repeats) -> list[PyTree]:
    """Return the abstract parameters of each stage."""
    own: list[PyTree] = []
    for tree, times in zip(params, repeats, strict=True):
        if times is None:
            own.append(tree)
        else:
            one = jax.eval_shape(lambda t: jax.tree.map(lambda x: x[0], t), tree)
            own += [one] * times
    return own


LOOP_FROM = 4
"""From how many equal stages on they run in a loop, if they are given one by one."""


def as_groups(traced: TracedChain, repeats: Repeats, scan: bool) -> tuple[Group, ...]:
    """Return the groups: what is given as a stack, and equal stages that can loop."""
    groups: list[Group] = []
    start = 0
    for program, same, times in _runs(traced.programs, repeats):
        joined = times is not None or (scan and same >= LOOP_FROM)
        for _ in range(1 if joined else same):
            stop = start + (same if joined else 1)
            looped = joined and scan
            groups.append(Group(len(groups), start, stop, joined, looped, program))
            start = stop
    return tuple(groups)


def _runs(
    programs: Sequence[StageProgram], repeats: Repeats
) -> list[tuple[StageProgram, int, int | None]]:
    """Return runs of equal single stages, and each stack: program, length, stack's."""
    runs: list[tuple[StageProgram, int, int | None]] = []
    start = 0
    for times in repeats:
        program, count = programs[start], times or 1
        if any(p is not program for p in programs[start : start + count]):
            raise WorkloadError(
                f"{program.label} changes the type of the state, so that it cannot be "
                "repeated. Each of equal stages must return what the next one takes."
            )
        if times is None and runs and runs[-1][0] is program and runs[-1][2] is None:
            runs[-1] = (program, runs[-1][1] + 1, None)
        else:
            runs.append((program, count, times))
        start += count
    return runs


def group_params(
    layout: Layout, params: Sequence[PyTree], repeats: Repeats
) -> list[Flat]:
    """Return the parameters of each group, flat."""
    rest = list(zip(params, repeats, strict=True))
    groups = []
    for group in layout.groups:
        tree, times = rest.pop(0)
        leaves = jax.tree.leaves(tree)
        if group.stacked and times is None:
            more = [rest.pop(0)[0] for _ in range(group.stages - 1)]
            others = [jax.tree.leaves(t) for t in more]
            leaves = [jnp.stack(x) for x in zip(leaves, *others, strict=True)]
        groups.append(leaves)
    return groups


def entry_aux(layout: Layout, repeats: Repeats, aux: Sequence[Flat]) -> list[PyTree]:
    """Return the auxiliary outputs of each entry; those of a stack are stacked."""
    entries: list[PyTree] = []
    for group, leaves in zip(layout.groups, aux, strict=True):
        tree = group.program.aux_tree
        if not group.stacked or repeats[len(entries)] is not None:
            entries.append(tree.unflatten(leaves))
            continue
        for position in range(group.stages):
            entries.append(tree.unflatten([x[position] for x in leaves]))
    return entries
