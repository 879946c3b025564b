"""The cases of `frontier.py`, and what is measured: our plans and hand policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from jaxckpt.devices import Device, get_device, use
from jaxckpt.errors import BudgetError, CompileError
from jaxckpt.loading import load_workload
from jaxckpt.planner.budget import usable_bytes
from jaxckpt.planner.fitting import Fit
from jaxckpt.planner.search import Search
from jaxckpt.planner.target import Target
from jaxckpt.report.compare import Rule, compare_policies, default_rules
from jaxckpt.workload import Workload
from jaxckpt.xla.measure import Measurement

Progress = Callable[[str], AbstractContextManager[Any]]

GROUPS: Mapping[str, str] = {
    "as they are": "",
    "lse": " | save(context_lse)",
    "context, lse": " | save(context, context_lse)",
}
"""Hand policies as tools ship them, and with what attention's backward reads besides.

The log-sum-exp alone helps those that keep the context; the third group gives both to
all of them.
"""


@dataclass(frozen=True)
class Case:
    """One model at one size on one device."""

    model: str
    workload: str
    settings: str
    device: str

    @property
    def name(self) -> str:
        return f"{self.model}-{self.device.split('-')[0]}"

    def load(self, rule: Rule | None = None) -> Workload:
        """Return the workload, under a rule."""
        settings = self.settings.split()
        return load_workload(self.workload, settings, **(rule or Rule()).parsed())


_MODELS = (
    ("llama", "models/llama.py:llama3_1b", "batch=8 seq=8192"),
    ("gpt", "models/gpt.py:gpt2_xl", "batch=8"),
    ("vit", "models/vit.py:vit_l16", "batch=128 image_size=256 pooling=mean"),
    ("moe", "models/moe.py:moe_1b", "batch=16"),
)
CASES = tuple(
    Case(*model, device) for model in _MODELS for device in ("h100-80gb", "h200")
)
"""Each model without remat takes a multiple of what full remat does."""


@dataclass(frozen=True)
class Step:
    """A compiled training step.

    Attributes:
        label: The policy's text, or `ours`, or `none`.
        peak_bytes: By the compiler's count.
        recompute_flops: Matmul FLOPs that run again.
        step_seconds: By a roofline over the compiled program.
    """

    label: str
    peak_bytes: int
    recompute_flops: int
    step_seconds: float


@dataclass(frozen=True)
class Row:
    """One budget.

    Attributes:
        budget_bytes: The budget.
        ours: Our plan; None where there is none.
        first_predicted_bytes: What was predicted before the first compile.
        first_compiled_bytes: What the compiler said of that plan.
        predicted_bytes: What was predicted of our plan before its own compile, set
            right by the compiles before.
        compiles: How many steps were compiled, also where one was compiled before.
        gap: By which share a faster plan is not ruled out, by the model.
        schedule: Our plan, as text.
        problem: Why there is no plan.
    """

    budget_bytes: int
    ours: Step | None = None
    first_predicted_bytes: int | None = None
    first_compiled_bytes: int | None = None
    predicted_bytes: int | None = None
    compiles: int = 0
    gap: float | None = None
    schedule: str | None = None
    problem: str | None = None

    @property
    def first_error(self) -> float | None:
        """Relative error of the first prediction."""
        return _error(self.first_predicted_bytes, self.first_compiled_bytes)

    @property
    def last_error(self) -> float | None:
        """Relative error of the last prediction."""
        return _error(self.predicted_bytes, self.ours and self.ours.peak_bytes)


@dataclass(frozen=True)
class Result:
    """A case with its budgets.

    Attributes:
        case: The case.
        plain: The step without remat.
        forward_flops: Matmul FLOPs of one forward pass.
        hands: The hand policies of each group, those of equal steps once.
        left_out: Policies that do not suit the model.
        rows: A row for each budget, the least first.
    """

    case: Case
    plain: Step
    forward_flops: int
    hands: dict[str, tuple[Step, ...]]
    left_out: tuple[str, ...]
    rows: tuple[Row, ...]

    def best(self, row: Row, group: str | None = None) -> Step | None:
        """Return the fastest hand policy of a group, or of all, that fits a budget."""
        groups = self.hands.values() if group is None else [self.hands[group]]
        fitting = [
            h for hands in groups for h in hands if h.peak_bytes <= row.budget_bytes
        ]
        key = lambda step: (step.step_seconds, step.peak_bytes)  # noqa: E731
        return min(fitting, key=key, default=None)

    def overhead(self, step: Step) -> float:
        """Return by how many seconds a step is slower than without remat; or less."""
        return step.step_seconds - self.plain.step_seconds


class Planner:
    """Our plans for one case: compiles and predictions are made once for all budgets.

    Args:
        case: The case.
        progress: Shows what is done.
    """

    def __init__(self, case: Case, progress: Progress) -> None:
        self.progress = progress
        self.device = get_device(case.device)
        with use(self.device):
            workload = case.load()
        self.target = Target(workload, self.device)
        self.search = Search(self.target)

    def plain(self) -> Step:
        """Return the step without remat."""
        with self.progress("compiling without remat"):
            compiled = self.target.compile(self.target.no_remat())
        assert compiled.step_seconds is not None, "a catalogued device has rates"
        return Step("none", compiled.peak_bytes, 0, compiled.step_seconds)

    def least_bytes(self) -> int:
        """Return the least budget that has a plan."""
        try:
            Fit(self.target, 1, self.progress, self.search).run()
        except BudgetError as error:
            assert error.least_feasible_bytes is not None
            return error.least_feasible_bytes
        raise AssertionError("a step fits one byte")

    def row(self, budget_bytes: int) -> Row:
        """Return our plan for a budget."""
        fit = Fit(self.target, budget_bytes, self.progress, self.search)
        try:
            plan = fit.run().plan
        except (BudgetError, CompileError) as error:
            return Row(budget_bytes, compiles=len(fit.tried), problem=str(error))
        first, done = fit.tried[0], plan.verified
        assert done is not None and done.compiled.step_seconds is not None
        return Row(
            budget_bytes,
            Step(
                "ours",
                done.compiled.peak_bytes,
                done.recompute_flops,
                done.compiled.step_seconds,
            ),
            first_predicted_bytes=first.found.predicted_bytes,
            first_compiled_bytes=first.compiled.peak_bytes,
            predicted_bytes=done.predicted.peak_bytes,
            compiles=len(fit.tried),
            gap=done.gap,
            schedule="; ".join(str(schedule) for _, schedule in plan.rules),
        )


def budgets_between(least: int, most: int, count: int) -> list[int]:
    """Return budgets, evenly spaced, both ends among them.

    Example:
        >>> budgets_between(10, 19, 4)
        [10, 13, 16, 19]
    """
    if count == 1 or most <= least:
        return [least]
    return [least + (most - least) * i // (count - 1) for i in range(count)]


def hand_rules(group: str) -> list[Rule]:
    """Return the hand policies of a group; `none` is one of each."""
    policies = [rule.policy for rule in default_rules()]
    return [
        Rule(policy if policy == "none" else f"{policy}{GROUPS[group]}", optional=True)
        for policy in policies
    ]


def measure_hands(
    case: Case, device: Device, progress: Progress
) -> tuple[dict[str, tuple[Step, ...]], tuple[str, ...]]:
    """Return the hand policies of each group, and those that do not suit the model."""
    rules = {group: hand_rules(group) for group in GROUPS}
    every = [rule for own in rules.values() for rule in own]
    found = compare_policies(case.load, every, device, progress=progress)
    steps = {row.policy: _step(row) for row in found.rows}
    hands = {
        group: _distinct([steps[r.policy] for r in own if r.policy in steps])
        for group, own in rules.items()
    }
    return hands, tuple(str(one.rule.policy) for one in found.left_out)


def measure_case(case: Case, count: int, progress: Progress) -> Iterator[Result]:
    """Yield a case's result, anew after each budget."""
    planner = Planner(case, progress)
    plain = planner.plain()
    hands, left_out = measure_hands(case, planner.device, progress)
    forward = planner.target.graph.forward_flops
    least = planner.least_bytes()
    most = min(plain.peak_bytes, usable_bytes(planner.device) or plain.peak_bytes)
    rows: list[Row] = []
    for budget in budgets_between(least, most, count):
        rows.append(planner.row(budget))
        yield Result(case, plain, forward, hands, left_out, tuple(rows))


def _step(row: Measurement) -> Step:
    assert row.policy is not None and row.step_seconds is not None
    return Step(row.policy, row.peak_bytes, row.recompute_flops, row.step_seconds)


def _distinct(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return steps, those that take the same once: under the shortest label."""
    found: dict[Any, Step] = {}
    for step in steps:
        key = step.peak_bytes, step.recompute_flops, step.step_seconds
        if key not in found or len(step.label) < len(found[key].label):
            found[key] = step
    return tuple(found.values())


def _error(predicted: int | None, compiled: int | None) -> float | None:
    if predicted is None or not compiled:
        return None
    return predicted / compiled - 1
