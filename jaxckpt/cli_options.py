"""Options that several commands share, and what they come to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from jaxckpt.loading import load_workload
from jaxckpt.plan_file import read_plan_file
from jaxckpt.report.compare import Rule
from jaxckpt.schedule import combine
from jaxckpt.schedule_tree import policies_in
from jaxckpt.workload import Workload as LoadedWorkload

Workload = Annotated[
    str,
    typer.Argument(
        metavar="FILE:WORKLOAD",
        help="A Python file and a workload function in it: models/gpt.py:tiny.",
        show_default=False,
    ),
]
DeviceName = Annotated[
    str,
    typer.Option(
        "--device", metavar="NAME", help="A chip of `jaxckpt devices`, or `attached`."
    ),
]
PolicyText = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="P",
        help="none, full, dots, dots_no_batch, a recipe such as maxtext:minimal, or an "
        "expression such as 'save(query_proj, mlp*) | offload(context)'. Without it "
        "and a schedule: none.",
        show_default=False,
    ),
]
ScheduleText = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        metavar="S",
        help="Which layers are rematerialised: every(4), remat_every(2, full), sqrt(), "
        "nested(4, 2), binomial(3), or a tree such as 'Remat(full, 12), Keep(4)'.",
        show_default=False,
    ),
]
PlanPath = Annotated[
    str | None,
    typer.Option(
        "--plan",
        metavar="FILE",
        help="A plan file, in place of --policy and --schedule.",
        show_default=False,
    ),
]
PlanPaths = Annotated[
    list[str],
    typer.Option(
        "--plan",
        metavar="FILE",
        help="A plan file beside them. May be repeated.",
        show_default=False,
    ),
]
Settings = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A keyword of the workload function, such as batch=4. May be repeated.",
        show_default=False,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else.")
]


def chosen_rule(policy: str | None, schedule: str | None, plan: str | None) -> Rule:
    """Return what `--policy`, `--schedule` and `--plan` mean together.

    Raises:
        PolicyError: The policy cannot be read.
        ScheduleError: The schedule cannot, or leaves no place for the policy.
        PlanError: The plan file cannot, or is not given alone.
    """
    rule = Rule(policy, schedule, plan=None if plan is None else read_plan_file(plan))
    combine(policy, rule.parsed()["schedule"])
    return rule


def loader(
    spec: str, settings: list[str], rule: Rule, device: str, **extra: Any
) -> Callable[[], LoadedWorkload]:
    """Return what calls the workload function: within the context of the target.

    Args:
        spec: `FILE:WORKLOAD`.
        settings: `key=value` texts.
        rule: What the workload comes under.
        device: Name of the target.
        **extra: Further keywords of the workload function.
    """

    def load() -> LoadedWorkload:
        workload = load_workload(spec, settings, **rule.parsed(), **extra)
        if rule.plan is None:
            return workload
        note = rule.plan.note(workload, device)
        if note is not None:
            print(f"note: {note}", file=sys.stderr)
        return rule.plan.ruled(workload)

    return load


def offloads(rule: Rule, layers: int | None) -> bool:
    """Return whether a policy, also one inside a schedule or plan, moves values away.

    Args:
        rule: What the workload comes under.
        layers: The workload's number of layers, if it has them.
    """
    if rule.plan is not None:
        return rule.plan.offloads()
    policy, schedule = rule.parsed().values()
    policies = [] if policy is None else [policy]
    if schedule is not None and layers is not None:
        policies += policies_in(schedule.nodes(layers))
    return any(p.offloads() for p in policies)
