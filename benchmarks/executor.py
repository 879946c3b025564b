"""What do explicit lists of actions cost and save against what JAX users have?

python -m benchmarks.executor [--depths 8,32] [--slots 4] [--device h100-80gb]
    [--unrolled-to 32] [--only looped] [--json out.json] [--plot out.png]

One gradient of a chain of equal MLP stages, `x + sin(x @ w0) @ w1`, by each method:

- forwards: counted when a tiny chain runs on the attached device;
- bytes: temporaries of the program compiled for the device, which need not be here;
- seconds: on the attached device, as a ratio over plain autodiff in a scan.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from benchmarks.executor_methods import (
    EQUINOX,
    Method,
    Runs,
    abstract_arrays,
    counted_stage,
    find_methods,
    make_arrays,
    stage,
    state_bytes,
)
from jaxckpt.devices import can_compile, get_device
from jaxckpt.errors import CompileError, JaxckptError
from jaxckpt.executor import simulate
from jaxckpt.report.plots import check_plot
from jaxckpt.xla.compile import compile_for

DEPTHS = 8, 16, 32, 64, 96
REPEATS = 7
TINY, SMALL, LARGE = (2, 4, 8), (256, 64, 256), (65536, 128, 512)
"""Rows, width and hidden width where runs are counted, timed, and only compiled."""
COMPILE_SECONDS = 600


@dataclass
class Row:
    """What one method takes at one depth; None for what was not measured.

    Attributes:
        depth: Number of stages.
        method: Its name.
        forwards: How often a stage ran forward.
        temp_bytes: Temporaries on the device, by the compiler.
        host_bytes: Bytes on the host, by the compiler.
        state_bytes: One state of the chain that these are for.
        live_states: Most that is held when the host gets a gradient, in states.
        compile_seconds: What the compiler for the device took.
        time_ratio: Seconds over those of plain autodiff in a scan.
        merged: Whether the attached device's compiler took second runs of stages for
            their first, so that the time is that of less work.
    """

    depth: int
    method: str
    forwards: int
    temp_bytes: int | None = None
    host_bytes: int | None = None
    state_bytes: int = state_bytes(LARGE)
    live_states: float | None = None
    compile_seconds: float | None = None
    time_ratio: float | None = None
    merged: bool = False

    @property
    def states(self) -> float | None:
        """Temporaries on the device, in states."""
        return None if self.temp_bytes is None else self.temp_bytes / self.state_bytes


def count_forwards(method: Method) -> int:
    """Run a tiny chain; return how often a stage ran, and check the gradient.

    Raises:
        AssertionError: The gradient is not that of plain autodiff, or the method does
            not run what its list of actions says.
    """
    runs = Runs()
    params, x = make_arrays(method, TINY)
    found = method.gradient(counted_stage(runs))(params, x)
    jax.block_until_ready(found)
    plain = method.plain.gradient(stage)(*make_arrays(method.plain, TINY))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5),
        method.stacked(found),
        plain,
    )
    if method.actions is not None:
        assert runs.count == simulate(method.actions).forwards, (method, runs.count)
    return runs.count


def compile_row(method: Method, row: Row, device: str) -> None:
    """Fill in what the compiler for a device says."""
    args = abstract_arrays(method, LARGE)
    found = compile_for(
        method.gradient(stage), *args, device=device, time_limit_seconds=COMPILE_SECONDS
    )
    row.temp_bytes = found.footprint.temp_bytes
    row.host_bytes = found.footprint.host_bytes
    row.compile_seconds = found.compile_seconds


def time_rows(methods: Sequence[Method], rows: Sequence[Row]) -> None:
    """Fill in the median times, of calls taken in turn, over that of the plain scan."""
    calls = [(m.gradient(stage), make_arrays(m, SMALL)) for m in methods]
    seconds: list[list[float]] = [[] for _ in methods]
    for repeat in range(REPEATS + 1):
        for (gradient, args), taken in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(gradient(*args))
            if repeat:  # the first call compiles
                taken.append(time.perf_counter() - start)
    medians = list(map(statistics.median, seconds))
    plain = medians[[m.is_plain for m in methods].index(True)]
    for row, method, median, (gradient, args) in zip(
        rows, methods, medians, calls, strict=True
    ):
        row.time_ratio = median / plain
        if method.unrolled and method.compiled:
            row.merged = _stages_in(gradient, args) < row.forwards
        if not method.compiled:
            row.live_states = method.live_states(stage, *args) / state_bytes(SMALL)


def _stages_in(gradient: Any, args: Sequence[Any]) -> int:
    """Return how many forward runs of a stage a straight program holds."""
    return gradient.lower(*args).compile().as_text().count(" sine(")


def measure(given: argparse.Namespace, console: Console) -> Iterator[Row]:
    """Yield the rows of all depths."""
    reason = None if given.device == "none" else can_compile(get_device(given.device))
    if reason is not None:
        console.print(f"no bytes: cannot compile for {given.device}: {reason}")
    for depth in given.depths:
        methods = [
            m
            for m in find_methods(depth, given.slots)
            if (not m.unrolled or not m.compiled or depth <= given.unrolled_to)
            and (m.is_plain or given.only in m.name)
        ]
        rows = []
        for method in methods:
            with console.status(f"{depth} stages, {method.name}"):
                row = Row(depth, method.name, count_forwards(method))
                rows.append(row)
                if method.compiled and given.device != "none" and reason is None:
                    _try_compile(method, row, given.device, console)
        with console.status(f"{depth} stages, timing"):
            time_rows(methods, rows)
        yield from rows


def _try_compile(method: Method, row: Row, device: str, console: Console) -> None:
    try:
        compile_row(method, row, device)
    except CompileError as error:
        text = f"no bytes: {row.depth} stages, {method.name}: {str(error)[:200]}"
        console.print(text, markup=False)


HEADINGS = (
    "stages",
    "method",
    "forwards",
    "of one each",
    "device MiB",
    "in states",
    "host states",
    "compile s",
    "time",
)


def header() -> str:
    """Return the first two lines of the markdown table."""
    names = "| " + " | ".join(HEADINGS) + " |"
    return names + "\n|---:|---" + "|---:" * (len(HEADINGS) - 2) + "|"


def line(row: Row) -> str:
    """Return a row's line of the markdown table."""
    temp, host = row.temp_bytes, row.host_bytes
    held = row.live_states
    cells = (
        row.depth,
        row.method,
        row.forwards,
        f"{row.forwards / row.depth:.2f}",
        _text(None if temp is None else temp / 2**20, 0),
        _text(row.states) if held is None else f"{held:.1f} held",
        _text(None if host is None else host / row.state_bytes),
        _text(row.compile_seconds),
        _text(row.time_ratio, 2) + "*" * row.merged,
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def _text(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


COLORS = *(f"C{number}" for number in range(10)), "black", "goldenrod", "navy"


def save_plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write forwards against the peak, a line for each method through the depths."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 6.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, name in enumerate(dict.fromkeys(row.method for row in rows)):
        own = [r for r in rows if r.method == name and r.states is not None]
        if own:
            _draw_method(axes, own, COLORS[number % 13], "os^vDPX<>*hpd"[number % 13])
    axes.set(xscale="log", title=title)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("temporaries of the compiled gradient, in states of the chain")
    axes.set_ylabel("forward runs of a stage, over the number of stages")
    axes.grid(alpha=0.25, which="both")
    axes.legend(fontsize=8)
    figure.savefig(path)


def _draw_method(axes: Any, rows: Sequence[Row], color: str, marker: str) -> None:
    """Draw one line, with the number of stages at both of its ends."""
    points = [(row.states, row.forwards / row.depth) for row in rows]
    label = rows[0].method
    axes.plot(
        *zip(*points, strict=True),
        color=color,
        marker=marker,
        label=label,
        ms=6,
        lw=1.2,
    )
    for depth, point in {(rows[0].depth, points[0]), (rows[-1].depth, points[-1])}:
        axes.annotate(
            str(depth),
            point,
            xytext=(4, 5),
            textcoords="offset points",
            fontsize=7,
            color=color,
        )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; end with one line where one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)))
    parser.add_argument("--slots", default="4", help="states kept at once")
    parser.add_argument("--device", default="h100-80gb", help="none leaves bytes out")
    parser.add_argument(
        "--unrolled-to", default="32", help="deepest chain of straight programs"
    )
    parser.add_argument("--only", default="", help="methods whose name has this")
    parser.add_argument("--json", metavar="OUT.json", type=Path)
    parser.add_argument("--plot", metavar="OUT.png", type=Path)
    given = parser.parse_args(arguments)
    given.depths = [_number(d, "--depths", least=4) for d in given.depths.split(",")]
    given.slots = _number(given.slots, "--slots", least=2)
    given.unrolled_to = _number(given.unrolled_to, "--unrolled-to", least=0)
    if given.device != "none":
        get_device(given.device)
    names = [m.name for m in find_methods(4, given.slots)]
    if not any(given.only in name for name in names):
        sys.exit(f"error: `--only {given.only}` leaves no method of {names}.")
    if given.plot:
        if given.device == "none":
            sys.exit("error: `--plot` draws bytes. Leave out `--device none`.")
        check_plot(given.plot)
    if given.json and not given.json.parent.is_dir():
        sys.exit(f"error: `--json {given.json}`: there is no such folder.")
    return given


def _number(text: str, option: str, *, least: int) -> int:
    if not text.strip().isdecimal() or int(text) < least:
        sys.exit(f"error: `{option}`: `{text}` is no whole number from {least} on.")
    return int(text)


def main() -> None:
    given, console = parse(), Console(stderr=True)
    if EQUINOX is None:
        console.print("left out: equinox's checkpointed scan, equinox is not installed")
    attached = jax.devices()[0].device_kind
    print(
        f"{given.slots} slots, jax {jax.__version__}; bytes for {given.device}, one "
        f"state {state_bytes(LARGE) >> 20} MiB; times on {attached}\n"
    )
    rows = []
    print(header())
    for row in measure(given, console):
        rows.append(row)
        print(line(row), flush=True)
    if any(row.merged for row in rows):
        print("\n`*`: the compiler there merged stages' second runs with their first.")
    if given.json:
        data = [dataclasses.asdict(row) for row in rows]
        given.json.write_text(json.dumps(data, indent=1))
    if given.plot:
        title = f"One gradient, {given.slots} slots, {given.device}; labels: stages"
        save_plot(rows, title, given.plot)


if __name__ == "__main__":
    try:
        main()
    except JaxckptError as error:
        sys.exit(f"error: {error}")
