"""`compare`: what each of several policies, schedules and plans costs one workload."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxckpt.devices import Device
from jaxckpt.errors import CompileError, JaxckptError, PlanError, PolicyError
from jaxckpt.plan_file import PlanFile, read_plan_file
from jaxckpt.policy import parse_policy
from jaxckpt.policy_text import recipe_names
from jaxckpt.progress import Progress, silent
from jaxckpt.schedule import parse_schedule
from jaxckpt.schedule_text import split_at
from jaxckpt.workload import Workload
from jaxckpt.xla.measure import Loaded, Measurement, load_traced, measure_loaded


@dataclass(frozen=True)
class Rule:
    """A policy or a schedule as text, or both, or a plan: what rules a workload.

    Attributes:
        policy: The policy; None where there is only a schedule.
        schedule: The schedule; None where there is only a policy.
        optional: Whether it may be left out where it does not suit the model.
        plan: The plan; there is neither a policy nor a schedule beside it.

    Raises:
        PlanError: There is.
    """

    policy: str | None = None
    schedule: str | None = None
    optional: bool = False
    plan: PlanFile | None = None

    def __post_init__(self) -> None:
        if self.plan is not None and (self.policy or self.schedule):
            raise PlanError(
                f"`--plan {self.plan.path}` says by itself what each layer does. Give "
                "it without `--policy` and `--schedule`."
            )

    @property
    def label(self) -> str:
        """How messages call it."""
        if self.plan is not None:
            return f"plan {self.plan.path}"
        return f"schedule {self.schedule}" if self.schedule else f"policy {self.policy}"

    def parsed(self) -> dict[str, Any]:
        """Return the keywords `policy` and `schedule` of a workload function.

        Raises:
            PolicyError: The policy cannot be read.
            ScheduleError: The schedule cannot be read.
        """
        policy = None if self.policy is None else parse_policy(self.policy)
        schedule = None if self.schedule is None else parse_schedule(self.schedule)
        return {"policy": policy, "schedule": schedule}

    def said(self) -> dict[str, str | None]:
        """Return the keywords `policy`, `schedule` and `plan` of a measurement.

        Example:
            >>> Rule().said()
            {'policy': 'none', 'schedule': None, 'plan': None}
        """
        if self.plan is not None:
            schedule, path = self.plan.schedule, self.plan.path
            return {"policy": None, "schedule": schedule, "plan": path}
        policy = "none" if self.schedule is None else None
        return {
            "policy": self.policy or policy,
            "schedule": self.schedule,
            "plan": None,
        }


@dataclass(frozen=True)
class LeftOut:
    """A rule without a row.

    Attributes:
        rule: The rule.
        reason: Why it has none.
    """

    rule: Rule
    reason: str


@dataclass(frozen=True)
class Comparison:
    """Measurements of one workload on one device, a rule each.

    Attributes:
        workload: What was measured.
        device: What it was compiled for.
        rows: The measurements, the highest peak first.
        left_out: Rules that do not suit the model.
    """

    workload: str
    device: str
    rows: tuple[Measurement, ...]
    left_out: tuple[LeftOut, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the object that `jaxckpt compare --json` prints."""
        left_out = [
            {"policy": one.rule.policy, "reason": one.reason} for one in self.left_out
        ]
        return {
            "workload": self.workload,
            "device": self.device,
            "rows": [row.as_json() for row in self.rows],
            "left_out": left_out,
        }


def default_rules() -> tuple[Rule, ...]:
    """Return what is compared where nothing is asked for: each may be left out.

    No remat, full remat, the matmul policies, and MaxText's policies without offload.

    Example:
        >>> [rule.policy for rule in default_rules()][:5]
        ['none', 'full', 'dots', 'dots_no_batch', 'maxtext:full']
    """
    names = [name for name in recipe_names() if name.startswith("maxtext:")]
    recipes = [name for name in names if not _offloads(name)]
    policies = ["none", "full", "dots", "dots_no_batch", *recipes]
    return tuple(Rule(policy, optional=True) for policy in policies)


def chosen_rules(
    policies: Iterable[str] = (),
    schedules: Iterable[str] = (),
    plans: Iterable[str | os.PathLike[str]] = (),
) -> tuple[Rule, ...]:
    """Return the rules that lists of policies and of schedules hold, and plan files.

    Args:
        policies: Texts of policies with commas between them.
        schedules: Texts of schedules with semicolons between them.
        plans: Paths of plan files. They come beside the other rules, which are the
            default ones where there are none.

    Raises:
        PlanError: A plan file cannot be read.
        PolicyError: A policy cannot be read.
        ScheduleError: A schedule cannot be read, or a list cannot be taken apart.

    Example:
        >>> [r.label for r in chosen_rules(["full, save(a, b)"], ["every(2)"])]
        ['policy full', 'policy save(a, b)', 'schedule every(2)']
    """
    rules = [Rule(policy=p.strip()) for text in policies for p in split_at(text, ",")]
    rules += [
        Rule(schedule=s.strip()) for text in schedules for s in split_at(text, ";")
    ]
    for rule in rules:
        rule.parsed()
    planned = [Rule(plan=read_plan_file(path)) for path in plans]
    return (*(rules or default_rules()), *planned)


def compare_policies(
    load_for: Callable[[Rule], Workload],
    rules: Iterable[Rule],
    device: Device,
    *,
    label: str | None = None,
    progress: Progress = silent,
) -> Comparison:
    """Measure a workload under each rule.

    All rules are loaded and traced before the first is compiled, so that what does not
    suit the model shows at once. The compiler runs once for rules that make the same
    program, and its results are kept on disk.

    Args:
        load_for: Returns the workload under a rule; called with the device active.
        rules: What to compare; rules given twice make one row.
        device: What to compile for.
        label: How to call the workload; its own name by default.
        progress: `progress(text)` is entered while a step runs, and says so.

    Raises:
        JaxckptError: A rule that is not optional does not suit the model, or none does.
    """
    rules = tuple(dict.fromkeys(rules))
    failures: dict[Rule, JaxckptError] = {}
    loaded: dict[Rule, Loaded] = {}
    for rule in rules:
        with progress(f"tracing {rule.label}"), _noted(rule, failures, PolicyError):
            loaded[rule] = _load(load_for, rule, device, label)
    measured: list[Measurement] = []
    for i, (rule, one) in enumerate(loaded.items(), start=1):
        step = f"compiling for {device.name}, {rule.label} ({i} of {len(loaded)})"
        with progress(step), _noted(rule, failures, CompileError):
            measured.append(measure_loaded(one))
    if not measured and failures:
        raise next(iter(failures.values()))
    left_out = tuple(LeftOut(rule, str(error)) for rule, error in failures.items())
    name = label or next(iter(loaded.values())).label
    return Comparison(name, device.name, tuple(sorted(measured, key=_order)), left_out)


def _offloads(name: str) -> bool:
    policy = parse_policy(name)
    return policy is not None and policy.offloads()


def _load(
    load_for: Callable[[Rule], Workload], rule: Rule, device: Device, label: str | None
) -> Loaded:
    return load_traced(
        lambda: load_for(rule),
        device=device,
        **rule.said(),
        label=label,
    )


@contextlib.contextmanager
def _noted(
    rule: Rule, failures: dict[Rule, JaxckptError], kind: type[JaxckptError]
) -> Iterator[None]:
    """Note the error of an optional rule instead of raising it."""
    try:
        yield
    except kind as error:
        if not rule.optional:
            raise
        failures[rule] = error


def _order(row: Measurement) -> tuple[int, int]:
    return -row.peak_bytes, row.recompute_flops
