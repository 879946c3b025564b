"""How do planned schedules compare with hand policies, budget by budget?

python -m benchmarks.frontier [--case llama-h100] [--budgets 10] [--json out.json]
    [--plot out.png] [--markdown]

Each case is a model on a device. Its budgets are evenly spaced from the least that has
a plan to the peak without remat, or the device's usable memory where that is less. For
each the planner's answer stands against the fastest hand policy that fits: those of our
catalogue and MaxText's recipes, as they are and with attention's log-sum-exp saved too
(`frontier_cases.GROUPS`). Peaks are the compiler's, seconds a roofline's over the
compiled program, on both sides.

A killed run loses nothing but the step that was being compiled: the compile cache has
the others, so that the same command goes on where it was, and `--json` is written after
each budget.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.frontier_cases import CASES, GROUPS, Case, Result, Row, Step
from benchmarks.frontier_cases import measure_case as measure_case
from benchmarks.frontier_plot import save_frontiers
from benchmarks.frontier_summary import Summary, exceptions, summarize
from jaxckpt.errors import JaxckptError
from jaxckpt.progress import status
from jaxckpt.report.plots import check_plot

_GIB = 2**30
_WIDTH = 240  # columns, where the output is no terminal


def budget_table(result: Result, *, markdown: bool = False) -> Table:
    """Return a case's table, a row for each budget."""
    plain, settings = result.plain, result.case.settings
    table = _table(
        f"{result.case.workload.split(':')[1]} {settings} on {result.case.device}: "
        f"{plain.peak_bytes / _GIB:.2f} GiB and {1000 * plain.step_seconds:.1f} ms "
        "without remat",
        ["budget GiB", "ours GiB", "predicted", "compiles", "again", "overhead", "gap"],
        texts=[f"best hand, {group}" for group in GROUPS],
        markdown=markdown,
    )
    for row in result.rows:
        hands = [_hand_text(result, row, result.best(row, group)) for group in GROUPS]
        table.add_row(
            f"{row.budget_bytes / _GIB:.2f}", *_our_cells(result, row), *hands
        )
    return table


def _our_cells(result: Result, row: Row) -> list[str]:
    ours = row.ours
    if ours is None:
        return ["no plan", "-", str(row.compiles), "-", "-", "-"]
    first, last = row.first_error or 0.0, row.last_error or 0.0
    return [
        f"{ours.peak_bytes / _GIB:.2f}",
        f"{first:+.1%}, {last:+.1%}",
        str(row.compiles),
        f"{ours.recompute_flops / result.forward_flops:.1%}",
        f"{_share(result, ours):+.2%}",
        _share_text(row.gap),
    ]


def _hand_text(result: Result, row: Row, hand: Step | None) -> str:
    if hand is None:
        return "none fits"
    share = f"{_share(result, hand):+.2%} {hand.label.split(' | ')[0]}"
    faster = row.ours is None or hand.step_seconds < row.ours.step_seconds
    return f"{share}, faster" if faster else share


def _share(result: Result, step: Step) -> float:
    return result.overhead(step) / result.plain.step_seconds


def summary_table(results: Sequence[Result], *, markdown: bool = False) -> Table:
    """Return a row for each case, and one for all."""
    table = _table(
        f"Ours against hand policies, jax {jax.__version__}; seconds by a roofline",
        ["case", "budgets", "faster", "equal", "alone", "beaten", "gap", "compiles"]
        + ["first prediction", "last prediction"],
        markdown=markdown,
    )
    for name, found in _summaries(results):
        table.add_row(name, *_summary_cells(found))
    return table


def _summaries(results: Sequence[Result]) -> list[tuple[str, Summary]]:
    ones = [(result.case.name, summarize([result])) for result in results]
    return [*ones, ("all", summarize(results))]


def _summary_cells(found: Summary) -> list[str]:
    first, last = found.first_error, found.last_error
    return [
        f"{found.planned} of {found.budgets}",
        str(found.faster),
        str(found.equal),
        str(found.alone),
        str(found.beaten),
        _share_text(found.gap),
        f"{found.compiles[0]:g}, {found.compiles[1]}",
        f"{first[0]:.1%}, {first[1]:.1%}",
        f"{last[0]:.1%}, {last[1]:.1%}",
    ]


def group_table(results: Sequence[Result], *, markdown: bool = False) -> Table:
    """Return our overhead over that of the best hand policy, a row for each group."""
    table = _table(
        "Our overhead over that of the best hand policy that fits, medians",
        ["case", "hand policies", "ratio", "over the fastest", "compared", "both zero"]
        + ["none fits", "faster"],
        markdown=markdown,
    )
    for name, found in _summaries(results):
        for group, one in found.ratios.items():
            counts = one.compared, one.both_zero, one.alone, found.faster_than[group]
            ratios = _number_text(one.median), _number_text(one.over_fastest)
            table.add_row(name, group, *ratios, *map(str, counts))
    return table


def _number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _share_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _table(
    title: str, numbers: Sequence[str], *, texts: Sequence[str] = (), markdown: bool
) -> Table:
    table = Table(
        title=title, title_justify="left", box=box.MARKDOWN if markdown else box.ROUNDED
    )
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for name in texts:
        table.add_column(name)
    return table


def run(given: argparse.Namespace) -> list[Result]:
    """Measure the chosen cases; print each, and keep what there is in the JSON file."""
    results: list[Result] = []
    for case in given.cases:
        result = None
        for result in measure_case(case, given.budgets, status()):
            _write_json([*results, result], given.json)
            done = f"{case.name}: {len(result.rows)} of {given.budgets} budgets"
            print(done, file=sys.stderr, flush=True)
        assert result is not None
        results.append(result)
        _console().print(budget_table(result, markdown=given.markdown), "")
    return results


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _WIDTH)


def _write_json(results: Sequence[Result], path: Path | None) -> None:
    if path is None:
        return
    data = {
        "jax": jax.__version__,
        "cases": [dataclasses.asdict(result) for result in results],
        "exceptions": [text for result in results for text in exceptions(result)],
        "summary": {
            **{r.case.name: dataclasses.asdict(summarize([r])) for r in results},
            "all": dataclasses.asdict(summarize(results)),
        },
    }
    whole = path.with_name(f"{path.name}.part")
    whole.write_text(json.dumps(data, indent=1))
    whole.replace(path)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; end with one line where one is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [case.name for case in CASES]
    parser.add_argument("--case", action="append", metavar="NAME", dest="names")
    parser.add_argument("--budgets", default="10", metavar="N", help="for each case")
    parser.add_argument("--json", metavar="OUT.json", type=Path)
    parser.add_argument("--plot", metavar="OUT.png", type=Path)
    parser.add_argument("--markdown", action="store_true", help="for a README")
    given = parser.parse_args(arguments)
    given.cases = [_case(name) for name in given.names or names]
    if not given.budgets.isdecimal() or int(given.budgets) < 1:
        sys.exit(f"error: `--budgets {given.budgets}` is no whole number from 1 on.")
    given.budgets = int(given.budgets)
    if given.plot:
        check_plot(given.plot)
    if given.json and not given.json.parent.is_dir():
        sys.exit(f"error: `--json {given.json}`: there is no such folder.")
    return given


def _case(name: str) -> Case:
    known = {case.name: case for case in CASES}
    if name not in known:
        sys.exit(f"error: `--case {name}` is not one of {', '.join(known)}.")
    return known[name]


def main() -> None:
    given = parse()
    results = run(given)
    for table in (summary_table, group_table):
        _console().print(table(results, markdown=given.markdown), "")
    for result in results:
        for text in exceptions(result):
            print(f"- {text}")
    if given.plot:
        save_frontiers(results, given.plot)


if __name__ == "__main__":
    try:
        main()
    except JaxckptError as error:
        sys.exit(f"error: {error}")
