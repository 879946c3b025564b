"""What `jaxckpt fit` prints: the plan that was found, or why there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.table import Table

from jaxckpt.devices import Device
from jaxckpt.errors import BudgetError
from jaxckpt.planner.budget import RESERVE_BYTES, memory_fraction, usable_bytes
from jaxckpt.planner.fitting import FitResult
from jaxckpt.planner.inverse import Largest
from jaxckpt.report.tables import format_bytes, format_flops, format_seconds


def fit_parts(result: FitResult, device: Device) -> Iterator[Any]:
    """Yield what is printed for a plan, one part after the other."""
    verified = result.plan.verified
    assert verified is not None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    share = verified.recompute_flops / max(1, verified.forward_flops)
    compiled, predicted = verified.compiled, verified.predicted
    error = predicted.peak_bytes / compiled.peak_bytes - 1
    table.add_row("budget", format_bytes(verified.budget_bytes))
    table.add_row(
        "peak",
        f"{format_bytes(compiled.peak_bytes)} compiled for {device.name}; predicted "
        f"{format_bytes(predicted.peak_bytes)} ({100 * error:+.2f} %)",
    )
    if verified.host_bytes:
        link = result.compiled
        table.add_row(
            "host",
            f"{format_bytes(verified.host_bytes)}; copies take "
            f"{_seconds(link.hidden_seconds)} beside the device's work and keep it "
            f"waiting for {_seconds(link.exposed_seconds)}",
        )
    table.add_row(
        "run again",
        f"{format_flops(verified.recompute_flops)}, {100 * share:.1f} % of the forward "
        "pass's products",
    )
    if compiled.step_seconds is not None:
        bound = verified.lower_bound_seconds
        best = "" if bound is None else f"; no plan takes less than {_seconds(bound)}"
        gap = "" if verified.gap is None else f" (gap {100 * verified.gap:.2f} %)"
        table.add_row("step", f"{_seconds(compiled.step_seconds)}{best}{gap}")
    table.add_row(
        "search",
        f"{format_seconds(verified.solve_seconds)} and {verified.compiles} compile"
        f"{'s' * (verified.compiles != 1)}, form {result.form}",
    )
    yield table
    yield "\n\n".join(_pictures(result))
    yield f"\n{_how_to_run(result, device)}"


def _seconds(amount: float) -> str:
    """Return seconds with four figures: plans differ by less than three tell apart."""
    return f"{amount:.4g} s" if amount >= 1 else f"{1e3 * amount:.4g} ms"


def _pictures(result: FitResult) -> Iterator[str]:
    plan = result.plan
    for (name, schedule), depth in zip(plan.rules, plan.depths, strict=True):
        yield f"{name}: {schedule.draw(depth)}"


def _how_to_run(result: FitResult, device: Device) -> str:
    """Return the settings with which the step takes what it was compiled for."""
    verified = result.plan.verified
    assert verified is not None
    lines = [f"run it with XLA_FLAGS={verified.xla_flags}"]
    fraction = memory_fraction(verified.compiled.peak_bytes, device)
    if fraction is not None and device.platform == "cuda":
        lines.append(
            f"and XLA_PYTHON_CLIENT_MEM_FRACTION={max(fraction, 0.75):.2f} (JAX takes "
            "0.75 by itself)"
        )
    return "\n".join(lines)


def budget_note(budget_bytes: int, device: Device) -> str | None:
    """Return what to say of a budget above a device's usable memory, else None."""
    usable = usable_bytes(device)
    if usable is None or budget_bytes <= usable:
        return None
    return (
        f"the budget of {format_bytes(budget_bytes)} is above the usable memory of "
        f"{device.name}, {format_bytes(usable)}: {format_bytes(RESERVE_BYTES)} are set "
        "aside for the context and libraries' workspaces."
    )


def infeasible_json(error: BudgetError) -> dict[str, Any]:
    """Return the object that `jaxckpt fit --json` prints where nothing fits."""
    return {
        "fits": False,
        "least_feasible_bytes": error.least_feasible_bytes,
        "holders": [{"name": name, "bytes": size} for name, size in error.holders],
        "remedies": list(error.remedies),
    }


def infeasible_text(error: BudgetError) -> str:
    """Return what is printed where nothing fits."""
    lines = [str(error), "Held at the peak of the plan that takes the least:"]
    lines += [f"  {format_bytes(size):>12}  {name}" for name, size in error.holders]
    if error.remedies:
        lines += ["What would lower it:", *(f"  - {r}" for r in error.remedies)]
    return "\n".join(lines)


def largest_text(found: Largest, setting: str) -> str:
    """Return the answer to `--maximize`."""
    return f"largest {setting} that fits: {found.value}. {found.refused}"
