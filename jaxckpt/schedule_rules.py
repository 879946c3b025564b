"""The records behind every schedule: each makes its tree for a given depth."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from jaxckpt.errors import ScheduleError
from jaxckpt.policy import Policy
from jaxckpt.schedule_tree import (
    Keep,
    Node,
    Remat,
    Segment,
    canonical,
    check_count,
    check_depth,
    check_nodes,
    check_policy,
    count_forwards,
    count_layers,
    filled,
    nodes_text,
    policy_text,
)


@dataclass(frozen=True)
class Schedule:
    """Base of all schedules; build them by functions (`every`, `nested`, ...).

    `str` gives the text form, and `parse_schedule(str(s)) == s`.

    Example:
        >>> from jaxckpt.schedule import every
        >>> every(4).nodes(10)[-1]
        Segment(children=(Keep(layers=2),), policy=Nothing())
        >>> print(every(4).draw(8))
        every(4) on 8 layers
          forward   *...*...   * keeps the layer's input, . nothing
        backward runs again, in order:
                        ====   layers 4-7
                    ====       layers 0-3
        2 layer inputs kept; 16 layer forwards: 8 forward, 8 again
    """

    def nodes(self, num_layers: int) -> tuple[Node, ...]:
        """Return the canonical tree for a stack of a given depth.

        Raises:
            ScheduleError: The depth is no number of layers, or not the schedule's own.
        """
        check_count(num_layers, "num_layers", "nodes")
        nodes = canonical(self._nodes(num_layers))
        if count_layers(nodes) != num_layers:
            raise ScheduleError(
                f"`{self}` holds {count_layers(nodes)} layers, and the stack "
                f"{num_layers}. Change one of the two."
            )
        return nodes

    def _nodes(self, num_layers: int) -> Iterable[Node]:
        raise NotImplementedError

    def filled(self, policy: Policy) -> Schedule:
        """Return the schedule with a policy in the `Remat` leaves that have none.

        Raises:
            ScheduleError: There is no such leaf.
        """
        raise ScheduleError(
            f"The policy `{policy_text(policy)}` has no place in `{self}`, which says "
            "by itself what stays. Give the policy alone, or with a schedule that "
            "leaves it open, such as `remat_every(2)`."
        )

    def forwards(self, num_layers: int) -> int:
        """Return how often layers run forward in one gradient (`count_forwards`)."""
        return count_forwards(self.nodes(num_layers))

    def draw(self, num_layers: int) -> str:
        """Return the picture: what stays, and what the backward pass runs again."""
        from jaxckpt.schedule_picture import draw

        return draw(str(self), self.nodes(num_layers))


@dataclass(frozen=True)
class Uniform(Schedule):
    """Each layer under one policy; None for no remat."""

    policy: Policy | None

    def __post_init__(self) -> None:
        check_policy(self.policy, "uniform")

    def _nodes(self, num_layers: int) -> Iterable[Node]:
        if self.policy is None:
            return [Keep(num_layers)]
        return [Remat(self.policy, num_layers)]

    def __str__(self) -> str:
        text = policy_text(self.policy)
        return text if text in ("none", "full") else f"uniform({text})"


@dataclass(frozen=True)
class Every(Schedule):
    """Segments of n layers that keep everything on their second run."""

    layers: int

    def __post_init__(self) -> None:
        check_count(self.layers, "layers", "every")

    def _nodes(self, num_layers: int) -> Iterable[Node]:
        starts = range(0, num_layers, self.layers)
        return [Segment(Keep(min(self.layers, num_layers - i))) for i in starts]

    def __str__(self) -> str:
        return f"every({self.layers})"


@dataclass(frozen=True)
class RematEvery(Schedule):
    """Layer i under a policy where `i % n == 0`; the others keep everything."""

    layers: int
    policy: Policy | None = None

    def __post_init__(self) -> None:
        check_count(self.layers, "layers", "remat_every")
        check_policy(self.policy, "remat_every")

    def _nodes(self, num_layers: int) -> Iterable[Node]:
        wrapped = Remat(self.policy, 1)
        return [Keep(1) if i % self.layers else wrapped for i in range(num_layers)]

    def filled(self, policy: Policy) -> Schedule:
        if self.policy is not None:
            return super().filled(policy)
        return RematEvery(self.layers, policy)

    def __str__(self) -> str:
        inside = "" if self.policy is None else f", {policy_text(self.policy)}"
        return f"remat_every({self.layers}{inside})"


@dataclass(frozen=True)
class Sqrt(Schedule):
    """Segments of about the square root of the depth."""

    def _nodes(self, num_layers: int) -> Iterable[Node]:
        sizes = range(1, num_layers + 1)
        best = min(sizes, key=lambda n: (n + math.ceil(num_layers / n), n))
        return Every(best)._nodes(num_layers)

    def __str__(self) -> str:
        return "sqrt()"


@dataclass(frozen=True)
class Nested(Schedule):
    """Segments in segments, cut in so many parts at each level."""

    parts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ScheduleError(
                "`nested()` needs a number of parts for each level, outermost first: "
                "`nested(4, 2)` cuts the stack in 4 segments of 2 each."
            )
        for part in self.parts:
            check_count(part, "parts", "nested")
        check_depth(len(self.parts), "`nested(...)`")

    def _nodes(self, num_layers: int) -> Iterable[Node]:
        return _cut(num_layers, self.parts)

    def __str__(self) -> str:
        return f"nested({', '.join(map(str, self.parts))})"


def _cut(num_layers: int, parts: Sequence[int]) -> tuple[Node, ...]:
    if not parts or num_layers == 1:
        return (Keep(num_layers),)
    count = min(parts[0], num_layers)
    size, larger = divmod(num_layers, count)
    sizes = [size + 1] * larger + [size] * (count - larger)
    return tuple(Segment(_cut(n, parts[1:])) for n in sizes)


@dataclass(frozen=True)
class Binomial(Schedule):
    """The fewest layer runs with so many layer inputs held at once."""

    slots: int

    def __post_init__(self) -> None:
        check_count(self.slots, "slots", "binomial")

    def _nodes(self, num_layers: int) -> Iterable[Node]:
        check_depth(
            _repeats(num_layers, self.slots), f"`{self}` on {num_layers} layers"
        )
        return _revolve(num_layers, self.slots)

    def __str__(self) -> str:
        return f"binomial({self.slots})"


def _revolve(num_layers: int, slots: int) -> tuple[Node, ...]:
    """Return R(l, c): a segment of R(k, c), and behind it R(l - k, c - 1)."""
    nodes: list[Node] = []
    while num_layers > 1:
        first = first_part(num_layers, slots)
        nodes.append(Segment(_revolve(first, slots)))
        num_layers, slots = num_layers - first, slots - 1
    return (*nodes, Keep(1))


@cache
def first_part(num_layers: int, slots: int) -> int:
    """Return how many layers to advance to the next kept input: a k of least cost.

    Example:
        >>> first_part(10, 3)
        4
    """
    if slots == 1:
        return num_layers - 1

    def cost(k: int) -> int:
        return k + advances(num_layers - k, slots - 1) + advances(k, slots)

    # `advances` is convex in the number of layers, and with it the cost in k.
    ahead = range(1, num_layers - 1)
    return 1 + bisect_left(ahead, True, key=lambda k: cost(k) <= cost(k + 1))


def advances(num_layers: int, slots: int) -> int:
    """Return t(l, c), the least layer forwards besides the l whose residuals are kept.

    With `r = min { r : C(c + r, c) >= l }`: `t(l, c) = r l - C(c + r, c + 1)`
    (Griewank and Walther, "Algorithm 799: Revolve", 2000). One slot holds the stack's
    own input.

    Example:
        >>> advances(10, 3), advances(100, 5)
        (15, 316)
    """
    repeats = _repeats(num_layers, slots)
    return repeats * num_layers - math.comb(slots + repeats, slots + 1)


def _repeats(num_layers: int, slots: int) -> int:
    """Return how often a layer runs again at most, and how deep segments nest."""
    repeats = 0
    while math.comb(slots + repeats, slots) < num_layers:
        repeats += 1
    return repeats


@dataclass(frozen=True)
class Tree(Schedule):
    """Exactly these nodes, for one depth."""

    children: tuple[Node, ...]

    def __post_init__(self) -> None:
        check_nodes(self.children, "tree")

    def _nodes(self, num_layers: int) -> Iterable[Node]:
        return self.children

    def filled(self, policy: Policy) -> Schedule:
        children = filled(self.children, policy)
        return super().filled(policy) if children == self.children else Tree(children)

    def __str__(self) -> str:
        return nodes_text(self.children)
