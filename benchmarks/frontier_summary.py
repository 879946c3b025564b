"""What `frontier.py` says of its results: how often ours is faster, by how much."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.frontier_cases import GROUPS, Result, Row, Step


@dataclass(frozen=True)
class Ratios:
    """Our overhead over that of the best hand policy of a group that fits.

    Attributes:
        median: Over the budgets where they can be compared; None where there are none.
        compared: How many these are.
        both_zero: Budgets where neither has any, which are left out.
        alone: Budgets that no policy of the group fits, which are left out.
        over_fastest: The median where overheads are those over the fastest step of the
            case, ours or a hand policy's: the step without remat may well be slower.
    """

    median: float | None
    compared: int
    both_zero: int
    alone: int
    over_fastest: float | None


@dataclass(frozen=True)
class Summary:
    """The figures of some cases.

    Attributes:
        budgets: How many budgets there are.
        planned: For how many of them there is a plan.
        faster: At how many ours is strictly faster than all hand policies that fit.
        faster_than: The same for the policies of each group alone.
        equal: At how many the best hand policy takes the same time.
        alone: At how many no hand policy fits, and ours does.
        beaten: At how many a hand policy that fits is faster.
        ratios: Overheads by group.
        gap: The largest.
        compiles: Median and most.
        first_error: Median and worst absolute errors of first predictions.
        last_error: The same of last ones.
        negative: Steps, ours or hand's, that are faster than without remat.
        within: Whether all our plans are within their budgets.
    """

    budgets: int
    planned: int
    faster: int
    faster_than: dict[str, int]
    equal: int
    alone: int
    beaten: int
    ratios: dict[str, Ratios]
    gap: float | None
    compiles: tuple[float, int]
    first_error: tuple[float, float]
    last_error: tuple[float, float]
    negative: int
    within: bool


def summarize(results: Sequence[Result]) -> Summary:
    """Return the figures of some cases together."""
    pairs = [(result, row) for result in results for row in result.rows]
    made = [(result, row) for result, row in pairs if row.ours is not None]
    compared = [_compare(result, row, None) for result, row in pairs]
    compiles = [row.compiles for _, row in made]
    return Summary(
        budgets=len(pairs),
        planned=len(made),
        faster=compared.count("faster"),
        faster_than={
            group: sum(_compare(*pair, group) == "faster" for pair in pairs)
            for group in GROUPS
        },
        equal=compared.count("equal"),
        alone=compared.count("alone"),
        beaten=compared.count("beaten"),
        ratios={group: _ratios(made, group) for group in GROUPS},
        gap=max((row.gap for _, row in made if row.gap is not None), default=None),
        compiles=(statistics.median(compiles or [0]), max(compiles, default=0)),
        first_error=_errors([row.first_error for _, row in made]),
        last_error=_errors([row.last_error for _, row in made]),
        negative=sum(_negative(result) for result in results),
        within=all(r.ours.peak_bytes <= r.budget_bytes for _, r in made if r.ours),
    )


def _compare(result: Result, row: Row, group: str | None) -> str:
    """Return `faster`, `equal`, `beaten`, `alone`, or `none` where nothing fits."""
    hand, ours = result.best(row, group), row.ours
    if ours is None:
        return "none" if hand is None else "beaten"
    if hand is None:
        return "alone"
    if ours.step_seconds < hand.step_seconds:
        return "faster"
    return "equal" if ours.step_seconds == hand.step_seconds else "beaten"


def _ratios(pairs: Sequence[tuple[Result, Row]], group: str) -> Ratios:
    steps = [(x, row.ours, x.best(row, group)) for x, row in pairs if row.ours]
    fitting = [(result, ours, hand) for result, ours, hand in steps if hand]
    plain = [
        _ratio(ours, hand, result.plain.step_seconds) for result, ours, hand in fitting
    ]
    fastest = [
        _ratio(ours, hand, fastest_seconds(result)) for result, ours, hand in fitting
    ]
    found = [ratio for ratio in plain if ratio is not None]
    return Ratios(
        median=_median(found),
        compared=len(found),
        both_zero=len(plain) - len(found),
        alone=len(steps) - len(fitting),
        over_fastest=_median([ratio for ratio in fastest if ratio is not None]),
    )


def _ratio(ours: Step, hand: Step, least_seconds: float) -> float | None:
    """Return our overhead over a hand policy's; None where neither has any."""
    one, other = (max(0.0, s.step_seconds - least_seconds) for s in (ours, hand))
    if one == other == 0:
        return None
    return one / other if other else math.inf


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def fastest_seconds(result: Result) -> float:
    """Return the seconds of the fastest step of a case, at any budget."""
    return min(step.step_seconds for step in {result.plain, *_steps(result)})


def _errors(errors: Sequence[float | None]) -> tuple[float, float]:
    sizes = [abs(error) for error in errors if error is not None] or [math.nan]
    return statistics.median(sizes), max(sizes)


def _negative(result: Result) -> int:
    return sum(result.overhead(step) < 0 for step in _steps(result))


def _steps(result: Result) -> set[Step]:
    """Return all steps of a case, ours and hand policies'."""
    ours = {row.ours for row in result.rows if row.ours is not None}
    return ours | {step for steps in result.hands.values() for step in steps}


def exceptions(result: Result) -> Iterator[str]:
    """Yield a sentence for each thing that is not as it ought to be."""
    for row in result.rows:
        yield from (f"{_at(result, row)}: {text}" for text in _of_row(result, row))
    made = [row for row in result.rows if row.ours is not None]
    for one, other in itertools.pairwise(made):
        yield from _rises(result, one, other)
    yield from _below(result)


def _of_row(result: Result, row: Row) -> Iterator[str]:
    hand, ours = result.best(row), row.ours
    if ours is None:
        yield f"no plan: {row.problem}"
        return
    if hand is not None and hand.step_seconds < ours.step_seconds:
        slower = (ours.step_seconds - hand.step_seconds) / result.plain.step_seconds
        yield f"`{hand.label}` is faster by {slower:.3%} of the step without remat"
    if ours.peak_bytes > row.budget_bytes:
        yield f"ours takes {ours.peak_bytes - row.budget_bytes} bytes too many"
    for name, error, limit in (
        ("first", row.first_error, 0.05),
        ("last", row.last_error, 0.01),
    ):
        if error is not None and abs(error) > limit:
            yield f"the {name} prediction is off by {error:+.1%}"
    if row.gap is None or row.gap > 0.02:
        yield "there is no gap" if row.gap is None else f"the gap is {row.gap:.1%}"
    if row.compiles > 5:
        yield f"{row.compiles} compiles"


def _rises(result: Result, one: Row, other: Row) -> Iterator[str]:
    """Yield what is more at the larger one of two budgets."""
    assert one.ours is not None and other.ours is not None
    seconds = other.ours.step_seconds / one.ours.step_seconds - 1
    if seconds > 0:
        yield f"{_at(result, other)}: slower by {seconds:.3%} than at the budget before"
    flops = other.ours.recompute_flops - one.ours.recompute_flops
    if flops > 0:
        share = flops / result.forward_flops
        yield (
            f"{_at(result, other)}: runs {share:.2%} of the forward pass's FLOPs more "
            "again than at the budget before"
        )


def _below(result: Result) -> Iterator[str]:
    """Yield how many steps are faster than the one without remat, if any."""
    count, steps = _negative(result), _steps(result)
    if not count:
        return
    fastest = min(steps, key=lambda step: step.step_seconds)
    share = -result.overhead(fastest) / result.plain.step_seconds
    yield (
        f"{result.case.name}: {count} of {len(steps)} steps are faster than the one "
        f"without remat, `{fastest.label}` by {share:.1%}; such overheads count as none"
    )


def _at(result: Result, row: Row) -> str:
    return f"{result.case.name}, {row.budget_bytes / 2**30:.2f} GiB"
