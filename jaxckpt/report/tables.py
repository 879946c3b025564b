"""Amounts as people read them, and rich tables that fit a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from jaxckpt.devices import Device
from jaxckpt.training import TrainResult

UNKNOWN = "-"
_FIGURES = "peak", "temp", "recomputed", "step"


def format_bytes(amount: int | None) -> str:
    """Return bytes in GiB (2**30) with two decimals; None is unknown.

    Example:
        >>> format_bytes(3 * 2**29), format_bytes(None)
        ('1.50 GiB', '-')
    """
    return UNKNOWN if amount is None else f"{amount / 2**30:.2f} GiB"


def format_flops(amount: float | None) -> str:
    """Return floating-point operations with three figures and a decimal prefix.

    Example:
        >>> format_flops(2.5e12), format_flops(0), format_flops(999_900)
        ('2.50 TFLOP', '0 FLOP', '1.00 MFLOP')
    """
    return UNKNOWN if amount is None else _scaled(amount, "FLOP")


def format_seconds(amount: float | None) -> str:
    """Return seconds with three figures, in ms or us where they are few.

    Example:
        >>> format_seconds(0.0123), format_seconds(75.2), format_seconds(None)
        ('12.3 ms', '75.2 s', '-')
    """
    if amount is None:
        return UNKNOWN
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if float(f"{amount:.3g}") >= size:
            return f"{_three_figures(amount / size)} {unit}"
    return f"{_three_figures(amount / 1e-6)} us"


def _scaled(amount: float, unit: str) -> str:
    rounded = float(f"{amount:.3g}")
    for prefix, size in zip("EPTGMk", (1e18, 1e15, 1e12, 1e9, 1e6, 1e3), strict=True):
        if rounded >= size:
            return f"{_three_figures(rounded / size)} {prefix}{unit}"
    return f"{amount:g} {unit}"


def _three_figures(number: float) -> str:
    """Return a number with three significant figures, never with an exponent."""
    if number >= 99.95:
        return f"{number:.0f}"
    return f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"


def device_table(
    devices: Iterable[Device], obstacles: Mapping[str, str | None]
) -> Table:
    """Return the table of known chips.

    Args:
        devices: Chips, in the order of the rows.
        obstacles: By name of the chip: None where it can be compiled for here, else the
            mark of the reason that stands under the table.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("device", no_wrap=True)
    for heading in (
        "memory\nGiB",
        "memory\nTB/s",
        "bf16\nTFLOP/s",
        "host link\nGB/s",
        "NVLink\nGB/s",
        "compile\nhere",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for device in devices:
        table.add_row(
            device.name,
            _in(device.memory_bytes, 2**30, ".1f"),
            _in(device.memory_bytes_per_second, 1e12, ".2f"),
            _in(device.peak_flops_per_second, 1e12, ".0f"),
            _in(device.host_link_bytes_per_second, 1e9, ".0f"),
            _in(device.nvlink_bytes_per_second, 1e9, ".0f"),
            obstacles.get(device.name) or "yes",
        )
    return table


def _in(amount: float | None, unit: float, form: str) -> str:
    return UNKNOWN if amount is None else format(amount / unit, form)


def measurement_table(measurement: Mapping[str, Any]) -> Table:
    """Return one measurement, a quantity a row.

    Args:
        measurement: An object as `jaxckpt measure --json` prints it.
    """
    get = measurement.get
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    parts = ("argument_bytes", "output_bytes", "temp_bytes", "alias_bytes")
    table.add_row("peak", f"[bold]{format_bytes(get('peak_bytes'))}[/bold]")
    for sign, key in zip("+++-", parts, strict=True):
        label = key.removesuffix("_bytes")
        table.add_row(f"  {sign} {label}", format_bytes(get(key)))
    table.add_row("host memory", format_bytes(get("host_bytes")))
    table.add_section()
    table.add_row("forward", format_flops(get("forward_flops")))
    table.add_row("recomputed", _recomputed(measurement))
    table.add_row(
        "step", f"{format_seconds(get('step_seconds'))}{_origin(measurement)}"
    )
    table.add_row("compile", format_seconds(get("compile_seconds")))
    table.add_section()
    table.add_row("attention", str(get("attention") or UNKNOWN))
    table.add_row("layers scanned", _yes_no(get("scanned")))
    table.add_row("XLA_FLAGS", str(get("xla_flags") or UNKNOWN))
    table.add_row("versions", _pairs(get("versions")))
    if unpriced := get("unpriced"):
        table.add_row("priced by bytes", ", ".join(unpriced))
    for warning in get("warnings") or ():
        table.add_row("[yellow]warning[/yellow]", escape(warning))
    return table


def train_table(result: TrainResult) -> Table:
    """Return what a training run came to, a quantity a row."""
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("final loss", f"{result.final_loss:.4f}")
    table.add_row("validation loss", f"[bold]{result.validation_loss:.4f}[/bold]")
    if result.unigram_entropy is not None:
        table.add_row("unigram entropy", f"{result.unigram_entropy:.4f} nats")
    table.add_row("compile", format_seconds(result.compile_seconds))
    table.add_row("train", format_seconds(result.train_seconds))
    table.add_row("tokens/s", f"{result.tokens_per_second:,.0f}")
    if result.mfu is not None:
        table.add_row("MFU", f"{100 * result.mfu:.1f} %")
    return table


def comparison_parts(
    rows: Sequence[Mapping[str, Any]], *, title: str, device: Device
) -> tuple[str | Table, ...]:
    """Return what `jaxckpt compare` prints: a heading, the table and its key.

    Args:
        rows: Objects as `jaxckpt measure --json` prints them.
        title: What was measured.
        device: What it was compiled for.
    """
    attention = rows[0]["attention"]
    uses = f", attention {attention}" if attention else ""
    memory = format_bytes(device.memory_bytes)
    has = "" if device.memory_bytes is None else f"\n{device.name} has {memory}."
    key = "* No other row needs as little memory and runs as little again."
    heading = escape(f"{title} on {device.name}{uses}")
    return heading, policy_table(rows), escape(f"{key}{has}")


def policy_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return several measurements of one workload and device, a rule a row.

    Args:
        rows: Objects as `jaxckpt measure --json` prints them.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column(_rules_heading(rows), overflow="fold")
    for heading in _FIGURES:
        table.add_column(heading, justify="right", no_wrap=True)
    marks = ("*" if best else "" for best in on_pareto_front(rows))
    for mark, rule, figures in zip(
        marks, rule_texts(rows), _figures(rows), strict=True
    ):
        table.add_row(mark, escape(rule), *figures)
    return table


def policy_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return `policy_table` in Markdown, with the Pareto-optimal rules in bold.

    Args:
        rows: Objects as `jaxckpt measure --json` prints them.
    """
    headings = _rules_heading(rows), *_FIGURES
    lines = [f"| {' | '.join(headings)} |", f"|---|{'---:|' * len(_FIGURES)}"]
    marks = ("**" if best else "" for best in on_pareto_front(rows))
    for mark, rule, figures in zip(
        marks, rule_texts(rows), _figures(rows), strict=True
    ):
        rule = rule.replace("|", "\\|")
        lines.append(f"| {' | '.join([f'{mark}`{rule}`{mark}', *figures])} |")
    return "\n".join(lines)


def on_pareto_front(rows: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Return for each row whether no other is better.

    Another is better where it has no more peak bytes and no more recomputed FLOPs, and
    less of one of the two.

    Args:
        rows: Objects as `jaxckpt measure --json` prints them.

    Example:
        >>> keys = "peak_bytes", "recompute_flops"
        >>> rows = [dict(zip(keys, pair)) for pair in [(9, 0), (7, 0), (5, 3), (6, 4)]]
        >>> on_pareto_front(rows)
        [False, True, True, False]
    """
    points = [(row["peak_bytes"], row["recompute_flops"]) for row in rows]
    return [
        not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)
        for p in points
    ]


def rules_said(policy: object, schedule: object, plan: str | None = None) -> str:
    """Return a policy and a schedule in words, or a plan's file; None where not given.

    Example:
        >>> rules_said(None, None), rules_said("full", "remat_every(2)")
        ('policy none', 'policy full, schedule remat_every(2)')
    """
    if plan is not None:
        return f"plan {plan}"
    given = {"policy": policy, "schedule": schedule}
    parts = [f"{key} {rule}" for key, rule in given.items() if rule is not None]
    return ", ".join(parts) or "policy none"


def rule_text(measurement: Mapping[str, Any]) -> str:
    """Return the policy and the schedule of a measurement as one text, or its plan.

    Example:
        >>> rule_text({"policy": "full", "schedule": None})
        'full'
        >>> rule_text({"policy": "full", "schedule": "remat_every(2)"})
        'remat_every(2), policy full'
        >>> rule_text({"policy": None, "schedule": "full", "plan": "runs/plan.json"})
        'plan.json'
    """
    if measurement.get("plan") is not None:
        return PurePath(measurement["plan"]).name
    policy, schedule = measurement.get("policy"), measurement.get("schedule")
    if schedule is None:
        return str(policy)
    return str(schedule) if policy is None else f"{schedule}, policy {policy}"


def rule_texts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the rule of each row; plan files of the same name by their paths.

    Example:
        >>> rule_texts([{"plan": "h200/plan.json"}, {"plan": "b200/plan.json"}])
        ['h200/plan.json', 'b200/plan.json']
    """
    texts = [rule_text(row) for row in rows]
    several = {text for text in texts if texts.count(text) > 1}
    return [
        row.get("plan") or text if text in several else text
        for text, row in zip(texts, rows, strict=True)
    ]


def _rules_heading(rows: Sequence[Mapping[str, Any]]) -> str:
    kinds = ("plan", "policy", "schedule")
    given = {next((key for key in kinds if row.get(key)), "policy") for row in rows}
    given |= {"schedule" for row in rows if row.get("schedule") and not row.get("plan")}
    return " or ".join(key for key in ("policy", "schedule", "plan") if key in given)


def _figures(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the cells of each row; bytes in MiB where all are below one GiB."""
    small = all(row["peak_bytes"] < 2**30 for row in rows)
    amount = _mebibytes if small else format_bytes
    return [
        (
            amount(row["peak_bytes"]),
            amount(row["temp_bytes"]),
            _share(row),
            format_seconds(row["step_seconds"]),
        )
        for row in rows
    ]


def _mebibytes(amount: int) -> str:
    return f"{amount / 2**20:.2f} MiB"


def _share(measurement: Mapping[str, Any]) -> str:
    recomputed = measurement.get("recompute_flops")
    forward = measurement.get("forward_flops")
    if recomputed is None or not forward:
        return UNKNOWN
    return f"{100 * recomputed / forward:.1f} %"


def _recomputed(measurement: Mapping[str, Any]) -> str:
    amount = format_flops(measurement.get("recompute_flops"))
    share = _share(measurement)
    return amount if share == UNKNOWN else f"{amount} ({share} of the forward)"


def _origin(measurement: Mapping[str, Any]) -> str:
    return "" if measurement.get("device") == "attached" else " (roofline estimate)"


def _yes_no(answer: bool | None) -> str:
    return UNKNOWN if answer is None else ("yes" if answer else "no")


def _pairs(pairs: Mapping[str, Any] | None) -> str:
    present = {k: v for k, v in (pairs or {}).items() if v is not None}
    return ", ".join(f"{k} {v}" for k, v in present.items()) or UNKNOWN
