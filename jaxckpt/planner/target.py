"""What is fitted: a whole training step under a plan, predicted and compiled."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jaxckpt.devices import Device, use
from jaxckpt.graph.trace import Graph
from jaxckpt.memory import Prediction
from jaxckpt.memory.predict import predict_step
from jaxckpt.plan import Plan, plan_of
from jaxckpt.rewrite import find_chain
from jaxckpt.rewrite_find import check_names
from jaxckpt.schedule import Schedule, none
from jaxckpt.schedule_tree import Keep
from jaxckpt.training.step import call_loss
from jaxckpt.workload import Workload
from jaxckpt.xla.compile import compile_for
from jaxckpt.xla.measure import trace_loss, whole_step
from jaxckpt.xla.roofline import step_seconds
from jaxckpt.xla.schedule import HOST_COPY

PyTree = Any


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a step.

    Attributes:
        peak_bytes: Device bytes.
        host_bytes: Host bytes.
        step_seconds: By a roofline over the compiled program; None for unknown rates.
        exposed_seconds: The part of it in which the device waits for the host link.
        hidden_seconds: What else the link takes, beside the device's work.
    """

    peak_bytes: int
    host_bytes: int
    step_seconds: float | None
    exposed_seconds: float = 0.0
    hidden_seconds: float = 0.0


class Target:
    """A workload on a device: its step under any plan.

    Args:
        workload: The workload; without optimizer and step of its own, its loss and
            gradients are the step.
        device: What it is planned for.

    Attributes:
        compiles: How many steps were compiled, also where a result was on disk.
        compile_seconds: Time that this took.
    """

    def __init__(self, workload: Workload, device: Device) -> None:
        self.device = device
        self._donated: int | tuple[int, ...] = 0
        if workload.optimizer is None and workload.make_step is None:
            workload = dataclasses.replace(workload, make_step=_value_and_grad)
            self._donated = ()
        self.workload = workload
        self.compiles = 0
        self.compile_seconds = 0.0
        self._started = time.monotonic()
        self._predicted: dict[Any, Prediction] = {}
        self._compiled: dict[Any, Compiled] = {}

    @cached_property
    def graph(self) -> Graph:
        """The loss, traced without a plan."""
        with use(self.device):
            return trace_loss(self.workload)

    @cached_property
    def chain(self) -> Any:
        """The program as a chain, without remat of its own around its stacks.

        Raises:
            PlanError: It has no layers to rematerialise.
        """
        with use(self.device):
            graph = self.graph
            chain = find_chain(graph.fn, graph.args, existing="replace")
        check_names((), chain, f"`{self.workload.name}`")
        return chain

    @property
    def solve_seconds(self) -> float:
        """Time since it was made, without compiling."""
        return time.monotonic() - self._started - self.compile_seconds

    def form(self, plan: Plan) -> str:
        """Return in which form layers run under a plan, as `run_layers` calls it."""
        if plan.form is not None:
            return plan.form
        if not any(stack.scanned for stack in self.chain.stacks):
            return "unrolled"
        pairs = zip(plan.rules, plan.depths, strict=True)
        nodes = [node for (_, rule), depth in pairs for node in rule.nodes(depth)]
        return "scan" if all(isinstance(n, Keep) for n in nodes) else "explicit"

    def plan(
        self, rules: tuple[tuple[str, Schedule], ...], form: str | None = None
    ) -> Plan:
        """Return rules as a plan for this program."""
        found = [self.chain.stack(name) for name, _ in rules]
        return plan_of(dict(rules), found, form)

    def uniform(self, schedule: Schedule, form: str | None = None) -> Plan:
        """Return one schedule for all stacks as a plan."""
        rules = tuple((stack.name, schedule) for stack in self.chain.stacks)
        return self.plan(rules, form)

    def no_remat(self) -> Plan:
        """Return the plan that keeps everything."""
        return self.uniform(none())

    def predict(self, plan: Plan) -> Prediction:
        """Return what the memory model says of the step under a plan."""
        key = plan.rules, plan.form
        if key not in self._predicted:
            with use(self.device):
                step, args = self._step(plan)
                self._predicted[key] = predict_step(
                    step, *args, donate_argnums=self._donated, device=self.device
                )
        return self._predicted[key]

    def compile(self, plan: Plan) -> Compiled:
        """Return what the compiler says of it.

        Raises:
            CompileError: The compiler failed.
        """
        key = plan.rules, plan.form
        if key not in self._compiled:
            self.compiles += 1
            started = time.monotonic()
            try:
                with use(self.device):
                    step, args = self._step(plan)
                    found = compile_for(
                        step, *args, device=self.device, donate_argnums=self._donated
                    )
            finally:
                self.compile_seconds += time.monotonic() - started
            footprint, seconds = found.footprint, self._seconds(found.hlo_text)
            self._compiled[key] = Compiled(
                footprint.peak_bytes, footprint.host_bytes, *seconds
            )
        return self._compiled[key]

    def traced(self, plan: Plan) -> Graph:
        """Return the loss under a plan, traced, for its FLOPs."""
        with use(self.device):
            graph = trace_loss(self._under(plan))
            _ = graph.recompute_flops
        return graph

    def _under(self, plan: Plan) -> Workload:
        loss = plan.apply(self.workload.loss_fn)
        return dataclasses.replace(self.workload, loss_fn=loss)

    def _step(self, plan: Plan) -> tuple[Callable[..., Any], tuple[PyTree, ...]]:
        step, state = whole_step(self._under(plan))
        return step, (state, self.workload.batch)

    def _seconds(self, hlo_text: str) -> tuple[float | None, float, float]:
        """Return seconds of the step, and of the host link: exposed and hidden."""
        if not self.device.has_rates:
            return None, 0.0, 0.0
        found = step_seconds(hlo_text, self.device)
        link = found.host_link_bytes / (self.device.host_link_bytes_per_second or 1)
        exposed = found.by_kind[HOST_COPY]
        return found.total, exposed, max(0.0, link - exposed)


def _value_and_grad(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    def loss(params: PyTree, batch: PyTree) -> Any:
        return call_loss(loss_fn, params, batch, jax.random.key(0))

    return jax.value_and_grad(loss, has_aux=True)
