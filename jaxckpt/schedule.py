"""Schedules: rules that say which layers of a stack are rematerialised.

A schedule is frozen data that does not know the depth: `nodes(num_layers)` makes the
tree of it. Both meanings of "checkpoint every n" are here, and they differ:

    every(n)         keeps the input of every n-th layer only; the n layers up to the
                     next kept input run again together
    remat_every(n)   wraps every n-th layer; the others keep everything
"""

from __future__ import annotations

from jaxckpt.errors import ScheduleError
from jaxckpt.policy import Policy, parse_policy, save_nothing
from jaxckpt.schedule_rules import (
    Binomial,
    Every,
    Nested,
    RematEvery,
    Sqrt,
    Tree,
    Uniform,
)
from jaxckpt.schedule_rules import Schedule as Schedule
from jaxckpt.schedule_tree import NODES
from jaxckpt.schedule_tree import Keep as Keep
from jaxckpt.schedule_tree import Node as Node
from jaxckpt.schedule_tree import Remat as Remat
from jaxckpt.schedule_tree import Segment as Segment


def none() -> Schedule:
    """Rematerialise nothing: every residual stays.

    Example:
        >>> none().nodes(8)
        (Keep(layers=8),)
    """
    return Uniform(None)


def full() -> Schedule:
    """Keep each layer's input only: `uniform(save_nothing())`.

    Example:
        >>> str(full()), full() == uniform("full")
        ('full', True)
    """
    return Uniform(save_nothing())


def uniform(policy: Policy | str | None) -> Schedule:
    """Rematerialise each layer under one policy; None for no remat.

    Example:
        >>> str(uniform("save(query_proj) | save(out_proj)"))
        'uniform(save(query_proj) | save(out_proj))'
    """
    return Uniform(_policy(policy))


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
    return Every(layers)


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
    return RematEvery(layers, _policy(policy))


def sqrt() -> Schedule:
    """Cut the stack in segments of about the square root of its depth.

    The n that makes `n + ceil(num_layers / n)` least: layer inputs kept plus layers
    held at once (Chen et al., arXiv:1604.06174).

    Example:
        >>> [node.layers for node in sqrt().nodes(16)]
        [4, 4, 4, 4]
    """
    return Sqrt()


def nested(*parts: int) -> Schedule:
    """Cut the stack in segments, each of them in segments again, and so on.

    Args:
        parts: In how many parts to cut at each level, outermost first; parts differ by
            one layer at most.

    Example:
        >>> str(nested(2, 2).nodes(8)[0])
        'Segment(2 * Segment(Keep(2)))'
    """
    return Nested(parts)


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
    return Binomial(slots)


def tree(*nodes: Node) -> Schedule:
    """Return the schedule that is exactly these nodes, for one depth.

    Example:
        >>> str(tree(Remat(save_nothing(), 12), Keep(4)))
        'Remat(full, 12), Keep(4)'
    """
    return Tree(tuple(nodes))


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
        RematEvery(layers=2, policy=Names(names=('out_proj',),
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
        return Uniform(given)
    if isinstance(given, Schedule):
        return given
    if isinstance(given, str):
        return parse_schedule(given)
    if isinstance(given, NODES):
        return Tree((given,))
    if isinstance(given, (list, tuple)):
        return Tree(tuple(given))
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
        return Uniform(rule)
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
