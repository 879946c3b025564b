"""The command `fit`: parse, call, print."""

from __future__ import annotations

import inspect
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from jaxckpt.cli_options import DeviceName, Json, Settings, Workload
from jaxckpt.cli_output import only_json, print_json
from jaxckpt.devices import Device, get_device, use
from jaxckpt.errors import BudgetError, PlanError, WorkloadError
from jaxckpt.loading import find_workload, load_workload

_INFEASIBLE = 3
_MAXIMIZED = ("batch", "seq")
_MOST_STEP = 128


def fit(
    workload: Workload,
    device: DeviceName = "attached",
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="For the whole step: 70GiB, or 90% of the device's usable memory.",
            show_default=False,
        ),
    ] = None,
    maximize: Annotated[
        str | None,
        typer.Option(
            metavar="batch|seq",
            help="Find the largest value of this setting that fits the budget.",
            show_default=False,
        ),
    ] = None,
    max_overhead: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="In place of a budget: the least memory with a step that is slower "
            "than without remat by 5%, say, at most.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="FILE", help="Plan file to write: plan.json."
        ),
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(help="Not supported yet.", show_default=False)
    ] = None,
    host_budget: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Host memory that kept values may take: 100GiB. Without it none "
            "goes there.",
            show_default=False,
        ),
    ] = None,
    settings: Settings = [],  # noqa: B006 - typer copies it
    as_json: Json = False,
) -> None:
    """Find the fastest plan that fits a byte budget, proven by the compiler."""
    from jaxckpt.report.fit import infeasible_json, infeasible_text

    asked = _Asked(workload, settings, budget, maximize, max_overhead, host_budget)
    _check_later(mesh)
    _check_file(out)
    chip = get_device(device)
    try:
        with only_json(as_json):
            document, parts = asked.answer(chip, out)
    except BudgetError as error:
        if error.least_feasible_bytes is None:
            raise
        if as_json:
            print_json({"workload": workload, **infeasible_json(error)})
        else:
            print(infeasible_text(error), file=sys.stderr)
        raise typer.Exit(_INFEASIBLE) from None
    if as_json:
        print_json(document)
        return
    console = Console()
    for part in parts:
        print(part) if isinstance(part, str) else console.print(part)
    if out is not None:
        print(f"written to {out}; use it by --plan {out}")


class _Asked:
    """What `fit` was asked for.

    Raises:
        BudgetError: There is neither a budget nor a bound on the slowdown, or both.
        WorkloadError: There is no such setting to maximise.
    """

    def __init__(
        self,
        workload: str,
        settings: list[str],
        budget: str | None,
        maximize: str | None,
        max_overhead: str | None,
        host_budget: str | None,
    ) -> None:
        self.workload = workload
        self.settings = settings
        self.budget = budget
        self.maximize = maximize
        self.max_overhead = max_overhead
        self.host_budget = host_budget
        if host_budget is not None and (maximize or max_overhead):
            raise BudgetError("`--host-budget` goes with `--budget` alone so far.")
        if (budget is None) == (max_overhead is None):
            raise BudgetError(
                "Give either `--budget`, as in `--budget 70GiB` or `--budget 90%`, or "
                "`--max-overhead`, as in `--max-overhead 5%`."
            )
        if maximize is not None and maximize not in _MAXIMIZED:
            raise WorkloadError(
                f"`--maximize {maximize}` is not known. Use `batch` or `seq`."
            )
        if maximize is not None and max_overhead is not None:
            raise BudgetError("`--maximize` needs a `--budget`, not `--max-overhead`.")

    def answer(self, device: Device, out: Path | None) -> tuple[dict[str, Any], Any]:
        """Return the JSON object, and what is printed without `--json`."""
        from jaxckpt.planner.budget import parse_budget
        from jaxckpt.planner.fit import fit_workload
        from jaxckpt.planner.inverse import fit_overhead
        from jaxckpt.progress import status
        from jaxckpt.report.fit import budget_note, fit_parts, largest_text

        more: dict[str, Any] = {}
        lines: list[Any] = []
        progress = status()
        if self.budget is not None:
            note = budget_note(parse_budget(self.budget, device), device)
            if note is not None:
                print(f"note: {note}", file=sys.stderr)
        if self.max_overhead is not None:
            result = fit_overhead(
                self._load(device),
                max_overhead=self.max_overhead,
                device=device,
                progress=progress,
            )
        elif self.maximize is None:
            assert self.budget is not None
            result = fit_workload(
                self._load(device),
                budget=self.budget,
                device=device,
                host_budget=self.host_budget,
                progress=progress,
            )
        else:
            found = self._largest(device, progress)
            result, more[self.maximize] = found.result, found.value
            lines.append(largest_text(found, self.maximize))
        if out is not None:
            result.plan.save(out)
        document = {"workload": self.workload, **more, **result.as_json()}
        title = " ".join([self.workload, *self.settings, f"on {device.name}"])
        return document, [title, *lines, *fit_parts(result, device)]

    def _load(self, device: Device, *more: str) -> Any:
        with use(device):
            return load_workload(self.workload, [*self.settings, *more])

    def _largest(self, device: Device, progress: Any) -> Any:
        from jaxckpt.planner.inverse import largest

        assert self.maximize is not None and self.budget is not None
        start = self._start(self.maximize)
        step = math.gcd(start, _MOST_STEP) if self.maximize == "seq" else 1
        kept = [s for s in self.settings if s.split("=")[0] != self.maximize]
        self.settings = kept
        return largest(
            lambda value: self._load(device, f"{self.maximize}={value}"),
            budget=self.budget,
            device=device,
            start=start,
            step=step,
            progress=progress,
        )

    def _start(self, name: str) -> int:
        """Return the value of a setting that was given, or its default."""
        given = [s.split("=", 1)[1] for s in self.settings if s.split("=")[0] == name]
        known = inspect.signature(find_workload(self.workload)).parameters
        if name not in known:
            raise WorkloadError(
                f"`--maximize {name}`: `{self.workload}` has no keyword `{name}`. It "
                f"has: {', '.join(known)}."
            )
        value = given[-1] if given else known[name].default
        try:
            return max(1, int(value))
        except (TypeError, ValueError):
            raise WorkloadError(
                f"`--maximize {name}` begins with `{name}={value}`, which is no number."
                f" Give one by `--set {name}=8`."
            ) from None


def _check_later(mesh: str | None) -> None:
    if mesh is not None:
        raise PlanError(
            f"`--mesh {mesh}` is not supported yet: plans are for one device. Leave it "
            "out."
        )


def _check_file(out: Path | None) -> None:
    """Raise `PlanError` before the work where a file could not be written."""
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise PlanError(
            f"`--out {out}` cannot be written: it is a folder, or its folder is not "
            "there."
        )
