"""Pictures as files: matplotlib, from the extra `plot`."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxckpt.devices import Device
from jaxckpt.errors import JaxckptError
from jaxckpt.report.tables import on_pareto_front, rule_texts

SUFFIXES = (".pdf", ".png", ".svg")
_SIZE = (9.0, 6.0)  # inches
DOTS_PER_INCH = 150
_LONGEST_LABEL = 48  # characters

_NEAR = 7.0  # points between a marker and its label, at the least

Point = tuple[float, float]

# Where a label may stand beside its point: the nearest places first.
_OFFSETS: tuple[Point, ...] = tuple(
    (round(far * across, 1), round(far * up, 1))
    for far in (_NEAR, 2 * _NEAR, 4 * _NEAR, 7 * _NEAR, 11 * _NEAR, 16 * _NEAR)
    for across, up in (
        *((1, 0), (-1, 0), (0.7, 0.7), (-0.7, -0.7)),
        *((0.7, -0.7), (-0.7, 0.7), (0, 1), (0, -1)),
    )
)


def check_plot(path: Path) -> None:
    """Raise unless a picture can be written there: before any work is done.

    Raises:
        JaxckptError: The suffix is unknown, the folder missing, or matplotlib absent.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise JaxckptError(
            f"`--plot {path}`: `{path.suffix}` is not a kind of picture. Use "
            f"{', '.join(f'`{s}`' for s in SUFFIXES)}."
        )
    if not path.parent.is_dir():
        raise JaxckptError(f"`--plot {path}`: there is no folder `{path.parent}`.")
    if path.is_dir():
        raise JaxckptError(f"`--plot {path}` is a folder. Name a file.")
    if importlib.util.find_spec("matplotlib") is None:
        raise JaxckptError(
            "`--plot` needs matplotlib, which is not installed. Install the extra "
            "`plot`: `pip install 'jaxckpt[plot]'`."
        )


def plot_comparison(
    rows: Sequence[Mapping[str, Any]], path: Path, *, title: str, device: Device
) -> None:
    """Write a picture of what policies cost: peak memory against what runs again.

    Rules that need the same share a marker. The line is the Pareto front: no rule below
    or to the left of it is known.

    Args:
        rows: Objects as `jaxckpt measure --json` prints them.
        path: Where to write it; the suffix says the kind (`SUFFIXES`).
        title: What was measured.
        device: What it was compiled for.
    """
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    points = _points(rows)
    best = zip(rows, on_pareto_front(rows), strict=True)
    front = sorted({_point(row) for row, good in best if good})
    _draw_points(axes, list(points), front)
    _draw_memory(axes, device, [x for x, _ in points])
    axes.set_title(f"{title} on {device.name}")
    axes.set_xlabel("peak memory of the training step, GiB")
    axes.set_ylabel("products that run again, % of the forward pass")
    axes.grid(alpha=0.25)
    axes.margins(0.12)
    axes.legend(loc="upper right", frameon=False, fontsize=8)
    figure.canvas.draw()
    draw_labels(axes, points, front)
    figure.savefig(path)


def _points(rows: Sequence[Mapping[str, Any]]) -> dict[Point, list[str]]:
    """Group the rules by the point that they share."""
    points: dict[Point, list[str]] = {}
    for row, rule in zip(rows, rule_texts(rows), strict=True):
        points.setdefault(_point(row), []).append(_shortened(rule))
    return points


def _point(row: Mapping[str, Any]) -> Point:
    forward = row["forward_flops"]
    share = 100 * row["recompute_flops"] / forward if forward else 0.0
    return row["peak_bytes"] / 2**30, share


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_LABEL else f"{text[: _LONGEST_LABEL - 3]}..."


def _draw_points(axes: Any, points: Sequence[Point], front: Sequence[Point]) -> None:
    others = [point for point in points if point not in front]
    axes.plot(
        *zip(*front, strict=True), "o-", color="C0", label="Pareto front", zorder=3
    )
    if others:
        axes.plot(
            *zip(*others, strict=True), "o", color="0.55", label="others", zorder=2
        )


def _draw_memory(axes: Any, device: Device, peaks: Sequence[float]) -> None:
    """Draw the chip's memory where it does not squeeze the rest of the picture."""
    if device.memory_bytes is None:
        return
    memory = device.memory_bytes / 2**30
    if min(peaks) <= memory <= 1.25 * max(peaks):
        label = f"memory of {device.name}, {memory:.1f} GiB"
        axes.axvline(memory, color="C3", linestyle="--", linewidth=1, label=label)


def draw_labels(
    axes: Any, points: Mapping[Point, Sequence[str]], front: Sequence[Point]
) -> None:
    """Put a label to each point, near it and clear of all else where there is room."""
    renderer = axes.figure.canvas.get_renderer()
    taken = [_square(axes.transData.transform(point), 6) for point in points]
    taken += [_square(axes.transData.transform(p), 2) for p in _along(front)]
    taken += [axes.get_legend().get_window_extent(renderer).extents]
    frame = axes.get_window_extent(renderer).extents
    for point, names in points.items():
        text = "\n".join(names)
        label = _annotate(axes, text, point, _OFFSETS[0])
        size = label.get_window_extent(renderer).size
        label.remove()
        centre = axes.transData.transform(point)
        places = [_place(centre, offset, size) for offset in _OFFSETS]
        boxes = np.stack(taken)
        costs = [_overlap(place, boxes, frame) for place in places]
        best = costs.index(min(costs))
        _annotate(axes, text, point, _OFFSETS[best])
        taken.append(places[best])


def _place(centre: np.ndarray, offset: Point, size: np.ndarray) -> np.ndarray:
    """Return the box (x0, y0, x1, y1) of a label beside a marker, in pixels."""
    pixels = np.array(offset) * DOTS_PER_INCH / 72  # from points
    corner = centre + pixels - size * (1 - np.sign(offset)) / 2
    return np.concatenate([corner, corner + size])


def _annotate(axes: Any, text: str, point: Point, offset: Point) -> Any:
    """Put a label beside its point; where it is not close, a thin line leads there."""
    across, up = offset
    line = {
        "arrowstyle": "-",
        "color": "0.6",
        "linewidth": 0.5,
        "relpos": (0.5 - _sign(across) / 2, 0.5 - _sign(up) / 2),
        "shrinkA": 0,
    }
    return axes.annotate(
        text,
        point,
        xytext=offset,
        textcoords="offset points",
        fontsize=7,
        ha=("right", "center", "left")[1 + _sign(across)],
        va=("top", "center", "bottom")[1 + _sign(up)],
        arrowprops=line if math.hypot(across, up) > 1.5 * _NEAR else None,
        zorder=4,
    )


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)


def _along(front: Sequence[Point]) -> Iterator[Point]:
    """Yield points along the line through the front."""
    for (x0, y0), (x1, y1) in itertools.pairwise(front):
        for i in range(1, 40):
            yield x0 + (x1 - x0) * i / 40, y0 + (y1 - y0) * i / 40


def _square(centre: np.ndarray, half: float) -> np.ndarray:
    return np.concatenate([centre - half, centre + half])


def _overlap(box: np.ndarray, others: np.ndarray, frame: np.ndarray) -> float:
    """Return how many square pixels of a box lie on others, or outside the frame."""
    area = np.prod(box[2:] - box[:2])
    outside = area - _common(box, frame[None]).sum()
    return float(4 * outside + _common(box, others).sum())


def _common(box: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the square pixels that a box has in common with each of the others."""
    low = np.maximum(box[:2], others[:, :2])
    high = np.minimum(box[2:], others[:, 2:])
    return np.prod(np.maximum(high - low, 0), axis=1)


def save_scatter(points: Sequence[tuple[str, float, float]], path: Path) -> None:
    """Write a picture of predicted against compiled bytes, on logarithmic axes.

    The line is where both are equal, the band ten percent to either side; points of
    one group share a colour.

    Args:
        points: (group, compiled bytes, predicted bytes).
        path: Where to write it; the suffix says the kind (`SUFFIXES`).
    """
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    gib = 2.0**30
    for group in dict.fromkeys(name for name, _, _ in points):
        pairs = [(x / gib, y / gib) for name, x, y in points if name == group]
        axes.plot(*zip(*pairs, strict=True), "o", ms=6, alpha=0.7, label=group)
    values = [value / gib for _, *pair in points for value in pair]
    ends = np.array([min(values) / 1.3, max(values) * 1.3])
    axes.plot(ends, ends, color="black", lw=0.8)
    axes.fill_between(ends, 0.9 * ends, 1.1 * ends, color="black", alpha=0.08, lw=0)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set_xlabel("peak by the compiler's buffer assignment, GiB")
    axes.set_ylabel("peak predicted from the jaxpr, GiB")
    axes.set_title("Predicted against compiled peak (band: 10 %)")
    axes.grid(alpha=0.25, which="both")
    axes.legend(fontsize=7, loc="upper left")
    figure.savefig(path)
