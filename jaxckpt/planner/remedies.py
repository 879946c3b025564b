"""Why a budget is infeasible: who holds the bytes, and what would lower them."""

from __future__ import annotations

import jax

from jaxckpt import _jax
from jaxckpt.errors import BudgetError
from jaxckpt.plan import Plan
from jaxckpt.planner.target import Target

_MOST = 6


def infeasible(
    target: Target, plan: Plan, budget_bytes: int, needed_bytes: int
) -> BudgetError:
    """Return the error for a budget that no plan fits.

    Args:
        target: The step.
        plan: The plan that takes the least.
        budget_bytes: The budget.
        needed_bytes: The least budget that has a plan.
    """
    message = (
        f"`budget={budget_bytes}` bytes ({_gib(budget_bytes)}) is below what the step "
        f"takes on {target.device.name} under any plan. The least budget that has one: "
        f"{needed_bytes} bytes ({_gib(needed_bytes)})."
    )
    return BudgetError(
        message,
        least_feasible_bytes=needed_bytes,
        holders=holders_of(target, plan),
        remedies=remedies_for(target, plan, budget_bytes),
    )


def holders_of(target: Target, plan: Plan) -> tuple[tuple[str, int], ...]:
    """Return who holds memory at the predicted peak: (label, bytes), largest first."""
    prediction = target.predict(plan)
    held = [("parameters, optimizer state and batch", prediction.argument_bytes)]
    held += [
        (f"{count} x {label}" if count > 1 else label, size * count)
        for label, size, count in prediction.holders
    ]
    return tuple(sorted(held, key=lambda row: -row[1])[:_MOST])


def remedies_for(target: Target, plan: Plan, budget_bytes: int) -> tuple[str, ...]:
    """Return what would lower the least memory, one sentence each."""
    prediction = target.predict(plan)
    peak, there = prediction.peak_bytes, prediction.argument_bytes
    params = sum(
        _jax.nbytes(jax.typeof(x)) for x in jax.tree.leaves(target.workload.params)
    )
    found = []
    if there > budget_bytes / 2:
        found.append(
            f"Shard parameters and optimizer state ({_gib(there)}) over devices."
        )
        if there > 2 * params:
            found.append(
                f"Move the optimizer state ({_gib(there - params)} with the batch) to "
                "host memory, or use an optimizer with a smaller one."
            )
    moving = max(0, peak - there - params)
    if moving > peak / 20:
        found.append(
            f"Use a smaller batch or a shorter sequence: {_gib(moving)} of the peak "
            "grow with them. Accumulating gradients keeps the batch of an update."
        )
    largest = max((size for _, size, _ in prediction.holders), default=0)
    if largest > moving / 4 and moving > peak / 20:
        found.append(
            f"The largest single value takes {_gib(largest)}: where it is the logits, "
            "compute the loss in chunks."
        )
    return tuple(found)


def _gib(amount: int) -> str:
    if amount < 2**28:
        return f"{amount / 2**20:,.1f} MiB"
    return f"{amount / 2**30:,.2f} GiB"
