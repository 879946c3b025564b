"""The picture of `frontier.py`: memory against overhead, a panel for each case."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.frontier_cases import Result, Step
from jaxckpt.report import plots

_PANEL = (7.5, 4.6)  # inches
_COLORS = "C1", "C2", "C4"
_MARKERS = "s", "D", "^"
_TOUCHING = 9  # pixels
_TICKS = 4, 5, 6, 8, 10, 15, 20, 25, 30, 40, 50, 60, 80, 100, 140, 180, 240


def save_frontiers(results: Sequence[Result], path: Path) -> None:
    """Write what our plans and hand policies take: GiB against overhead in percent.

    Args:
        results: The cases, a panel each.
        path: Where to write it; the suffix says the kind.
    """
    plots.check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, len(results))
    rows = math.ceil(len(results) / columns)
    size = (columns * _PANEL[0], rows * _PANEL[1])
    figure = Figure(figsize=size, dpi=plots.DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, result in zip(panels, results, strict=False):
        _draw(axes, result)
    for axes in panels[len(results) :]:
        axes.set_visible(False)
    figure.canvas.draw()
    for axes, result in zip(panels, results, strict=False):
        plots.draw_labels(axes, _labels(axes, result), _ours(result))
    figure.savefig(path)


def _draw(axes: Any, result: Result) -> None:
    from matplotlib.ticker import NullLocator

    case = result.case
    line = _ours(result)
    # Dotted: between these budgets nothing was planned.
    axes.plot(*zip(*line, strict=True), "o:", color="C0", label="ours", zorder=4)
    looks = zip(result.hands.items(), _COLORS, _MARKERS, strict=True)
    for number, ((group, steps), color, marker) in enumerate(looks):
        points = [_point(result, step) for step in steps]
        axes.plot(
            *zip(*points, strict=True),
            marker,
            color=color,
            label=f"hand policies, {group}",
            ms=7 - 1.5 * number,  # a later one on an earlier one leaves its rim
            zorder=2 + number / 10,
        )
    axes.set_title(f"{case.workload.split(':')[1]} {case.settings} on {case.device}")
    axes.set_xscale("log")
    axes.set_xticks(_TICKS, list(map(str, _TICKS)), minor=False)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("peak memory of the training step, GiB")
    axes.set_ylabel("time beyond that without remat, %")
    axes.grid(alpha=0.25)
    axes.margins(0.12)
    axes.set_xlim(*axes.get_xlim())  # ticks beyond do not widen it
    axes.legend(loc="best", frameon=False, fontsize=8)


def _ours(result: Result) -> list[plots.Point]:
    return [_point(result, row.ours) for row in result.rows if row.ours is not None]


def _point(result: Result, step: Step) -> plots.Point:
    share = 100 * result.overhead(step) / result.plain.step_seconds
    return step.peak_bytes / 2**30, share


def _labels(axes: Any, result: Result) -> dict[plots.Point, list[str]]:
    """Return the policies' names at each point; markers that touch share a label."""
    labels: dict[plots.Point, list[str]] = {}
    pixels = axes.transData.transform
    for step in dict.fromkeys(s for steps in result.hands.values() for s in steps):
        name = step.label.split(" | ")[0].removeprefix("maxtext:")
        own = _point(result, step)
        near = (p for p in labels if math.dist(pixels(p), pixels(own)) < _TOUCHING)
        names = labels.setdefault(next(near, own), [])
        if name not in names:
            names.append(name)
    return labels
