"""Schedules: rules that say which layers of a stack are rematerialised.

A schedule is frozen data that does not know the depth: `nodes(num_layers)` makes the
tree of it. Both meanings of "checkpoint every n" are here, and they differ:

    every(n)         keeps the input of every n-th layer only; the n layers up to the
                     next kept input run again together
    remat_every(n)   wraps every n-th layer; the others keep everything
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from jaxckpt.errors import ScheduleError
from jaxckpt.policy import Policy, parse_policy, save_nothing
from jaxckpt.schedule_tree import (
    NODES,
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
from jaxckpt.schedule_tree import Keep as Keep
from jaxckpt.schedule_tree import Node as Node
from jaxckpt.schedule_tree import Remat as Remat
from jaxckpt.schedule_tree import Segment as Segment


@dataclass(frozen=True)
class Schedule:
    """Base of all schedules; build them by functions (`every`, `nested`, ...).

    `str` gives the text form, and `parse_schedule(str(s)) == s`.

    Example:
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
class _Uniform(Schedule):
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
class _Every(Schedule):
    layers: int

    def __post_init__(self) -> None:
        check_count(self.layers, "layers", "every")

    def _nodes(self, num_layers: int) -> Iterable[Node]:
        starts = range(0, num_layers, self.layers)
        return [Segment(Keep(min(self.layers, num_layers - i))) for i in starts]

    def __str__(self) -> str:
        return f"every({self.layers})"


@dataclass(frozen=True)
class _RematEvery(Schedule):
    layers: int
    policy: Policy | None = None

    def __post_init__(self) -> None:
        check_count(self.layers, "layers", "remat_every")
        check_policy(self.policy, "remat_every")

    def _nodes(self, num_layers: int) -> Iterable[Node]:
        wrapped = Remat(self.policy, 1)
        return [Keep(1) if i % self.layers else wrapped for i in range(num_layers)]

    def filled(self, policy: Policy) -> Schedule:
        return (
            _RematEvery(self.layers, policy)
            if self.policy is None
            else super().filled(policy)
        )

    def __str__(self) -> str:
        inside = "" if self.policy is None else f", {policy_text(self.policy)}"
        return f"remat_every({self.layers}{inside})"


@dataclass(frozen=True)
class _Sqrt(Schedule):
    def _nodes(self, num_layers: int) -> Iterable[Node]:
        sizes = range(1, num_layers + 1)
        best = min(sizes, key=lambda n: (n + math.ceil(num_layers / n), n))
        return _Every(best)._nodes(num_layers)

    def __str__(self) -> str:
        return "sqrt()"


@dataclass(frozen=True)
class _Nested(Schedule):
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
class _Binomial(Schedule):
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
        first = num_layers - 1 if slots == 1 else _first_part(num_layers, slots)
        nodes.append(Segment(_revolve(first, slots)))
        num_layers, slots = num_layers - first, slots - 1
    return (*nodes, Keep(1))


@cache
def _first_part(num_layers: int, slots: int) -> int:
    """Return how many layers to advance to the next kept input: a k of least cost."""

    def cost(k: int) -> int:
        again, behind = advances(k, slots), advances(num_layers - k, slots - 1)
        return k + behind + again

    return min(range(1, num_layers), key=cost)


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
class _Tree(Schedule):
    children: tuple[Node, ...]

    def __post_init__(self) -> None:
        check_nodes(self.children, "tree")

    def _nodes(self, num_layers: int) -> Iterable[Node]:
        return self.children

    def filled(self, policy: Policy) -> Schedule:
        children = filled(self.children, policy)
        return super().filled(policy) if children == self.children else _Tree(children)

    def __str__(self) -> str:
        return nodes_text(self.children)


def none() -> Schedule:
    """Rematerialise nothing: every residual stays.

    Example:
        >>> none().nodes(8)
        (Keep(layers=8),)
    """
    return _Uniform(None)


def full() -> Schedule:
    """Keep each layer's input only: `uniform(save_nothing())`.

    Example:
        >>> str(full()), full() == uniform("full")
        ('full', True)
    """
    return _Uniform(save_nothing())


def uniform(policy: Policy | str | None) -> Schedule:
    """Rematerialise each layer under one policy; None for no remat.

    Example:
        >>> str(uniform("save(query_proj) | save(out_proj)"))
        'uniform(save(query_proj) | save(out_proj))'
    """
    return _Uniform(_policy(policy))


def every(layers: int) -> Schedule:
    """Keep the input of every n-th layer; the layers in between run again together.

    The last segment is shorter where n does not divide the depth. `every(1)` is
    `full()`.

    Args:
        layers: n, 1 (each layer) or more; the whole stack is one segment from its depth
            on.

    Example:
        >>> [node.layers for node in every(5).nodes(13)]
        [5, 5, 3]
    """
    return _Every(layers)


def remat_every(layers: int, policy: Policy | str | None = None) -> Schedule:
    """Rematerialise layer i where `i % n == 0`; the other layers keep everything.

    Args:
        layers: n, 1 (each layer) or more.
        policy: What stays of a rematerialised layer besides its input; None leaves it
            open to a policy given beside the schedule, and nothing stays without one.

    Example:
        >>> [type(node).__name__ for node in remat_every(3).nodes(7)]
        ['Remat', 'Keep', 'Remat', 'Keep', 'Remat']
    """
    return _RematEvery(layers, _policy(policy))


def sqrt() -> Schedule:
    """Cut the stack in segments of about the square root of its depth.

    The n that makes `n + ceil(num_layers / n)` least: layer inputs kept plus layers
    held at once (Chen et al., arXiv:1604.06174).

    Example:
        >>> [node.layers for node in sqrt().nodes(16)]
        [4, 4, 4, 4]
    """
    return _Sqrt()


def nested(*parts: int) -> Schedule:
    """Cut the stack in segments, each of them in segments again, and so on.

    Args:
        parts: In how many parts to cut at each level, outermost first; parts differ by
            one layer at most.

    Example:
        >>> str(nested(2, 2).nodes(8)[0])
        'Segment(2 * Segment(Keep(2)))'
    """
    return _Nested(parts)


def binomial(slots: int) -> Schedule:
    """Run the fewest layers again when at most `slots` layer inputs are held at once.

    The optimum of Griewank and Walther as nested segments: R(l, c) is a segment of
    R(k, c) and then R(l - k, c - 1); it takes `l + advances(l, c)` layer forwards.

    Args:
        slots: c, counting the one that holds the stack's input.

    Example:
        >>> binomial(3).forwards(10)
        25
    """
    return _Binomial(slots)


def tree(*nodes: Node) -> Schedule:
    """Return the schedule that is exactly these nodes, for one depth.

    Example:
        >>> str(tree(Remat(save_nothing(), 12), Keep(4)))
        'Remat(full, 12), Keep(4)'
    """
    return _Tree(tuple(nodes))


def parse_schedule(text: str) -> Schedule:
    """Return the schedule that a text describes.

    It is `none`, `full`, a constructor (`every(4)`, `uniform(save(a) | save(b))`,
    `nested(2, 2)`, ...) or a tree: nodes with commas between them, `Remat(full, 12),
    Keep(4)` or `3 * Segment(Keep(2)), Keep(1)`.

    Raises:
        ScheduleError: The text is no schedule; it says where and what is valid.
        PolicyError: A policy inside it is none.

    Example:
        >>> parse_schedule("remat_every(2, save(out_proj))")
        ... # doctest: +NORMALIZE_WHITESPACE
        _RematEvery(layers=2, policy=Names(names=('out_proj',),
        decision=<Decision.SAVE: 'save'>))
    """
    from jaxckpt.schedule_text import parse

    return parse(text)


def as_schedule(given: object) -> Schedule:
    """Return a schedule for whatever stands for one.

    Args:
        given: A schedule, its text, a policy (for all layers), a node or a sequence of
            them, or None for no remat.

    Example:
        >>> as_schedule(None) == none(), as_schedule("every(2)") == every(2)
        (True, True)
    """
    if given is None or isinstance(given, Policy):
        return _Uniform(given)
    if isinstance(given, Schedule):
        return given
    if isinstance(given, str):
        return parse_schedule(given)
    if isinstance(given, NODES):
        return _Tree((given,))
    if isinstance(given, (list, tuple)):
        return _Tree(tuple(given))
    raise ScheduleError(
        f"`schedule={given!r}` is no schedule. Use `jaxckpt.every(4)` and the like, "
        "their text form, a policy, or None for no remat."
    )


def combine(policy: Policy | str | None, schedule: object) -> Schedule:
    """Return what a policy and a schedule mean together.

    A policy alone is `uniform(policy)`; beside a schedule it fills the `Remat` leaves
    that have none.

    Args:
        policy: A policy or its text; None where none is given.
        schedule: Whatever `as_schedule` takes; None where none is given.

    Raises:
        ScheduleError: The schedule leaves no place for the policy.

    Example:
        >>> str(combine("save(out_proj)", "remat_every(2)"))
        'remat_every(2, save(out_proj))'
    """
    rule = _policy(policy)
    if schedule is None:
        return _Uniform(rule)
    if rule is not None:
        return as_schedule(schedule).filled(rule)
    if policy is not None:
        raise ScheduleError(
            f"`policy=none` and the schedule `{schedule}` contradict each other. Give "
            "one of the two."
        )
    return as_schedule(schedule)


def _policy(given: Policy | str | None) -> Policy | None:
    return parse_policy(given) if isinstance(given, str) else given
