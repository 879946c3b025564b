"""The `Plan`: which schedule rules which stack of a program; and hand-written ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxckpt.errors import JaxckptError, PlanError, did_you_mean
from jaxckpt.graph.stages import Stack
from jaxckpt.layers import check_form
from jaxckpt.plan_verified import PlanFigures, Verified
from jaxckpt.policy import Policy, parse_policy
from jaxckpt.rewrite import apply, find_chain, try_call
from jaxckpt.rewrite_find import check_names, fingerprint_of
from jaxckpt.schedule import Schedule, as_schedule, parse_schedule
from jaxckpt.schedule_tree import policies_in

Function = TypeVar("Function", bound=Callable[..., Any])

EXISTING = ("replace", "keep")


@dataclass(frozen=True)
class Plan:
    """Which layers of a program are rematerialised, and how; made by `plan_from`.

    Attributes:
        rules: A schedule for each stack, by the stack's name.
        form: The form of scanned stacks (see `run_layers`); None for the best one.
        existing: What becomes of remat that is there around or in these stacks:
            `"replace"` takes it away, `"keep"` leaves it.
        depths: The number of layers of each stack.
        fingerprint: What tells the program from others; None to ask only for stacks of
            these names.
        verified: What `fit` found for it; None for a plan that was not fitted.

    Example:
        >>> plan = Plan((("encoder", parse_schedule("every(4)")),), depths=(8,))
        >>> print(plan)
        encoder: every(4) on 8 layers
          forward   *...*...   * keeps the layer's input, . nothing
        backward runs again, in order:
                        ====   layers 4-7
                    ====       layers 0-3
        2 layer inputs kept; 16 layer forwards: 8 forward, 8 again
    """

    rules: tuple[tuple[str, Schedule], ...]
    form: str | None = None
    existing: str = "replace"
    depths: tuple[int, ...] = ()
    fingerprint: str | None = None
    verified: Verified | None = None

    def __post_init__(self) -> None:
        check_settings(self.form, self.existing)
        check_pairs(self.rules)
        names = [name for name, _ in self.rules]
        if not names or len(set(names)) < len(names):
            raise PlanError(
                f"The plan has rules for the stacks {names}. Give one rule for each "
                "stack that it rules, and for one stack at least."
            )
        for name, schedule in self.rules:
            if not isinstance(schedule, Schedule):
                raise PlanError(
                    f"`{schedule!r}`, the rule of `{name}`, is no schedule. Use "
                    "`jaxckpt.every(4)` and the like, or `plan_from` for other rules."
                )
        if self.depths and len(self.depths) != len(names):
            raise PlanError(
                f"`depths={self.depths}` are not the depths of the stacks {names}."
            )

    @property
    def schedule(self) -> Schedule:
        """The one schedule of all its stacks.

        Raises:
            PlanError: There are several.
        """
        different = {schedule for _, schedule in self.rules}
        if len(different) > 1:
            names = ", ".join(f"{name}: {schedule}" for name, schedule in self.rules)
            raise PlanError(
                f"The plan has a schedule for each stack ({names}). Use `plan.rules`."
            )
        return self.rules[0][1]

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The policies in its schedules, where the depths of its stacks are known."""
        pairs = zip(self.rules, self.depths, strict=False)
        trees = (schedule.nodes(depth) for (_, schedule), depth in pairs)
        return tuple(policy for tree in trees for policy in policies_in(tree))

    @property
    def predicted(self) -> PlanFigures:
        """What the model said of a step, last (`PlanError` where it was not fitted)."""
        return self._fitted().predicted

    @property
    def compiled(self) -> PlanFigures:
        """What the compiler said of it (`PlanError` where it was not fitted)."""
        return self._fitted().compiled

    @property
    def forward_flops(self) -> int:
        """Matmul FLOPs of a forward pass (`PlanError` where it was not fitted)."""
        return self._fitted().forward_flops

    @property
    def recompute_flops(self) -> int:
        """Matmul FLOPs that run again (`PlanError` where it was not fitted)."""
        return self._fitted().recompute_flops

    @property
    def gap(self) -> float | None:
        """Distance from the lower bound (`PlanError` where it was not fitted)."""
        return self._fitted().gap

    def _fitted(self) -> Verified:
        if self.verified is None:
            raise PlanError(
                "The plan was not fitted, so that nothing was predicted or compiled "
                "for it. `jaxckpt.fit` makes plans that were; for this one ask "
                "`jaxckpt.predict(graph, plan, ...)`."
            )
        return self.verified

    def apply(self, fn: Function) -> Function:
        """Return a function that follows the plan (`jaxckpt.rewrite.apply`)."""
        return apply(self, fn)

    def to_json(self) -> str:
        """Return the plan as JSON that reads and compares well.

        Raises:
            PlanError: It holds what a plan file cannot, such as a number that is none.

        Example:
            >>> plan = Plan((("layers", parse_schedule("every(4)")),), depths=(8,))
            >>> Plan.from_json(plan.to_json()) == plan
            True
        """
        from jaxckpt.plan_json import to_json

        return to_json(self)

    @classmethod
    def from_json(cls, text: str, *, edited: bool = False) -> Plan:
        """Return the plan that a JSON text holds; see `jaxckpt.load_plan`."""
        from jaxckpt.plan_json import from_json

        return from_json(text, edited=edited)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, or leave the file that is there as it is.

        A run that is killed meanwhile leaves either the old file or the new one.

        Raises:
            PlanError: The file cannot be written.
        """
        from jaxckpt.plan_json import save

        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, edited: bool = False) -> Plan:
        """Return the plan in a file; see `jaxckpt.load_plan`."""
        from jaxckpt.plan_json import load_plan

        return load_plan(path, edited=edited)

    def __str__(self) -> str:
        depths = self.depths or (None,) * len(self.rules)
        lines = [
            f"{name}: {schedule.draw(depth) if depth else schedule}"
            for (name, schedule), depth in zip(self.rules, depths, strict=True)
        ]
        if self.form is not None:
            lines.append(f"form: {self.form}")
        if self.existing == "keep":
            lines.append("remat of the program's own stays")
        if self.verified is not None:
            lines.append(str(self.verified))
        return "\n".join(lines)


def rules_text(plan: Plan) -> str:
    """Return the schedules of a plan as one text.

    Example:
        >>> one, two = parse_schedule("every(4)"), parse_schedule("full")
        >>> rules_text(Plan((("encoder", one), ("decoder", two))))
        'encoder: every(4); decoder: full'
        >>> rules_text(Plan((("encoder", one), ("decoder", one))))
        'every(4)'
    """
    if len({schedule for _, schedule in plan.rules}) == 1:
        return str(plan.schedule)
    return "; ".join(f"{name}: {schedule}" for name, schedule in plan.rules)


def plan_of(
    rules: Mapping[str, Schedule],
    found: Sequence[Stack],
    form: str | None = None,
    existing: str = "replace",
) -> Plan:
    """Return the plan of these rules for the stacks of a program, in the same order."""
    return Plan(
        tuple(rules.items()),
        form,
        existing,
        tuple(stack.num_layers for stack in found),
        fingerprint_of(found),
    )


def plan_from(
    rule: Any,
    loss_fn: Callable[..., Any],
    *args: Any,
    form: str | None = None,
    existing: str = "replace",
) -> Plan:
    """Return a hand-written rule as a plan for a program.

    The program is traced and rewritten once, so that a plan which is returned works.

    Args:
        rule: For every stack of layers: a policy, a schedule, or the text of one; or
            a mapping of stack names to such rules. Stacks that it leaves out stay as
            they are.
        loss_fn: The function.
        args: Its arguments; arrays may be abstract.
        form: The form of scanned stacks (see `run_layers`); None for the best one.
        existing: What to do about remat that is there around or in these stacks:
            `"replace"` or `"keep"` it.

    Raises:
        PlanError: There is no stack (of such a name), or the rule is none.
        ScheduleError: A schedule does not suit the depth.
        PolicyError: A policy has no effect on a layer.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def loss(weights, x):
        ...     x, _ = jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, weights)
        ...     return jnp.sum(x)
        >>> weights = jax.ShapeDtypeStruct((8, 4, 4), "float32")
        >>> plan = plan_from("every(4)", loss, weights, jnp.ones((2, 4)))
        >>> str(plan.schedule), plan.depths
        ('every(4)', (8,))
    """
    label = f"`{getattr(loss_fn, '__qualname__', type(loss_fn).__name__)}`"
    check_settings(form, existing)
    chain = find_chain(loss_fn, args, existing=existing)
    stacks = {stack.name: stack for stack in chain.stacks}
    if isinstance(rule, Mapping):
        check_names(rule, chain, label)
        rules = {name: as_rule(given) for name, given in rule.items()}
    else:
        check_names((), chain, label)
        rules = dict.fromkeys(stacks, as_rule(rule))
    plan = plan_of(rules, [stacks[name] for name in rules], form, existing)
    try_call(plan.apply(loss_fn), args)
    return plan


def check_settings(form: str | None, existing: str) -> None:
    """Raise `ScheduleError` or `PlanError` for settings that there are not."""
    check_form(form)
    if existing not in EXISTING:
        hint = did_you_mean(str(existing), EXISTING)
        raise PlanError(f"`existing={existing!r}` is not known. {hint}")


def check_pairs(rules: Any) -> None:
    """Raise `PlanError` for rules that are no pairs of a name and a schedule."""
    if not isinstance(rules, (tuple, list)) or not all(
        isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in rules
    ):
        raise PlanError(
            f"`rules={rules!r}` are no pairs of a stack's name and its schedule, such "
            'as `(("layers", jaxckpt.every(4)),)`. `jaxckpt.plan_from` makes a plan of '
            "other rules."
        )


def as_rule(given: Any) -> Schedule:
    """Return the schedule of a rule: a policy, a schedule, or the text of one.

    Example:
        >>> str(as_rule("save(out_proj)")), str(as_rule("remat_every(2)"))
        ('uniform(save(out_proj))', 'remat_every(2)')
    """
    if not isinstance(given, str):
        return as_schedule(given)
    try:
        return parse_schedule(given)
    except JaxckptError as no_schedule:
        try:
            return as_schedule(parse_policy(given))
        except JaxckptError as no_policy:
            raise PlanError(
                f"`rule={given!r}` is no schedule: {no_schedule} And no policy: "
                f"{no_policy}"
            ) from None
