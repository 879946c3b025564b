"""Names of stages and stacks: the user's marks, else module paths, else their turn."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxckpt.graph.stages.pieces import Part

_NUMBER = re.compile(r"[_.\[(]*\d+[\])]*$")


def stack_names(parts: Sequence[Part]) -> dict[int, str]:
    """Return the name of each stack, by its number."""
    groups: dict[int, list[Part]] = {}
    for part in parts:
        if part.stack is not None:
            groups.setdefault(part.stack, []).append(part)
    paths: list[tuple[str, ...]] = []
    for number, group in groups.items():
        marks = {without_number(part.mark) for part in group if part.mark}
        others = [part for part in parts if part.stack != number]
        paths.append((marks.pop(),) if marks else _stack_path(group, others))
    return dict(zip(groups, unique(_short(paths)), strict=True))


def stage_names(parts: Sequence[Part], of_stack: dict[int, str]) -> list[str]:
    """Return a name for each stage, unique."""
    names = []
    turns: Counter[int] = Counter()
    for index, part in enumerate(parts):
        if part.stack is None:
            place = _place(index, parts)
            names.append(part.mark or place or _module(part) or "part")
        elif part.scanned:
            names.append(of_stack[part.stack])
        else:
            names.append(f"{of_stack[part.stack]}[{turns[part.stack]}]")
            turns[part.stack] += 1
    return unique(names)


def unique(names: Sequence[str]) -> list[str]:
    """Number equal names from the second on.

    Example:
        >>> unique(["head", "layers", "layers"])
        ['head', 'layers', 'layers#2']
    """
    used: Counter[str] = Counter()
    found = []
    for name in names:
        used[name] += 1
        found.append(name if used[name] == 1 else f"{name}#{used[name]}")
    return found


def without_number(name: str) -> str:
    """Return what a name says besides the number at its end.

    Example:
        >>> [without_number(name) for name in ("layers[3]", "block_3", "norm", "7")]
        ['layers', 'block', 'norm', '7']
    """
    return _NUMBER.sub("", name) or name


def without_lifting(name: str) -> str:
    """Return a module's name without what flax's transformations put before it.

    Example:
        >>> without_lifting("ScanCheckpointBlock_0"), without_lifting("Scanner")
        ('Block_0', 'Scanner')
    """
    return re.sub("^(Scan|Checkpoint|Remat|Vmap|Jit)+(?=[A-Z])", "", name)


def _place(index: int, parts: Sequence[Part]) -> str:
    """Return the name of what stands first or last, where there are layers."""
    inside = {part.place for part in parts if part.stack is not None}
    layered = [i for i, part in enumerate(parts) if part.place in inside]
    if not layered or layered[0] < index < layered[-1]:
        return ""
    if index in (layered[0], layered[-1]):
        return "embedding" if index == layered[0] else "head"
    return "before" if index < layered[0] else "after"


def _module(part: Part) -> str:
    """Return the innermost module that a stage lies in."""
    return without_lifting((_common(part.scopes) or [""])[-1])


def _stack_path(group: Sequence[Part], others: Sequence[Part]) -> tuple[str, ...]:
    """Return the module path of a stack: the last part of it is the name.

    Parts of the path that other modules share are the model that the stack stands in;
    what follows is the stack.
    """
    paths = [list(map(without_lifting, _common(part.scopes))) for part in group]
    path: list[str] = []
    for level in zip(*paths, strict=False):
        bare = set(level) if len(set(level)) == 1 else set(map(without_number, level))
        if len(bare) > 1:
            break
        path.append(bare.pop())
    scopes = {
        tuple(map(without_lifting, s.split("/")))
        for part in others
        for s in part.scopes
        if s
    }
    shared = [_agreeing(path, scope) for scope in scopes]
    beside = [
        n for n, s in zip(shared, scopes, strict=True) if n < min(len(path), len(s))
    ]
    return tuple(path[: max(beside) + 1] if beside else path) or ("layers",)


def _agreeing(one: Sequence[str], other: Sequence[str]) -> int:
    """Return how many parts two paths have in common."""
    pairs = zip(one, other, strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other))
    )


def _common(scopes: Iterable[str]) -> list[str]:
    """Return the parts of a path that most scopes begin with."""
    paths = [scope.split("/") for scope in scopes if scope]
    total = len(paths)
    found: list[str] = []
    while paths:
        level = Counter(path[len(found)] for path in paths if len(path) > len(found))
        part, times = level.most_common(1)[0] if level else ("", 0)
        if times <= 0.6 * total:
            break
        found.append(part)
        paths = [p for p in paths if p[: len(found)] == found]
    return found


def _short(paths: Sequence[Sequence[str]]) -> list[str]:
    """Return the last parts of paths, as many as tell them apart.

    Example:
        >>> _short([("encoder", "block"), ("decoder", "block"), ("decoder", "head")])
        ['encoder/block', 'decoder/block', 'head']
    """
    names = []
    for index, path in enumerate(paths):
        others = [tuple(p) for i, p in enumerate(paths) if i != index]
        ends = [tuple(path[-length:]) for length in range(1, len(path) + 1)]
        alone = (e for e in ends if all(p[-len(e) :] != e for p in others))
        names.append("/".join(next(alone, ends[0])))
    return names
