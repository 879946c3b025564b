"""How far is the predicted peak from the compiled one?

python -m benchmarks.prediction [--plot out.png] [--json out.json] [--only vit]

Each case is a whole training step, compiled for a GPU that is not here and predicted
from its jaxpr alone: several models, small and at real widths, batches from 1 to 64,
policies and schedules, scanned and unrolled layers, six devices.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from jaxckpt.devices import get_device, use
from jaxckpt.errors import CompileError, JaxckptError
from jaxckpt.loading import load_workload
from jaxckpt.memory import Prediction, predict_step
from jaxckpt.report.compare import Rule
from jaxckpt.report.plots import check_plot, save_scatter
from jaxckpt.xla.measure import measure_workload, whole_step

QKV = "query_proj, key_proj, value_proj"


@dataclass(frozen=True)
class Case:
    """One step: a workload with its settings under one rule on one device."""

    workload: str
    settings: str
    policy: str | None
    schedule: str | None
    device: str

    @property
    def rule(self) -> Rule:
        return Rule(self.policy, self.schedule)

    @property
    def label(self) -> str:
        settings = f" {self.settings}" if self.settings else ""
        return f"{self.workload.split(':')[1]}{settings}"

    @property
    def group(self) -> str:
        form = "unrolled" if "scan=False" in self.settings else "scanned"
        return f"{Path(self.workload.split(':')[0]).stem}, {form}"


@dataclass(frozen=True)
class Row:
    """A case with what was predicted and what the compiler made of it."""

    case: Case
    predicted_bytes: int
    compiled_bytes: int
    argument_bytes: int
    predicted_seconds: float
    compiled_seconds: float
    predict_seconds: float
    compile_seconds: float

    @property
    def error(self) -> float:
        """Relative error of the predicted peak."""
        return self.predicted_bytes / self.compiled_bytes - 1


def cases() -> Iterator[Case]:
    """Yield the cases."""

    def of(workload: str, settings: str, device: str, *rules: str) -> Iterator[Case]:
        for rule in rules:
            is_schedule = rule.startswith(("every", "remat_every", "nested", "Remat"))
            policy, schedule = (None, rule) if is_schedule else (rule, None)
            yield Case(f"models/{workload}", settings, policy, schedule, device)

    h100, a100, unrolled = "h100-80gb", "a100-80gb", "scan=False num_layers=8"
    mixed = f"Remat(save({QKV}), 12), Remat(save({QKV}, mlpwi_0, mlpwi_1), 4)"
    yield from of(
        "llama.py:llama3_1b",
        "batch=4 seq=4096",
        h100,
        *("none", "full", "dots", "every(4)", "remat_every(2)", mixed),
    )
    yield from of(
        "llama.py:llama3_1b",
        f"batch=4 seq=4096 {unrolled}",
        h100,
        *("none", "full", "dots_no_batch", "every(4)"),
    )
    yield from of("llama.py:llama3_1b", "batch=1 seq=2048", "a100-40gb", "none", "full")
    kept = f"save({QKV}, context, context_lse)"
    yield from of("llama.py:llama3_1b", "batch=16 seq=1024", "h200", kept)
    xla = "batch=16 seq=1024 attention=xla"
    yield from of("llama.py:llama3_1b", xla, "h200", "dots_no_batch")
    small = "batch=1 seq=4096 num_layers=8"
    yield from of("llama.py:llama3_8b", small, "h200", "full", "dots")
    yield from of(
        "gpt.py:gpt2_xl",
        "batch=4",
        h100,
        *("none", "full", "dots", "save(out_proj)", "every(6)"),
    )
    yield from of(
        "gpt.py:gpt2_medium",
        "batch=8 scan=False num_layers=12",
        "rtx4090",
        *("none", "full", "save(mlpwi, query_proj)", "nested(3, 2)"),
    )
    yield from of(
        "gpt.py:gpt2_medium", "batch=16", "l40s", "none", "full", "remat_every(2)"
    )
    yield from of("gpt.py:gpt2_medium", "batch=2", a100, "dots")
    yield from of("gpt.py:gpt2_medium", "batch=1", "b200", "none", "every(6)")
    yield from of(
        "vit.py:vit_l16", "batch=16 pooling=mean", h100, "none", "full", "dots_no_batch"
    )
    yield from of(
        "vit.py:vit_l16", f"batch=16 pooling=mean {unrolled}", a100, "none", "full"
    )
    yield from of("moe.py:moe_1b", "batch=1", h100, "none", "full", "dots")
    yield from of("moe.py:moe_1b", f"batch=2 {unrolled}", "h200", "full")
    yield from of("gpt.py:tiny", "batch=16", h100, "none", "full")
    deep = "batch=64 num_layers=12"
    yield from of("gpt.py:tiny", deep, "a100-40gb", "every(3)", "dots_no_batch")
    yield from of("gpt.py:tiny", f"{deep} scan=False", "a100-40gb", "none", "full")
    yield from of("llama.py:tiny", "batch=16", "h200", "dots")
    yield from of("llama.py:tiny", "batch=16 scan=False", "h200", "full")
    seq = "batch=16 seq=512 attention=xla"
    yield from of("llama.py:tiny", seq, "h200", "none", "full")
    yield from of("vit.py:tiny", "batch=64 pooling=mean", "l40s", "full")
    yield from of("moe.py:tiny", "batch=16", h100, "dots")


def run(case: Case) -> Row:
    """Compile and predict one case."""
    device = get_device(case.device)
    load = functools.partial(
        load_workload, case.workload, case.settings.split(), **case.rule.parsed()
    )
    compiled = measure_workload(
        load, device=device, policy=case.policy, schedule=case.schedule
    )
    start = time.perf_counter()
    predicted = predict_case(case)
    return Row(
        case=case,
        predicted_bytes=predicted.peak_bytes,
        compiled_bytes=compiled.peak_bytes,
        argument_bytes=predicted.argument_bytes,
        predicted_seconds=predicted.step_seconds or 0.0,
        compiled_seconds=compiled.step_seconds or 0.0,
        predict_seconds=time.perf_counter() - start,
        compile_seconds=compiled.compile_seconds,
    )


def predict_case(case: Case) -> Prediction:
    """Predict the same step that is compiled."""
    device = get_device(case.device)
    with use(device):
        settings = case.settings.split()
        workload = load_workload(case.workload, settings, **case.rule.parsed())
        step, state = whole_step(workload)
    return predict_step(step, state, workload.batch, donate_argnums=0, device=device)


def table(rows: Sequence[Row]) -> str:
    """Return the markdown table of errors, as it stands in the README."""
    lines = [
        "| workload | rule | device | predicted | compiled | error | temp error |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        case, unit = row.case, _unit(row.compiled_bytes)
        temp = row.predicted_bytes - row.argument_bytes
        true_temp = row.compiled_bytes - row.argument_bytes
        lines.append(
            f"| {case.label} | {case.schedule or case.policy} | {case.device} "
            f"| {row.predicted_bytes / unit[1]:.2f} {unit[0]} "
            f"| {row.compiled_bytes / unit[1]:.2f} {unit[0]} "
            f"| {row.error:+.1%} | {temp / true_temp - 1:+.1%} |"
        )
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """Return the figures that the README quotes."""
    errors = sorted(abs(row.error) for row in rows)
    ninth = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    ratios = sorted(r.predicted_seconds / r.compiled_seconds for r in rows)
    faster = statistics.median(r.compile_seconds / r.predict_seconds for r in rows)
    within = sum(e <= 0.10 for e in errors)
    return (
        f"{len(rows)} cases: median error {statistics.median(errors):.1%}, nine in ten "
        f"within {ninth:.1%} ({within} of {len(rows)} within 10 %), worst "
        f"{errors[-1]:.1%}; seconds over those of the compiled HLO's roofline: median "
        f"{statistics.median(ratios):.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}; a "
        f"prediction takes 1/{faster:.0f} of the compile's time in the median."
    )


def _unit(size: int) -> tuple[str, int]:
    return ("GiB", 2**30) if size >= 2**30 else ("MiB", 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose label contains this")
    parser.add_argument("--plot", metavar="OUT.png")
    parser.add_argument("--json", metavar="OUT.json")
    given = parser.parse_args()
    if given.plot:
        check_plot(Path(given.plot))  # before an hour of compiling, not after
    console, rows = Console(stderr=True), []
    chosen = [c for c in cases() if given.only in f"{c.workload} {c.settings}"]
    if not chosen:
        sys.exit(f"error: `--only {given.only}` leaves no case.")
    for number, case in enumerate(chosen, 1):
        name = f"{case.label}, {case.schedule or case.policy}, {case.device}"
        with console.status(f"{number} of {len(chosen)}: {name}"):
            try:
                rows.append(run(case))
            except CompileError as error:
                console.print(f"left out: {name}: {str(error)[:200]}", markup=False)
    print(table(rows))
    print(f"\n{summary(rows)}")
    if given.json:
        data = [dataclasses.asdict(row) | {"error": row.error} for row in rows]
        Path(given.json).write_text(json.dumps(data, indent=1))
    if given.plot:
        points = [(r.case.group, r.compiled_bytes, r.predicted_bytes) for r in rows]
        save_scatter(points, Path(given.plot))


if __name__ == "__main__":
    try:
        main()
    except JaxckptError as error:
        sys.exit(f"error: {error}")
