"""`explain`: what a program keeps for its backward pass, and what runs again."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

from jaxckpt.devices import Device, use
from jaxckpt.graph.advice import warnings_about
from jaxckpt.graph.regions import Region
from jaxckpt.graph.stages import Chain
from jaxckpt.graph.stages import stages as cut_in_stages
from jaxckpt.graph.trace import Graph
from jaxckpt.graph.values import VIEWS, Value
from jaxckpt.matmul import find_matmul
from jaxckpt.plan_file import PlanFile
from jaxckpt.policy import Policy
from jaxckpt.report.explain_tables import Row, holder_table, kept_rows, kept_table
from jaxckpt.report.tables import rules_said
from jaxckpt.schedule import Schedule, combine
from jaxckpt.schedule_picture import kept_inputs, passes_again
from jaxckpt.schedule_tree import count_forwards
from jaxckpt.workload import Workload
from jaxckpt.xla.compile import compile_for
from jaxckpt.xla.measure import Loaded, load_traced, unused_rule, whole_step
from jaxckpt.xla.peak import Holder, holders


@dataclass(frozen=True)
class Layers:
    """Which layers a schedule rematerialises.

    Attributes:
        schedule: The rule.
        num_layers: The depth of the stack.
    """

    schedule: Schedule
    num_layers: int

    def as_json(self) -> dict[str, Any]:
        """Return what the picture shows, as plain data."""
        nodes = self.schedule.nodes(self.num_layers)
        ends = [(p.start, p.stop - p.unread - 1) for p in passes_again(nodes)]
        return {
            "text": str(self.schedule),
            "num_layers": self.num_layers,
            "kept_inputs": kept_inputs(nodes),
            "runs_again": [[first, last] for first, last in ends if first <= last],
            "layer_forwards": count_forwards(nodes),
        }

    def __str__(self) -> str:
        """Return the picture."""
        return self.schedule.draw(self.num_layers)


@dataclass(frozen=True)
class Peak:
    """Who holds memory when a compiled training step's memory is fullest.

    Attributes:
        device: Name of the device that it was compiled for.
        holders: The largest first; their bytes sum to the peak.
    """

    device: str
    holders: tuple[Holder, ...]

    @property
    def bytes(self) -> int:
        """The footprint's peak."""
        return sum(holder.bytes for holder in self.holders)


class Explanation:
    """What the backward pass of a program reads, by name, bytes and layers.

    Attributes:
        graph: The traced program.
        label: How to call it.
        layers: Which layers are rematerialised, where that is known.
        advice: Notes to begin with.
        peak: Who holds memory in the compiled step, where it was compiled.
        chain: The stages that the program was cut into, where that was asked for.
        plan: The plan file that it follows.
    """

    def __init__(
        self,
        graph: Graph,
        label: str,
        layers: Layers | None = None,
        advice: tuple[str, ...] = (),
        peak: Peak | None = None,
        chain: Chain | None = None,
        plan: PlanFile | None = None,
    ) -> None:
        self.graph = graph
        self.label = label
        self.layers = layers
        self.advice = advice
        self.peak = peak
        self.chain = chain
        self.plan = plan

    def __str__(self) -> str:
        """Return what `render` prints, in 80 columns."""
        console = Console(width=80, file=io.StringIO())
        self.render(console)
        return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def rows(self) -> tuple[Row, ...]:
        """Kept values, the largest first; arguments and views of them left out."""
        return kept_rows(self.graph)

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings, what has no effect, what is passed over, and what is not priced."""
        notes = [*self.advice, *warnings_about(self.graph)]
        for region in self.graph.regions:
            notes += _notes(region)
        notes += _not_priced(self.graph)
        return tuple(dict.fromkeys(notes))

    def as_json(self) -> dict[str, Any]:
        """Return the object that `jaxckpt explain --json` prints.

        It has the keys `plan` and `stacks` where a plan file was given.
        """
        return {
            "workload": self.label,
            "schedule": None if self.layers is None else self.layers.as_json(),
            **_plan_json(self.plan),
            "residual_bytes": self.graph.residual_bytes,
            "forward_flops": self.graph.forward_flops,
            "recompute_flops": self.graph.recompute_flops,
            "residuals": [vars(row) for row in self.rows],
            "regions": [_region_json(region) for region in self.graph.regions],
            "unknown": {name: vars(u) for name, u in self.graph.unknown.items()},
            "holders": self.peak and [h.as_json() for h in self.peak.holders],
            "notes": list(self.notes),
        }

    def render(self, console: Console) -> None:
        """Print the picture, the table and the notes; readable at 80 columns."""
        console.print(f"[bold]{escape(self.label)}[/bold]")
        picture = self.layers if self.plan is None else self.plan.plan
        if picture is not None:
            console.print(str(picture), markup=False, highlight=False)
            console.print()
        if not self.graph.regions:
            console.print("No remat: every residual stays, nothing runs again.")
        for region in self.graph.regions:
            _draw(console, region)
        console.print()
        console.print(kept_table(self.rows))
        console.print()
        console.print(f"kept on the device: {_mib(self.graph.residual_bytes)}")
        forward, again = self.graph.forward_flops, self.graph.recompute_flops
        share = f" ({100 * again / forward:.1f} % of the forward)" if forward else ""
        console.print(f"run again: {again / 1e12:.4g} TFLOP of products{share}")
        if self.chain is not None:
            console.print(f"\n{self.chain}", markup=False, highlight=False)
        if self.peak is not None:
            title = f"who holds memory at the peak on {self.peak.device}"
            console.print(f"\n{title}: {_mib(self.peak.bytes)}\n", highlight=False)
            console.print(holder_table(self.peak.holders))
            console.print()
        for note in self.notes:
            console.print(f"[yellow]note[/yellow] {escape(note)}")


def explain(graph: Graph, label: str = "program") -> Explanation:
    """Explain a traced program (`jaxckpt.trace`).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jaxckpt
        >>> fn = lambda w, x: jnp.sin(jnp.tanh(x @ w) @ w)
        >>> layer = jaxckpt.remat(fn, policy="full")
        >>> w, x = jnp.ones((4, 4)), jnp.ones((2, 4))
        >>> graph = jaxckpt.trace(layer, w, x, argnums=None)
        >>> jaxckpt.explain(graph).as_json()["regions"][0]["recomputed"]
        ['dot_general', 'dot_general']
    """
    if not isinstance(graph, Graph):
        raise TypeError(
            f"`graph={graph!r}` is no traced program. Give `jaxckpt.trace(fn, *args)`."
        )
    return Explanation(graph, label)


def explain_workload(
    load: Callable[[], Workload],
    *,
    policy: Policy | None = None,
    schedule: Schedule | None = None,
    plan: PlanFile | None = None,
    device: Device,
    peak: bool = False,
    stages: bool = False,
) -> Explanation:
    """Explain what a workload function returns, called with the device active.

    Args:
        load: Returns the workload, under its policy, schedule or plan already.
        policy: The policy that it is loaded with, for the report.
        schedule: The schedule that it is loaded with, for the report.
        plan: The plan that it is loaded with, for the report.
        device: What it would run on.
        peak: Whether to compile the training step for the device and say who holds
            memory at its peak.
        stages: Whether to say which stages the program was cut into.
    """
    together = combine(policy, schedule)
    loaded = load_traced(
        load,
        device=device,
        policy=None if policy is None else str(policy),
        schedule=None if schedule is None else str(schedule),
        plan=None if plan is None else plan.path,
    )
    depth = loaded.workload.layers
    given = policy is not None or schedule is not None
    layers = Layers(together, depth) if given and depth is not None else None
    label = f"{loaded.label}, {rules_said(policy, schedule, loaded.plan)}"
    return Explanation(
        loaded.graph,
        label,
        layers,
        unused_rule(loaded),
        _compiled_peak(loaded) if peak else None,
        cut_in_stages(loaded.graph) if stages else None,
        plan,
    )


def _compiled_peak(loaded: Loaded) -> Peak:
    with use(loaded.device) as device:
        step, state = whole_step(loaded.workload)
        compiled = compile_for(
            step,
            state,
            loaded.workload.batch,
            device=device,
            donate_argnums=0,
            peak=True,
        )
        return Peak(device.name, holders(compiled, loaded.graph))


def _draw(console: Console, region: Region, indent: str = "") -> None:
    """Draw a region: `*` kept, `h` on the host, and what runs again, in order."""
    times = (
        f" x {region.times * region.calls}" if region.times * region.calls > 1 else ""
    )
    console.print(f"{indent}remat{times}")
    console.print(f"{indent}  keeps  * its inputs")
    for residual in region.kept:
        mark = "*" if residual.decision == "save" else "h"
        name = escape(residual.label)
        console.print(
            f"{indent}         {mark} {name}  {_mib(residual.bytes)}", highlight=False
        )
    steps = _steps(region)
    if region.inner:
        again = " > ".join([*steps, "what is rematerialised inside it"])
    else:
        again = " > ".join(steps) if steps else "nothing but elementwise work"
    text = f"{indent}  runs again, in order: {again}"
    for line in textwrap.wrap(text, console.width, subsequent_indent=f"{indent}    "):
        console.print(escape(line), highlight=False)
    for inner in region.inner:
        _draw(console, inner, f"{indent}  ")


def _steps(region: Region) -> list[str]:
    """Return the products and named values that are computed again, in order.

    A product and what is added to it before it gets its name are one step. A name
    stands once, also where the region holds several layers.
    """
    steps = [v for v in region.recomputed if _is_step(v)]
    pairs = zip([None, *steps], steps, strict=False)
    labels: list[str] = []
    for before, value in pairs:
        label = _step_label(value)
        again = label in labels and (value.name or value.scope)
        if not again and not _continues(before, value):
            labels.append(label)
    return labels


def _continues(before: Value | None, value: Value) -> bool:
    if before is None or (before.dot and value.dot):
        return False
    return _step_label(before) == _step_label(value)


def _is_step(value: Value) -> bool:
    product = value.dot is not None and value.primitive not in VIEWS
    return product or value.name is not None


def _step_label(value: Value) -> str:
    """Return the name, else the innermost scope (a submodule), else the operation."""
    return value.name or value.scope.rpartition("/")[2] or value.primitive


def _notes(region: Region) -> Iterator[str]:
    unread = sorted(region.names_without_effect)
    if unread:
        yield (
            f"{', '.join(f'`{name}`' for name in unread)}: nothing reads these named "
            "values again, so keeping them would save nothing."
        )
    skipped = sum(v.bytes for v in region.skipped_dots)
    kept = any(find_matmul(r.primitive) for r in region.kept)
    if skipped and (kept or not any(v.dot == "unbatched" for v in region.recomputed)):
        products = ", ".join(sorted({_step_label(v) for v in region.skipped_dots}))
        yield (
            f"{len(region.skipped_dots)} products of batches of matrices ({products}) "
            f"run again, {_mib(skipped)} a layer; `save_dots()` keeps them, "
            "`save_dots(batch_dims=False)` does not."
        )


def _not_priced(graph: Graph) -> Iterator[str]:
    for name, unknown in graph.unknown.items():
        runs = "once" if unknown.times == 1 else f"{unknown.times} times"
        yield (
            f"Not priced: the work of `{name}` is not known. It runs {runs} and moves "
            f"{_mib(unknown.bytes)}; only these bytes count."
        )


def _plan_json(file: PlanFile | None) -> dict[str, Any]:
    if file is None:
        return {}
    rules = zip(file.plan.rules, file.plan.depths, strict=False)
    stacks = {name: Layers(rule, depth).as_json() for (name, rule), depth in rules}
    return {"plan": file.path, "stacks": stacks}


def _region_json(region: Region) -> dict[str, Any]:
    return {
        "times": region.times * region.calls,
        "kept": [r.label for r in region.kept],
        "recomputed": _steps(region),
        "inner": [_region_json(inner) for inner in region.inner],
        "names_without_effect": sorted(region.names_without_effect),
        "skipped_dots": [
            {"name": _step_label(v), "primitive": v.primitive, "bytes": v.bytes}
            for v in region.skipped_dots
        ],
    }


def _mib(amount: int) -> str:
    return f"{amount / 2**20:,.2f} MiB"
