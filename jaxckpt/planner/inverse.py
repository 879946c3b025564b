"""The questions the other way round: the least memory, and the largest workload."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from jaxckpt.devices import Device
from jaxckpt.errors import BudgetError, CompileError, WorkloadError
from jaxckpt.planner.budget import parse_budget
from jaxckpt.planner.fitting import Fit, FitResult, Tried
from jaxckpt.planner.search import Found, Search
from jaxckpt.planner.target import Target
from jaxckpt.progress import Progress, silent
from jaxckpt.workload import Workload

_MOST_TRIES = 4
_MOST_GUESSES = 6


def parse_overhead(given: str | float) -> float:
    """Return a bound on the slowdown as a share: `"5%"` and `0.05` are the same.

    Raises:
        BudgetError: It is no share above 0.

    Example:
        >>> parse_overhead("5%"), parse_overhead(0.2)
        (0.05, 0.2)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", str(given))
    share = float(match.group(1)) / (100 if match.group(2) else 1) if match else 0.0
    if isinstance(given, bool) or not 0 < share < math.inf:
        raise BudgetError(
            f"`max_overhead={given!r}` is not a slowdown. Give a share of the step "
            "without remat, above 0: `5%` or `0.05`."
        )
    return share


def fit_overhead(
    workload: Workload,
    *,
    max_overhead: str | float,
    device: Device,
    progress: Progress = silent,
) -> FitResult:
    """Return the plan of the fewest bytes whose step is slower by a share at most.

    The step without remat is compiled too: seconds are compared by the roofline over
    both compiled programs, or by the model where the device's rates are not known.

    Raises:
        BudgetError: `max_overhead` is no share.
        CompileError: The step without remat does not compile.
    """
    share = parse_overhead(max_overhead)
    target = Target(workload, device)
    fit = Fit(target, 2**63 - 1, progress)
    plain = fit.compile_plain()
    if plain is None:
        raise CompileError(
            "The step without remat does not compile, so that there is nothing to "
            "compare with. Give a budget instead."
        )
    _lower(fit, plain, share)
    within = [t for t in fit.tried if _overhead(target, t, plain) <= share]
    best = min(within, key=lambda t: t.compiled.peak_bytes)
    return fit.result(best, best.compiled.peak_bytes)


def _lower(fit: Fit, plain: Tried, share: float) -> None:
    """Compile plans that are slower by the share, by the model set right each time."""
    step = fit.target.predict(plain.found.plan).step_seconds
    if step is None:
        return
    allowed = share * step
    for _ in range(_MOST_TRIES):
        with fit.progress("planning"):
            found = _smallest_within(fit.search, allowed)
        if found is None or any(t.found.plan == found.plan for t in fit.tried):
            return
        tried = fit.compile(found)
        if tried is None:
            return
        slower = _overhead(fit.target, tried, plain)
        if slower <= share and slower >= 0.9 * share:
            return
        allowed *= 0.98 * share / slower if slower > 0 else 2.0


def _smallest_within(search: Search, seconds: float) -> Found | None:
    """Return the plan of the fewest bytes that runs so many seconds again at most."""
    low, high = 0, search.most_free_bytes
    best = None
    while high - low > max(1, high // 500):
        middle = (low + high) // 2
        solved = search.solver.solve(middle)
        if solved is None or solved.seconds > seconds:
            low = middle
        else:
            best, high = solved, min(middle, solved.peak_bytes)
    return None if best is None else search.found(best)


def _overhead(target: Target, tried: Tried, plain: Tried) -> float:
    """Return by which share a plan's step is slower than that without remat."""
    if tried is plain:
        return 0.0
    one, other = tried.compiled.step_seconds, plain.compiled.step_seconds
    if one is None or other is None:
        step = target.predict(plain.found.plan).step_seconds
        return math.inf if step is None else tried.found.seconds / step
    return one / other - 1


@dataclass(frozen=True)
class Largest:
    """The largest value of a setting with which a workload fits.

    Attributes:
        value: The value.
        result: The plan with which it fits.
        refused: Why the next value does not.
    """

    value: int
    result: FitResult
    refused: str


def largest(
    load_for: Callable[[int], Workload],
    *,
    budget: str | int,
    device: Device,
    start: int,
    step: int = 1,
    progress: Progress = silent,
) -> Largest:
    """Return the largest value with which a workload has a plan within a budget.

    The value is guessed from predictions, which grow evenly with a batch or a sequence,
    and proven by the compiler: it fits, and the next one does not.

    Args:
        load_for: Returns the workload for a value.
        budget: As for `fit`.
        device: What it runs on.
        start: A value to begin with.
        step: What values are multiples of.
        progress: Shows what is done.

    Raises:
        BudgetError: Not even the smallest value fits.
    """
    search = _Largest(load_for, parse_budget(budget, device), device, step, progress)
    return search.find(max(1, start // step))


class _Largest:
    """Looks for the largest count of steps that fits."""

    def __init__(
        self,
        load_for: Callable[[int], Workload],
        budget: int,
        device: Device,
        step: int,
        progress: Progress,
    ) -> None:
        self.load_for = load_for
        self.budget = budget
        self.device = device
        self.step = step
        self.progress = progress
        self._refused: dict[int, str] = {}
        self._fits: dict[int, FitResult] = {}

    def find(self, start: int) -> Largest:
        """Return the largest value."""
        count = self._guess(start)
        while count > 0 and not self._try(count):
            count = min(count - 1, round(count * 0.98))
        if count < 1:
            raise BudgetError(
                f"Not even a value of {self.step} fits: {self._refused[1]}"
            )
        jump = max(1, round(count * 0.02))
        while jump:
            if self._try(count + jump):
                count += jump
            elif jump > 1:
                jump = max(1, jump // 2)
            else:
                break
        refused = self._refused[count + 1]
        return Largest(count * self.step, self._fits[count], refused)

    def _try(self, count: int) -> bool:
        """Return whether a count fits, by the compiler."""
        if count in self._fits or count in self._refused:
            return count in self._fits
        value = count * self.step
        with self.progress(f"trying {value}"):
            try:
                workload = self.load_for(value)
                fit = Fit(Target(workload, self.device), self.budget, silent)
                best = fit.best()
            except WorkloadError as error:
                self._refused[count] = str(error)
                return False
        if best is None:
            least = min(t.compiled.peak_bytes for t in fit.tried)
            self._refused[count] = f"{value} takes {least} bytes at the least."
            return False
        self._fits[count] = fit.result(best, self.budget)
        return True

    def _guess(self, start: int) -> int:
        """Return about the largest count that fits, by predictions."""
        known: dict[int, int] = {}
        count = start
        for _ in range(_MOST_GUESSES):
            if count in known:
                break
            peak = self._predicted(count)
            if peak is None:
                count = max(1, count // 2)
                continue
            known[count] = peak
            count = self._following(known, count)
        fitting = [n for n, peak in known.items() if peak <= self.budget]
        return max(fitting, default=1)

    def _following(self, known: dict[int, int], count: int) -> int:
        """Return where a line through two predictions meets the budget."""
        if len(known) < 2:
            return 2 * count if known[count] <= self.budget else max(1, count // 2)
        (one, low), (other, high) = sorted(
            sorted(known.items(), key=lambda item: abs(item[1] - self.budget))[:2]
        )
        slope = (high - low) / (other - one)
        if slope <= 0:
            return 2 * count
        return max(1, math.floor(one + (self.budget - low) / slope))

    def _predicted(self, count: int) -> int | None:
        with self.progress(f"predicting {count * self.step}"):
            try:
                target = Target(self.load_for(count * self.step), self.device)
                return Search(target).least().predicted_bytes
            except WorkloadError:
                return None
