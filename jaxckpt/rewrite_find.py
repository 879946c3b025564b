"""Which stacks of a program a plan rules, and whether it is the plan's program."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxckpt.errors import PlanError, did_you_mean
from jaxckpt.graph.flops import equations
from jaxckpt.graph.stages import Chain, Stack
from jaxckpt.matmul import find_matmul
from jaxckpt.rewrite_program import Ruled
from jaxckpt.schedule import Schedule


@runtime_checkable
class Rules(Protocol):
    """What the rewriter reads of a plan (`jaxckpt.plan.Plan`)."""

    @property
    def rules(self) -> tuple[tuple[str, Schedule], ...]:
        """A schedule for each stack, by the stack's name."""
        ...

    @property
    def form(self) -> str | None:
        """The form of scanned stacks, as for `run_layers`."""
        ...

    @property
    def existing(self) -> str:
        """What becomes of remat that is there: `"replace"` or `"keep"`."""
        ...

    @property
    def fingerprint(self) -> str | None:
        """What `fingerprint_of` gave for the program that it was made for."""
        ...


def find_ruled(plan: Rules, chain: Chain, label: str) -> tuple[Stack, ...]:
    """Return the stacks that a plan rules, in the order of its rules.

    Args:
        plan: The plan.
        chain: The program as a chain.
        label: How to call the program in an error.

    Raises:
        PlanError: A stack is not there, or is not the one that the plan was made for.
    """
    known = {stack.name: stack for stack in chain.stacks}
    check_names((name for name, _ in plan.rules), chain, label)
    found = tuple(known[name] for name, _ in plan.rules)
    if plan.fingerprint not in (None, fingerprint_of(found)):
        raise PlanError(
            f"The plan was made for another program than {label}, which has "
            f"{_listed(found)}: either the numbers of layers differ, or the products "
            "in a layer. Make the plan for this program, by `jaxckpt.plan_from` or "
            "whatever made it."
        )
    return found


def check_names(names: Iterable[Any], chain: Chain, label: str) -> None:
    """Raise `PlanError` for the name of a stack that is not there."""
    if not chain.stacks:
        there = ", ".join(stage.name for stage in chain.stages) or "(none)"
        raise PlanError(
            f"No stack of layers was found in {label}: no loop over stacked parameters "
            "whose layers multiply matrices, and no layers of equal structure. Its "
            f"stages: {there}. Mark each layer by `jaxckpt.mark_stage` where you know "
            "better; a program with marks is cut at those alone."
        )
    known = [stack.name for stack in chain.stacks]
    for name in names:
        if name not in known:
            raise PlanError(
                f"The plan rules the stack `{name}`, which is not in {label}. "
                f"{did_you_mean(name, known)}"
            )


def fingerprint_of(found: Sequence[Stack]) -> str:
    """Return what tells stacks from others: names, depths, products in a layer.

    It leaves out all that may change from call to call of one model: shapes (the last
    batch of an epoch, shards of it, `vmap`), dropout, casts, and what stands outside.
    """
    said = [(s.name, s.num_layers, s.scanned, *_products_of(s)) for s in found]
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


def _products_of(stack: Stack) -> list[Any]:
    by_kind: dict[int, Any] = {}
    for stage in stack.stages:
        if stage.kind not in by_kind:
            names = (eqn.primitive.name for eqn, _ in equations(stage.body))
            by_kind[stage.kind] = sorted(Counter(filter(find_matmul, names)).items())
    return [by_kind[stage.kind] for stage in stack.stages]


def _listed(found: Sequence[Stack]) -> str:
    return ", ".join(f"`{s.name}` of {s.num_layers} layers" for s in found)


def as_ruled(plan: Rules, found: Sequence[Stack]) -> list[Ruled]:
    """Return the stacks with their schedules, for the rewriter."""
    return [
        Ruled(
            name=stack.name,
            place=tuple(stack.stages[0].place),
            ranges=tuple((stage.start, stage.stop) for stage in stack.stages),
            num_layers=stack.num_layers,
            scanned=stack.scanned,
            schedule=schedule,
        )
        for stack, (_, schedule) in zip(found, plan.rules, strict=True)
    ]
