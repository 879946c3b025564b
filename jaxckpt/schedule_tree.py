"""The schedule tree: which layers are rematerialised, and in what nesting.

    Keep(n)                     n layers without remat: every residual stays
    Remat(policy, n)            n layers, each under a checkpoint of its own
    Segment(children, policy)   one checkpoint around all children: its input stays (and
                                what the policy keeps); it runs again, then its children
                                apply to that second run

Layers are numbered from 0 in the order of the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxckpt.errors import ScheduleError
from jaxckpt.policy import Policy, save_nothing
from jaxckpt.policy_algebra import Nothing


@dataclass(frozen=True)
class Keep:
    """Layers without remat: every residual stays.

    Attributes:
        layers: How many, one after another.

    Example:
        >>> str(Keep(4))
        'Keep(4)'
    """

    layers: int

    def __post_init__(self) -> None:
        check_count(self.layers, "layers", "Keep")

    def __str__(self) -> str:
        return f"Keep({self.layers})"


@dataclass(frozen=True)
class Remat:
    """Layers that are rematerialised one by one under a policy.

    Attributes:
        policy: What stays of each besides its input. None is unfilled: a policy given
            beside the schedule goes there, and without one nothing stays.
        layers: How many, one after another.

    Example:
        >>> from jaxckpt.policy import save
        >>> str(Remat(save("out_proj"), 2))
        'Remat(save(out_proj), 2)'
    """

    policy: Policy | None
    layers: int

    def __post_init__(self) -> None:
        check_policy(self.policy, "Remat")
        check_count(self.layers, "layers", "Remat")

    def __str__(self) -> str:
        inside = "" if self.policy is None else f"{policy_text(self.policy)}, "
        return f"Remat({inside}{self.layers})"


@dataclass(frozen=True)
class Segment:
    """One checkpoint around several layers.

    Attributes:
        children: What it is made of: one node or a sequence of them.
        policy: What stays of all its layers besides its input.

    Example:
        >>> str(Segment(Keep(2)))
        'Segment(Keep(2))'
    """

    children: Any  # tuple[Node, ...] once made
    policy: Policy = field(default_factory=save_nothing)

    def __post_init__(self) -> None:
        check_policy(self.policy, "Segment", required=True)
        given = self.children
        children = (given,) if isinstance(given, NODES) else tuple(given)
        check_nodes(children, "Segment")
        object.__setattr__(self, "children", children)

    @property
    def layers(self) -> int:
        """How many layers it holds."""
        return count_layers(self.children)

    def __str__(self) -> str:
        parts = nodes_text(self.children)
        if not isinstance(self.policy, Nothing):
            parts += f", policy={policy_text(self.policy)}"
        return f"Segment({parts})"


Node = Keep | Remat | Segment
NODES = (Keep, Remat, Segment)

DEEPEST = 50
"""How deep segments may stand in segments."""


def canonical(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Return the one form of a tree: unfilled leaves filled, equal neighbours merged.

    `Segment(Keep(1))` is `Remat(save_nothing(), 1)`; a leaf without a policy keeps
    nothing; neighbouring `Keep`s merge, and `Remat`s of equal policy.

    Example:
        >>> nodes_text(canonical([Segment(Keep(1)), Remat(None, 2), Keep(1), Keep(2)]))
        'Remat(full, 3), Keep(3)'
    """
    merged: list[Node] = []
    for node in map(_simplified, nodes):
        last = merged[-1] if merged else None
        if last is not None and _mergeable(last, node):
            merged[-1] = replace(last, layers=last.layers + node.layers)
        else:
            merged.append(node)
    return tuple(merged)


def _simplified(node: Node) -> Node:
    if isinstance(node, Segment):
        children = canonical(node.children)
        if children == (Keep(1),):
            return Remat(node.policy, 1)
        return Segment(children, node.policy)
    if isinstance(node, Remat) and node.policy is None:
        return Remat(save_nothing(), node.layers)
    return node


def _mergeable(one: Node, other: Node) -> bool:
    if isinstance(one, Remat) and isinstance(other, Remat):
        return one.policy == other.policy
    return isinstance(one, Keep) and isinstance(other, Keep)


def filled(nodes: Sequence[Node], policy: Policy) -> tuple[Node, ...]:
    """Return a tree with the policy in each `Remat` that has none."""
    return tuple(_filled(node, policy) for node in nodes)


def _filled(node: Node, policy: Policy) -> Node:
    if isinstance(node, Segment):
        return Segment(filled(node.children, policy), node.policy)
    if isinstance(node, Remat) and node.policy is None:
        return Remat(policy, node.layers)
    return node


def count_layers(nodes: Iterable[Node]) -> int:
    """Return how many layers the nodes hold together."""
    return sum(node.layers for node in nodes)


def count_forwards(nodes: Iterable[Node]) -> int:
    """Return how often layers run forward in one gradient, all counted.

    A kept layer runs once, a rematerialised one twice. A segment runs once, then again
    up to the last layer whose output is read, and then its children apply. A layer that
    a policy makes run again only in part counts whole.

    Example:
        >>> count_forwards([Segment(Keep(3)), Keep(1)])
        7
    """
    return sum(node.layers + _forwards_again(node) for node in nodes)


def _forwards_again(node: Node) -> int:
    if isinstance(node, Segment):
        again = node.layers - unread_layers(node.children)
        return again + sum(map(_forwards_again, node.children))
    return 0 if isinstance(node, Keep) else node.layers


def unread_layers(children: Sequence[Node]) -> int:
    """Return how many layers at the end of a segment need no second run as a whole.

    When a segment runs again, nothing reads its output: if its last child keeps only
    an input, that input is all that the run has to reach.

    Example:
        >>> unread_layers([Segment(Keep(2)), Segment(Keep(3))])
        3
        >>> unread_layers([Keep(3)])
        0
    """
    last = children[-1]
    if not keeps_input_only(last):
        return 0
    return last.layers if isinstance(last, Segment) else 1


def keeps_input_only(node: Node) -> bool:
    """Return whether nothing but its input stays of a layer or a segment."""
    return not isinstance(node, Keep) and isinstance(node.policy, Nothing | None)


def policies_in(nodes: Iterable[Node]) -> Iterator[Policy]:
    """Yield the policies of a tree, outer ones first."""
    for node in nodes:
        if not isinstance(node, Keep) and node.policy is not None:
            yield node.policy
        if isinstance(node, Segment):
            yield from policies_in(node.children)


def nodes_text(nodes: Sequence[Node]) -> str:
    """Return nodes as text, equal neighbours as `3 * node`."""
    runs: list[tuple[Node, int]] = []
    for node in nodes:
        if runs and runs[-1][0] == node:
            runs[-1] = (node, runs[-1][1] + 1)
        else:
            runs.append((node, 1))
    return ", ".join(f"{n} * {node}" if n > 1 else str(node) for node, n in runs)


def policy_text(policy: Policy | None) -> str:
    """Return a policy as it stands in the text of a schedule."""
    if policy is None:
        return "none"
    return "full" if isinstance(policy, Nothing) else str(policy)


def check_nodes(nodes: Sequence[object], where: str) -> None:
    """Raise `ScheduleError` unless there is a node, and nothing else."""
    if not nodes:
        raise ScheduleError(f"`{where}()` holds no layers. Give it `Keep(4)`, say.")
    for node in nodes:
        if not isinstance(node, NODES):
            raise ScheduleError(
                f"`{node!r}` in `{where}(...)` is not part of a schedule. Use "
                "`Keep(layers)`, `Remat(policy, layers)` or `Segment(children)`."
            )


def check_count(value: object, name: str, where: str) -> None:
    """Raise `ScheduleError` unless a value is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ScheduleError(
            f"`{where}({name}={value!r})` is not a number of {name}. Use a whole "
            "number of at least 1."
        )


def check_depth(depth: int, where: str) -> None:
    """Raise `ScheduleError` for segments in segments too deep."""
    if depth > DEEPEST:
        raise ScheduleError(
            f"{where} nests segments {depth} deep. Use at most {DEEPEST} levels."
        )


def check_policy(policy: object, where: str, *, required: bool = False) -> None:
    """Raise `ScheduleError` for what is no policy (or no policy where one must be)."""
    if isinstance(policy, Policy) or (policy is None and not required):
        return
    raise ScheduleError(
        f"`policy={policy!r}` of `{where}` is no jaxckpt policy. Build one by "
        "`jaxckpt.save(...)` and the like."
    )
