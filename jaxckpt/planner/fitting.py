"""One search for a plan within a budget: predict, compile, correct.

Plans are found against predicted peaks (`search.py`); the whole step is compiled for
the device; what the compiler says sets the prediction right for the next plan. The
program without remat is a candidate wherever it may fit.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

from jaxckpt.errors import BudgetError, CompileError
from jaxckpt.plan import Plan, rules_text
from jaxckpt.plan_verified import PlanFigures, Verified, argument_shapes
from jaxckpt.planner.remedies import infeasible
from jaxckpt.planner.search import Found, Search
from jaxckpt.planner.target import Compiled, Target
from jaxckpt.progress import Progress
from jaxckpt.xla.compile import XLA_FLAGS_USED, toolchain_versions
from jaxckpt.xla.measure import flag_text

COST_MODEL = "roofline-1"
MOST_COMPILES = 5
_HOPEFUL = 1.15
"""The program without remat is compiled where it is predicted to fit so much more."""
_MARGIN = 0.0015
"""By this share of the budget plans stay below it, by their corrected predictions."""
_EXACT = 0.01
"""Predictions with a larger error are corrected and tried again."""
_FASTER = 0.03
"""A plan is tried without loops where its step is predicted to be so much faster."""
_STEP = 0.01
"""By this share the least feasible budget is lowered until there is no plan."""
_WORTH = 0.002
"""A plan is tried after one that fits where its step is faster by this share."""


@dataclass(frozen=True)
class Tried:
    """A plan that was compiled.

    Attributes:
        found: The plan.
        predicted_bytes: The peak that was predicted just before.
        compiled: What the compiler said.
    """

    found: Found
    predicted_bytes: int
    compiled: Compiled

    @property
    def error(self) -> float:
        """By which share of the compiled peak the prediction missed it."""
        return abs(self.predicted_bytes / self.compiled.peak_bytes - 1)

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "schedule": rules_text(self.found.plan),
            "predicted_peak_bytes": self.predicted_bytes,
            "compiled_peak_bytes": self.compiled.peak_bytes,
            "step_seconds": self.compiled.step_seconds,
        }


@dataclass(frozen=True)
class FitResult:
    """What a search found.

    Attributes:
        plan: The plan, with `verified`.
        form: How its layers run: one of `run_layers`' forms.
        compiled: What the compiler made of it.
        host_budget: Bytes of host memory that it might take.
        tried: All plans that were compiled, in order.
    """

    plan: Plan
    form: str
    compiled: Compiled
    host_budget: int
    tried: tuple[Tried, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the object that `jaxckpt fit --json` prints."""
        verified = self.plan.verified
        assert verified is not None
        return {
            "fits": True,
            "device": verified.device,
            "budget_bytes": verified.budget_bytes,
            "predicted_peak_bytes": verified.predicted.peak_bytes,
            "compiled_peak_bytes": verified.compiled.peak_bytes,
            "host_bytes": verified.host_bytes,
            "host_budget_bytes": self.host_budget,
            "host_link_exposed_seconds": self.compiled.exposed_seconds,
            "host_link_hidden_seconds": self.compiled.hidden_seconds,
            "forward_flops": verified.forward_flops,
            "recompute_flops": verified.recompute_flops,
            "step_seconds": verified.compiled.step_seconds,
            "lower_bound_seconds": verified.lower_bound_seconds,
            "gap": verified.gap,
            "solve_seconds": verified.solve_seconds,
            "compiles": verified.compiles,
            "form": self.form,
            "tried": [tried.as_json() for tried in self.tried],
            "plan": json.loads(self.plan.to_json()),
        }


class Fit:
    """One search for a plan within a budget; the same each time it is made.

    Args:
        target: The step.
        budget_bytes: What it has to fit in.
        host_budget: Bytes of host memory that kept values may take.
        progress: Shows what is done.
        search: Of the target and the host budget, where there is one already.
    """

    def __init__(
        self,
        target: Target,
        budget_bytes: int,
        progress: Progress,
        search: Search | None = None,
        host_budget: int = 0,
    ) -> None:
        self.target = target
        self.budget = budget_bytes
        self.host_budget = host_budget
        self.progress = progress
        self.tried: list[Tried] = []
        self._search = search
        self._ratio = 1.0
        self._failure: CompileError | None = None

    @property
    def search(self) -> Search:
        """The search for plans, made when first asked for."""
        if self._search is None:
            with self.progress("planning"):
                self._search = Search(self.target, self.host_budget)
        return self._search

    def run(self) -> FitResult:
        """Return the fastest plan that fits.

        Raises:
            BudgetError: There is none.
            CompileError: The compiler failed on all that were tried.
        """
        best = self.best()
        if best is None:
            raise self._infeasible() if self.tried else self._compiler_error()
        return self.result(best, self.budget)

    def _compiler_error(self) -> CompileError:
        """Return the compiler's error, where it failed on every plan."""
        assert self._failure is not None
        return self._failure

    def best(self) -> Tried | None:
        """Return the fastest plan that fits, compiled; None where there is none."""
        with self.progress("tracing and planning"):
            plain = self.target.predict(self.target.no_remat())
        if plain.peak_bytes <= _HOPEFUL * self.budget:
            self.compile_plain()
        if self._fitting():
            self._keep_all(plain.step_seconds)
        else:
            self._descend()
        if not self._fitting():
            self._smallest()
        self._other_forms()
        return min(self._fitting(), key=self._order, default=None)

    def compile_plain(self) -> Tried | None:
        """Compile the step without remat; None where the compiler fails on it."""
        plan = self.target.no_remat()
        peak = self.target.predict(plan).peak_bytes
        tried = self.compile(Found(plan, peak, 0.0, 0))
        self._ratio = 1.0  # another form: it says nothing of plans
        return tried

    def result(self, best: Tried, budget_bytes: int) -> FitResult:
        """Return a plan that was compiled as the answer for a budget."""
        if best is not self.tried[-1] and best.found.seconds > 0.0:
            predicted = self._as_the_nearest(best)
            best = dataclasses.replace(best, predicted_bytes=predicted)
        verified = self._verified(best, budget_bytes)
        plan = dataclasses.replace(best.found.plan, verified=verified)
        form = self.target.form(plan)
        return FitResult(plan, form, best.compiled, self.host_budget, tuple(self.tried))

    def _as_the_nearest(self, best: Tried) -> int:
        """Return a plan's prediction, set right by the most alike that was compiled."""
        size = best.found.predicted_bytes
        others = [t for t in self.tried if t is not best and t.found.seconds > 0.0]
        if not others:
            return best.predicted_bytes
        alike = min(others, key=lambda t: abs(t.found.predicted_bytes - size))
        return round(size * alike.compiled.peak_bytes / alike.found.predicted_bytes)

    def _keep_all(self, plain_seconds: float | None) -> None:
        """Compile the plan that keeps what is read, where it may be faster than none.

        Without remat, JAX keeps values too that cost less to have again than to read.
        """
        found = self.search.plan(self.budget)
        if found is None or plain_seconds is None:
            return
        step = self.target.predict(found.plan).step_seconds
        if step is not None and step < plain_seconds * (1 - _WORTH):
            self.compile(found)

    def _order(self, tried: Tried) -> tuple[float, int]:
        seconds = tried.compiled.step_seconds
        known = tried.found.seconds if seconds is None else seconds
        return known, tried.compiled.peak_bytes

    def _fitting(self) -> list[Tried]:
        return [t for t in self.tried if self._fits(t.compiled)]

    def _fits(self, compiled: Compiled) -> bool:
        within = compiled.host_bytes <= self.host_budget or not compiled.host_bytes
        return within and compiled.peak_bytes <= self.budget

    def _descend(self) -> None:
        """Plan, compile and correct until a plan fits and no better one is likely."""
        margin = _MARGIN
        while len(self.tried) < MOST_COMPILES - 1:
            goal = int(self.budget * (1 - margin) / self._ratio)
            with self.progress("planning"):
                found = self.search.plan(goal)
            if found is None or self._corrected(found):
                return
            fitting = self._fitting()
            if fitting and not self._pays(found, min(fitting, key=self._order)):
                return
            tried = self.compile(found)
            if tried is None:
                return
            if tried.compiled.peak_bytes > self.budget:
                margin *= 2

    def _corrected(self, found: Found) -> bool:
        """Set the prediction of a plan right that was compiled already."""
        for number, tried in enumerate(self.tried):
            if tried.found.plan.rules == found.plan.rules:
                predicted = round(found.predicted_bytes * self._ratio)
                self.tried[number] = dataclasses.replace(
                    tried, predicted_bytes=predicted
                )
                return True
        return False

    def _pays(self, found: Found, best: Tried) -> bool:
        """Return whether another plan is worth compiling after the best so far."""
        step = best.compiled.step_seconds
        if step is None:
            return found.seconds < best.found.seconds * (1 - _EXACT)
        return best.found.seconds - found.seconds > _WORTH * step or (
            best.error > _EXACT
        )

    def _other_forms(self) -> None:
        """Compile the best plan without loops, where it fits and is faster by far.

        Loops write what is kept into stacks and read it from there.
        """
        best = min(self._fitting(), key=self._order, default=None)
        if best is None or best.found.plan.form is not None:
            return
        for plan in self.search.without_loops(best.found.plan):
            there = self.target.predict(best.found.plan).step_seconds
            other = self.target.predict(plan)
            if there is None or other.step_seconds is None:
                return
            fits = other.peak_bytes * (1 + _MARGIN) <= self.budget
            if fits and other.step_seconds < (1 - _FASTER) * there:
                found = best.found
                self.compile(Found(plan, other.peak_bytes, found.seconds, found.offset))

    def _smallest(self) -> None:
        """Compile the smallest plans until one fits, and faster ones that may fit."""
        with self.progress("planning for the least memory"):
            smallest = self.search.smallest()
        for found in smallest:
            best = min(self._fitting(), key=self._order, default=None)
            if best is None or self._may_replace(found, best):
                self.compile(found)

    def _may_replace(self, found: Found, best: Tried) -> bool:
        """Return whether a plan is faster than one that fits, and may fit too."""
        corrected = found.predicted_bytes * self._ratio
        return (
            len(self.tried) < MOST_COMPILES
            and corrected <= self.budget * (1 + _MARGIN)
            and self._pays(found, best)
        )

    def compile(self, found: Found) -> Tried | None:
        """Compile a plan; None where the compiler fails on it."""
        predicted = round(found.predicted_bytes * self._ratio)
        number = self.target.compiles + 1
        with self.progress(f"compiling for {self.target.device.name} ({number})"):
            try:
                compiled = self.target.compile(found.plan)
            except CompileError as error:
                self._failure = error
                return None
        tried = Tried(found, predicted, compiled)
        self._ratio = compiled.peak_bytes / found.predicted_bytes
        self.tried.append(tried)
        return tried

    def _verified(self, best: Tried, budget_bytes: int) -> Verified:
        target, plan = self.target, best.found.plan
        graph = target.traced(plan)
        gap, seconds = self._gap(best, budget_bytes), best.compiled.step_seconds
        bound = None if seconds is None or gap is None else seconds / (1 + gap)
        step = target.predict(plan).step_seconds
        versions = toolchain_versions()
        return Verified(
            device=target.device.name,
            budget_bytes=budget_bytes,
            predicted=PlanFigures(best.predicted_bytes, step),
            compiled=PlanFigures(best.compiled.peak_bytes, seconds),
            host_bytes=best.compiled.host_bytes,
            forward_flops=graph.forward_flops,
            recompute_flops=graph.recompute_flops,
            lower_bound_seconds=bound,
            gap=gap,
            solve_seconds=target.solve_seconds,
            compiles=target.compiles,
            argument_shapes=argument_shapes(
                target.workload.params, target.workload.batch
            ),
            versions=tuple((k, v) for k, v in versions.items() if v is not None),
            xla_flags=flag_text(XLA_FLAGS_USED),
            cost_model=COST_MODEL,
        )

    def _gap(self, best: Tried, budget_bytes: int) -> float | None:
        """Return by which share of the least step the plan may be slower, by the model.

        The bound is for the whole budget, so that what the plan leaves free counts.
        """
        found = best.found
        if found.seconds == 0.0:
            return 0.0
        plain = self.target.predict(self.target.no_remat()).step_seconds
        if plain is None or math.isinf(found.seconds):
            return None
        ratio = best.compiled.peak_bytes / found.predicted_bytes
        bound = self.search.bound_seconds(int(budget_bytes / ratio), found)
        return (found.seconds - bound) / (plain + bound)

    def _infeasible(self) -> BudgetError:
        """Return the error, with the least budget that has a plan.

        It is lowered by one in a hundred as long as there still is a plan, so that a
        search within it finds one, and one within less does not.
        """
        least = min(self.tried, key=lambda t: t.compiled.peak_bytes)
        needed = least.compiled.peak_bytes
        while True:
            lower = int(needed * (1 - _STEP))
            if lower <= self.budget:
                break
            within = Fit(
                self.target, lower, self.progress, self.search, self.host_budget
            ).best()
            if within is None:
                break
            least, needed = within, lower
        return infeasible(self.target, least.found.plan, self.budget, needed)
