"""Do predictions hold on a real GPU? Peak bytes and seconds of a step, per policy.

Each policy runs in a process of its own, so that one's peak does not hide another's.
First everything is run on the attached device, then compiled for the same chip as if it
were absent. What is known is written at once, so that a killed run loses nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path

# Nothing here imports JAX: the process that starts the others must not hold the GPU.
POLICIES = "none", "dots", "dots_no_batch", "full", "save(out_proj)"
REAL = "models/gpt.py:gpt2_medium", ["batch=32", "seq=1024"]
TINY = "models/gpt.py:tiny", ["batch=8", "seq=64"]


def main() -> None:
    options = parse_arguments()
    if options.phase:
        row = PHASES[options.phase](options)
        print(json.dumps(row))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    print_table(options, run_all(options))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/on_gpu"))
    parser.add_argument("--limit", type=float, default=330, help="seconds for all")
    parser.add_argument("--repeats", type=int, default=10, help="timed steps")
    parser.add_argument(
        "--tiny", action="store_true", help="a model that a CPU can run"
    )
    parser.add_argument("--workload", help=f"instead of {REAL[0]}")
    parser.add_argument("--set", action="append", dest="settings", metavar="KEY=VALUE")
    parser.add_argument("--policy", action="append", help="instead of the five")
    parser.add_argument("--phase", choices=list(PHASES), help=argparse.SUPPRESS)
    parser.add_argument("--chip", help="catalogue name, where JAX's name is not known")
    options = parser.parse_args()
    workload, settings = TINY if options.tiny else REAL
    options.workload = options.workload or workload
    options.settings = options.settings or settings
    options.policy = options.policy or list(POLICIES)
    return options


def run_all(options: argparse.Namespace) -> list[dict]:
    """Run both phases of every policy within the limit; return the rows."""
    deadline = time.monotonic() + options.limit
    rows: list[dict] = []
    with (options.out / "rows.jsonl").open("a") as log:
        for phase in PHASES:
            for policy in options.policy:
                chip = options.chip or next(
                    (r["chip"] for r in rows if "chip" in r), ""
                )
                row = {"phase": phase, "policy": policy}
                row |= run_apart(options, phase, policy, chip, deadline)
                rows.append(row)
                line = json.dumps(row)
                log.write(line + "\n")
                log.flush()
                print(line, flush=True)
    return rows


def run_apart(
    options: argparse.Namespace, phase: str, policy: str, chip: str, deadline: float
) -> dict:
    """Measure in a process of its own; a failure becomes a row that says so."""
    left = deadline - time.monotonic()
    if left < 5:
        return {"error": "not run: no time left"}
    command = [sys.executable, "-m", "benchmarks.on_gpu", "--phase", phase]
    command += ["--workload", options.workload, "--policy", policy]
    command += ["--repeats", str(options.repeats)]
    command += [f"--set={setting}" for setting in options.settings]
    command += ["--chip", chip] if chip else []
    environment = dict(os.environ)
    if phase == "absent":
        environment["JAX_PLATFORMS"] = "cpu"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=left, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"error": f"stopped after {left:.0f} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["?"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure_attached(options: argparse.Namespace) -> dict:
    """Compile for the attached device, run, and read the allocator's own peak."""
    import jax

    from jaxckpt.devices import get_device, use
    from jaxckpt.training import TrainState
    from jaxckpt.xla import compile_for, time_step

    device = get_device("attached")
    with use(device):
        workload, step, abstract = make_step(options)
    compiled = compile_for(step, *abstract, device=device)
    params = jax.jit(workload.init)(jax.random.key(0))
    state = TrainState.create(params, workload.optimizer, jax.random.key(1))
    del params
    batch = next(workload.data("train"))
    initial_peak = peak_bytes(jax)
    arguments = [state, batch]
    del state
    timed = time_step(compiled, arguments, repeats=options.repeats)
    return {
        "chip": catalogue_name(jax.devices()[0].device_kind),
        "kind": jax.devices()[0].device_kind,
        "predicted_peak_bytes": compiled.footprint.peak_bytes,
        "temp_bytes": compiled.footprint.temp_bytes,
        "real_peak_bytes": peak_bytes(jax),
        "initial_peak_bytes": initial_peak,
        "real_seconds": timed.median_seconds,
        "predicted_seconds": roofline(compiled.hlo_text, device),
        "compile_seconds": compiled.compile_seconds,
        "cudnn_attention": "__cudnn$fmha" in compiled.hlo_text,
        "jax": jax.__version__,
    }


def compile_absent(options: argparse.Namespace) -> dict:
    """Compile for the same chip as if it were not here."""
    from jaxckpt.devices import get_device, use
    from jaxckpt.xla import compile_for

    device = get_device(options.chip or "h100-80gb")
    with use(device):
        _, step, abstract = make_step(options)
    compiled = compile_for(step, *abstract, device=device, cache=False)
    return {
        "target": device.name,
        "predicted_peak_bytes": compiled.footprint.peak_bytes,
        "temp_bytes": compiled.footprint.temp_bytes,
        "predicted_seconds": roofline(compiled.hlo_text, device),
        "compile_seconds": compiled.compile_seconds,
        "cudnn_attention": "__cudnn$fmha" in compiled.hlo_text,
    }


PHASES = {"attached": measure_attached, "absent": compile_absent}


def make_step(options: argparse.Namespace):
    """Return the workload, its train step, and the step's abstract arguments."""
    from jaxckpt.loading import load_workload
    from jaxckpt.policy import parse_policy
    from jaxckpt.training import abstract_state, make_train_step

    stand_in_for_jaxtyping()
    policy = parse_policy(options.policy[0])
    workload = load_workload(options.workload, options.settings, policy=policy)
    step = make_train_step(workload.loss_fn, workload.optimizer)
    state = abstract_state(workload.params, workload.optimizer)
    return workload, step, (state, workload.batch)


def stand_in_for_jaxtyping() -> None:
    """Let models be read on a machine without jaxtyping, where nothing is checked."""
    if importlib.util.find_spec("jaxtyping") is None:
        anything = type("Anything", (), {"__class_getitem__": lambda cls, shape: cls})
        module = types.ModuleType("jaxtyping")
        vars(module).update(Array=anything, Float=anything, Int=anything)
        sys.modules["jaxtyping"] = module


def peak_bytes(jax) -> int | None:
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def catalogue_name(kind: str) -> str:
    from jaxckpt.devices import catalog

    names = [name for name, chip in catalog().items() if kind in chip.device_kinds]
    return names[0] if names else ""


def roofline(hlo_text: str, device) -> float | None:
    from jaxckpt.errors import JaxckptError
    from jaxckpt.xla import step_seconds

    try:
        return step_seconds(hlo_text, device).total
    except JaxckptError:
        return None


def print_table(options: argparse.Namespace, rows: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    from jaxckpt.report import format_bytes, format_seconds

    attached = {r["policy"]: r for r in rows if r["phase"] == "attached"}
    absent = {r["policy"]: r for r in rows if r["phase"] == "absent"}
    title = f"{options.workload} {' '.join(options.settings)}"
    table = Table(title=title, title_justify="left")
    for heading in (
        "policy",
        "peak, absent\ncompile",
        "peak, attached\ncompile",
        "peak,\nreal",
        "step,\nroofline",
        "step,\nreal",
    ):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for policy in options.policy:
        here, away = attached[policy], absent[policy]
        table.add_row(
            policy,
            format_bytes(away.get("predicted_peak_bytes")),
            format_bytes(here.get("predicted_peak_bytes")),
            format_bytes(here.get("real_peak_bytes")),
            format_seconds(
                away.get("predicted_seconds") or here.get("predicted_seconds")
            ),
            format_seconds(here.get("real_seconds")),
        )
    with (options.out / "table.txt").open("w") as file:
        for console in (Console(), Console(file=file, width=100)):
            console.print(table)
    for row in rows:
        if "error" in row:
            print(f"{row['phase']}, {row['policy']}: {row['error']}", file=sys.stderr)


if __name__ == "__main__":
    main()
