"""Any schedule as a list of actions."""

from __future__ import annotations

from collections.abc import Sequence

from jaxckpt.errors import ScheduleError
from jaxckpt.executor.actions import (
    Action,
    ActionList,
    Advance,
    Drop,
    Keep,
    Load,
    Reverse,
)
from jaxckpt.executor.build import simplified
from jaxckpt.executor.checks import check_number
from jaxckpt.executor.simulate import simulate
from jaxckpt.plan import Plan
from jaxckpt.policy import Policy, save_everything
from jaxckpt.policy_algebra import Nothing
from jaxckpt.schedule import Schedule, as_schedule
from jaxckpt.schedule_tree import Keep as KeepLayers
from jaxckpt.schedule_tree import (
    Node,
    Remat,
    Segment,
    count_layers,
    policy_text,
    unread_layers,
)


def actions_from(rule: object, steps: int | None = None) -> ActionList:
    """Return the actions that do what a schedule says: the same runs, the same kept.

    Args:
        rule: A `Plan` for one stack, a schedule, or whatever stands for one (see
            `as_schedule`).
        steps: The number of stages; None for the depth of the plan's stack.

    Raises:
        ScheduleError: The depth is missing or does not suit the rule, a plan has
            several stacks, or a segment keeps values inside.

    Example:
        >>> print(actions_from("every(2)", 4))
        keep 0, advance 0-1, keep 2, advance 2-3, load 2, drop 2, keep all of 2, reverse
        3, load 2, drop 2, reverse 2, load 0, drop 0, keep all of 0, reverse 1, load 0,
        drop 0, reverse 0
    """
    if isinstance(rule, Plan):
        schedule, steps = _of_plan(rule, steps)
    else:
        schedule = as_schedule(rule)
    if steps is None:
        raise ScheduleError(
            f"`{schedule}` does not say how many stages there are. Give `steps`."
        )
    check_number(steps, "steps", least=1)
    nodes = schedule.nodes(steps)
    actions = simplified([*_forward(nodes, 0), *_backward(nodes, 0)])
    used = simulate(actions, steps=steps).peak_slots
    return ActionList(actions, steps, {"device": used})


def _of_plan(plan: Plan, steps: int | None) -> tuple[Schedule, int | None]:
    (name, schedule), *others = plan.rules
    if others:
        names = ", ".join(f"`{name}`" for name, _ in plan.rules)
        raise ScheduleError(
            f"The plan rules the stacks {names}, and a list of actions is for one "
            "chain. Give the schedule of one of them, as `plan.rules` has it, and its "
            "depth as `steps`."
        )
    depth = plan.depths[0] if plan.depths else None
    if steps is not None and depth is not None and steps != depth:
        raise ScheduleError(
            f"`steps={steps!r}`, and the plan's stack `{name}` has {depth} layers. "
            "Leave out `steps`, or give the schedule alone."
        )
    return schedule, depth if steps is None else steps


def _forward(nodes: Sequence[Node], start: int) -> list[Action]:
    """Return what runs nodes forward, and keeps what stays of each."""
    actions: list[Action] = []
    for node in nodes:
        stop = start + node.layers
        if isinstance(node, Segment):
            _check_segment(node)
            actions += [Keep(start), Advance(start, stop)]
        else:
            for stage in range(start, stop):
                actions += _forward_stage(stage, _policy_of(node))
        start = stop
    return actions


def _forward_stage(stage: int, policy: Policy) -> list[Action]:
    if isinstance(policy, Nothing):
        return [Keep(stage), Advance(stage, stage + 1)]
    return [Keep(stage, policy=policy)]


def _backward(nodes: Sequence[Node], start: int) -> list[Action]:
    """Return what runs nodes backward from what their forward run has kept."""
    actions: list[Action] = []
    stop = start + count_layers(nodes)
    for node in reversed(nodes):
        start = stop - node.layers
        if isinstance(node, Segment):
            again = _forward(node.children, start)
            if unread_layers(node.children):
                del again[-1]  # advances to what nothing reads
            actions += [Load(start), Drop(start), *again]
            actions += _backward(node.children, start)
        else:
            for stage in reversed(range(start, stop)):
                actions += [Load(stage), Drop(stage), Reverse(stage)]
        stop = start
    return actions


def _policy_of(node: KeepLayers | Remat) -> Policy:
    if isinstance(node, KeepLayers):
        return save_everything()
    assert node.policy is not None  # a canonical tree has filled it
    return node.policy


def _check_segment(segment: Segment) -> None:
    if not isinstance(segment.policy, Nothing):
        policy = policy_text(segment.policy)
        raise ScheduleError(
            f"`{segment}` keeps values inside a segment, and a list of actions keeps "
            "whole states or tapes of single stages. Give each stage the policy, by "
            f"`Remat({policy}, {segment.layers})`."
        )
