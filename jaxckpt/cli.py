"""The command `jaxckpt`: parse, call, print.

Exit status: 0 done, 2 bad input (one message on stderr, no traceback), 3 a budget that
no plan fits.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from jaxckpt._quiet import without_noise
from jaxckpt.cli_fit import fit
from jaxckpt.cli_options import (
    DeviceName,
    Json,
    PlanPath,
    PlanPaths,
    PolicyText,
    ScheduleText,
    Settings,
    Workload,
    chosen_rule,
    loader,
    offloads,
)
from jaxckpt.cli_output import only_json, print_json, print_table
from jaxckpt.errors import JaxckptError


class _Commands(TyperGroup):
    """Commands whose errors about the user's input become one line and status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except JaxckptError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> bool:
    if not wanted:
        return wanted
    try:
        print(f"jaxckpt {importlib.metadata.version('jaxckpt')}")
    except importlib.metadata.PackageNotFoundError:
        print("jaxckpt (not installed)")
    raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Choose what JAX keeps for the backward pass, and see what that really costs."""


def main() -> None:
    """Run the command line."""
    _skip_check_for_absent_driver()
    app(prog_name="jaxckpt")


@app.command()
def devices(as_json: Json = False) -> None:
    """List the known chips, and which can be compiled for here."""
    from jaxckpt.devices import can_compile, catalog, get_device
    from jaxckpt.report import device_table

    chips = [*catalog().values(), get_device("attached")]
    reasons = {chip.name: can_compile(chip) for chip in chips}
    if as_json:
        print_json({"devices": [_device_row(c, reasons[c.name]) for c in chips]})
        return
    distinct = list(dict.fromkeys(filter(None, reasons.values())))
    marks = {reason: f"no [{i}]" for i, reason in enumerate(distinct, start=1)}
    obstacles = {name: marks.get(reason or "") for name, reason in reasons.items()}
    print_table(device_table(chips, obstacles))
    for i, reason in enumerate(distinct, start=1):
        Console().print(f"[{i}] {reason}", markup=False, highlight=False)


@app.command()
def explain(
    workload: Workload,
    device: DeviceName = "attached",
    policy: PolicyText = None,
    schedule: ScheduleText = None,
    plan: PlanPath = None,
    settings: Settings = [],  # noqa: B006 - typer copies it
    peak: Annotated[
        bool,
        typer.Option(
            "--peak", help="Compile the step, and show who holds memory at its peak."
        ),
    ] = False,
    stages: Annotated[
        bool, typer.Option("--stages", help="Show the stages of the program.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what the backward pass keeps, by name and bytes."""
    from jaxckpt.devices import get_device
    from jaxckpt.report.explain import explain_workload

    with only_json(as_json):
        rule, chip = chosen_rule(policy, schedule, plan), get_device(device)
        explanation = explain_workload(
            loader(workload, settings, rule, chip.name),
            **rule.parsed(),
            plan=rule.plan,
            device=chip,
            peak=peak,
            stages=stages,
        )
    if as_json:
        print_json(explanation.as_json())
    else:
        explanation.render(Console())


@app.command()
def measure(
    workload: Workload,
    device: DeviceName = "attached",
    policy: PolicyText = None,
    schedule: ScheduleText = None,
    plan: PlanPath = None,
    settings: Settings = [],  # noqa: B006 - typer copies it
    as_json: Json = False,
) -> None:
    """Compile a training step for a device: its memory and time."""
    from jaxckpt.devices import get_device
    from jaxckpt.report import measurement_table, rules_said
    from jaxckpt.xla.measure import measure_workload

    with only_json(as_json):
        rule, chip = chosen_rule(policy, schedule, plan), get_device(device)
        load = loader(workload, settings, rule, chip.name)
        measured = measure_workload(
            load, device=chip, **rule.said(), label=workload
        ).as_json()
    if as_json:
        print_json(measured)
    else:
        print(f"{workload} on {device}, {rules_said(policy, schedule, plan)}")
        print_table(measurement_table(measured))


@app.command()
def compare(
    workload: Workload,
    device: DeviceName = "attached",
    policies: Annotated[
        list[str],
        typer.Option(
            metavar="P,P,..",
            help="Policies, with commas between them; without this and --schedules: "
            "none, full, dots, dots_no_batch and MaxText's. May be repeated.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 - typer copies it
    schedules: Annotated[
        list[str],
        typer.Option(
            metavar="S;S;..",
            help="Schedules, with semicolons between them. May be repeated.",
            show_default=False,
        ),
    ] = [],  # noqa: B006
    plan: PlanPaths = [],  # noqa: B006
    settings: Settings = [],  # noqa: B006
    as_json: Json = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw peak memory against what runs again: out.png."
        ),
    ] = None,
) -> None:
    """Measure a training step under several policies, schedules and plans."""
    from jaxckpt.devices import get_device
    from jaxckpt.progress import status
    from jaxckpt.report import comparison_parts
    from jaxckpt.report.compare import chosen_rules, compare_policies
    from jaxckpt.report.plots import check_plot, plot_comparison

    with only_json(as_json):
        rules = chosen_rules(policies, schedules, plan)
        chip = get_device(device)
        if plot is not None:
            check_plot(plot)
        found = compare_policies(
            lambda rule: loader(workload, settings, rule, chip.name)(),
            rules,
            chip,
            label=workload,
            progress=status(),
        )
        document = found.as_json()
        title = " ".join([workload, *settings])
        if plot is not None:
            plot_comparison(document["rows"], plot, title=title, device=chip)
    for one in found.left_out:
        print(f"left out: {one.rule.label}: {one.reason}", file=sys.stderr)
    if as_json:
        print_json(document)
        return
    for part in comparison_parts(document["rows"], title=title, device=chip):
        print_table(part)


app.command()(fit)


@app.command()
def train(
    workload: Workload,
    steps: Annotated[int, typer.Option(help="Optimizer steps.", show_default=False)],
    policy: PolicyText = None,
    schedule: ScheduleText = None,
    plan: PlanPath = None,
    settings: Settings = [],  # noqa: B006 - typer copies it
    data: Annotated[
        Path | None, typer.Option(help="A text file or a folder of them to train on.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder that gets log.jsonl.")
    ] = None,
) -> None:
    """Train a workload here and print its losses."""
    from jaxckpt.devices import get_device, use
    from jaxckpt.report import rules_said, train_table
    from jaxckpt.training import train as run
    from jaxckpt.xla.measure import trace_loss

    rule = chosen_rule(policy, schedule, plan)
    data_path = None if data is None else str(data)
    load = loader(workload, settings, rule, "attached", data_path=data_path)
    with use(get_device("attached")) as device:
        loaded = load()
        if device.platform == "cpu" and offloads(rule, loaded.layers):
            print("note: offload has no effect on the cpu backend.", file=sys.stderr)
        flops = trace_loss(loaded).forward_flops
        result = run(loaded, steps=steps, out=out, forward_flops=flops)
    print(f"{workload}, {steps} steps, {rules_said(policy, schedule, plan)}")
    print_table(train_table(result))


def _device_row(device: Any, reason: str | None) -> dict[str, Any]:
    answer = {"can_compile": reason is None, "reason": reason}
    return dataclasses.asdict(device) | answer


def _skip_check_for_absent_driver() -> None:
    """Keep JAX from logging a traceback where the CUDA plugin is, but no driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        import jax

        with without_noise():
            jax.devices()
