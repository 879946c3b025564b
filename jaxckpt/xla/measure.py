"""`measure`: what a training step really uses, by the compiler of its device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxckpt.devices import Device, get_device, use
from jaxckpt.errors import WorkloadError
from jaxckpt.graph.advice import warnings_about
from jaxckpt.graph.trace import Graph, trace
from jaxckpt.plan import Plan, rules_text
from jaxckpt.training import TrainState, abstract_state, train_step_fn
from jaxckpt.training.step import call_loss
from jaxckpt.workload import Workload
from jaxckpt.xla.attached import time_step
from jaxckpt.xla.compile import (
    XLA_FLAGS_USED,
    Compilation,
    compile_for,
    toolchain_versions,
)
from jaxckpt.xla.footprint import Footprint
from jaxckpt.xla.peak import Holder, holders
from jaxckpt.xla.roofline import step_seconds

PyTree = Any


@dataclass(frozen=True)
class Measurement:
    """One compiled training step: its memory, work and time.

    Attributes:
        workload: What was measured.
        device: Name of the device that it was compiled for.
        policy: The policy, as text; None where the program says it itself.
        schedule: The schedule, as text; None where none was given.
        footprint: Bytes by category, as XLA counts them.
        forward_flops: Matmul FLOPs of one forward pass.
        recompute_flops: Matmul FLOPs that the backward pass runs again.
        step_seconds: Of one step: measured on an attached device (the median), by a
            roofline over the compiled HLO for an absent one. None where the attached
            device cannot run it (no initial parameters).
        compile_seconds: Time the compiler took.
        attention: Which attention ran, where the model says so.
        scanned: Whether the layers are one scan.
        unpriced: Operations of the HLO whose work is not known, priced by bytes alone.
        warnings: Advice about remat that does nothing, one sentence each.
        holders: Who holds memory at the peak, where that was asked for.
        plan: The file of the plan that it follows; None without one.
    """

    workload: str
    device: str
    policy: str | None
    schedule: str | None
    footprint: Footprint
    forward_flops: int
    recompute_flops: int
    step_seconds: float | None
    compile_seconds: float
    attention: str | None
    scanned: bool
    unpriced: tuple[str, ...]
    warnings: tuple[str, ...]
    holders: tuple[Holder, ...] = ()
    plan: str | None = None

    @property
    def peak_bytes(self) -> int:
        """Device bytes of the whole step: argument + output + temp - alias."""
        return self.footprint.peak_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory that the step uses."""
        return self.footprint.host_bytes

    def as_json(self) -> dict[str, Any]:
        """Return the object that `jaxckpt measure --json` prints.

        It has the key `plan` where a plan file was given.
        """
        plan = {} if self.plan is None else {"plan": self.plan}
        return {
            "workload": self.workload,
            "device": self.device,
            "mesh": None,
            "policy": self.policy,
            "schedule": self.schedule,
            **plan,
            "peak_bytes": self.peak_bytes,
            **dataclasses.asdict(self.footprint),
            "forward_flops": self.forward_flops,
            "recompute_flops": self.recompute_flops,
            "step_seconds": self.step_seconds,
            "compile_seconds": self.compile_seconds,
            "attention": self.attention,
            "scanned": self.scanned,
            "xla_flags": flag_text(XLA_FLAGS_USED),
            "versions": toolchain_versions(),
            "unpriced": list(self.unpriced),
            "warnings": list(self.warnings),
        }


def measure(
    loss_fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    *,
    optimizer: optax.GradientTransformation,
    device: Device | str = "attached",
    plan: Plan | None = None,
    peak: bool = False,
) -> Measurement:
    """Compile the whole training step for a device and say what it uses.

    The step is loss, gradients and the optimizer's update, its state donated. For an
    absent chip the compiler runs in a process of its own and the seconds are a
    roofline's; on the attached device the step is run and timed.

    Args:
        loss_fn: `loss_fn(params, batch, rng=None)` returns a loss or `(loss, aux)`.
        params: Parameters; abstract ones (`jax.ShapeDtypeStruct`) are not run.
        batch: One batch, abstract or not.
        optimizer: The optax transformation.
        device: A chip of `jaxckpt devices`, or `"attached"`.
        plan: What the loss function follows; None for the program as it is.
        peak: Whether to say who holds memory at the peak: the `holders` of the result.

    Raises:
        DeviceError: An unknown device, or one that cannot be compiled for here.
        PlanError: The plan is for another program.
        CompileError: The compiler failed.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import jaxckpt
        >>> loss = lambda params, batch: jnp.mean((batch @ params) ** 2)
        >>> params = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        >>> batch = jax.ShapeDtypeStruct((4, 8), jnp.float32)
        >>> sgd = optax.sgd(0.1)
        >>> found = jaxckpt.measure(loss, params, batch, optimizer=sgd, peak=True)
        >>> found.forward_flops
        512
        >>> [h.name for h in found.holders if h.kind == "argument" and h.bytes > 100]
        ['state.params', 'batch']
        >>> sum(h.bytes for h in found.holders) == found.peak_bytes
        True
    """
    concrete = all(isinstance(x, jax.Array) for x in jax.tree.leaves((params, batch)))
    name = getattr(loss_fn, "__qualname__", type(loss_fn).__name__)
    # Running a step uses up its donated parameters, so it gets a copy.
    copy = jax.tree.map(lambda x: jnp.array(x, copy=True), params) if concrete else None
    workload = Workload(
        name,
        loss_fn if plan is None else plan.apply(loss_fn),
        params,
        batch,
        optimizer=optimizer,
        init=(lambda rng: copy) if concrete else None,
        data=(lambda split: iter([batch])) if concrete else None,
    )
    schedule = None if plan is None else rules_text(plan)
    loaded = load_traced(lambda: workload, device=get_device(device), schedule=schedule)
    return measure_loaded(loaded, peak=peak)


@dataclass(frozen=True)
class Loaded:
    """A workload under its policy and schedule, traced for a device.

    Attributes:
        workload: What the workload function returned.
        graph: Its loss function, traced.
        device: What it was traced for.
        label: How the report calls the workload.
        policy: The policy, as text.
        schedule: The schedule, as text.
        plan: The file of the plan that it follows.
    """

    workload: Workload
    graph: Graph
    device: Device
    label: str
    policy: str | None
    schedule: str | None
    plan: str | None = None


def measure_workload(
    load: Callable[[], Workload],
    *,
    device: Device,
    policy: str | None = None,
    schedule: str | None = None,
    plan: str | None = None,
    label: str | None = None,
) -> Measurement:
    """Measure what a workload function returns: `measure_loaded(load_traced(...))`."""
    loaded = load_traced(
        load, device=device, policy=policy, schedule=schedule, plan=plan, label=label
    )
    return measure_loaded(loaded)


def load_traced(
    load: Callable[[], Workload],
    *,
    device: Device,
    policy: str | None = None,
    schedule: str | None = None,
    plan: str | None = None,
    label: str | None = None,
) -> Loaded:
    """Load and trace a workload: what can go wrong before the compiler runs does here.

    Args:
        load: Returns the workload, under its policy, schedule or plan already.
        device: What it is measured for; active during the call.
        policy: Text of the policy that it is loaded with, for the report.
        schedule: Text of the schedule, for the report.
        plan: The file of the plan that it is loaded with, for the report.
        label: How to call the workload there; its own name by default.

    Raises:
        JaxckptError: The workload refuses its settings, or its policy or schedule does
            not suit it.
    """
    with use(device):
        workload = load()
        graph = trace_loss(workload)
        # Worked out here, while the device is active: models look at it when traced.
        _ = graph.residuals, graph.recompute_flops
    name = label or workload.name
    return Loaded(workload, graph, device, name, policy, schedule, plan)


def measure_loaded(loaded: Loaded, *, peak: bool = False) -> Measurement:
    """Compile the training step of a traced workload, and time it where it can run."""
    workload, graph, device = loaded.workload, loaded.graph, loaded.device
    with use(device):
        step, state = whole_step(workload)
        args = state, workload.batch
        compiled = compile_for(step, *args, device=device, donate_argnums=0, peak=peak)
        seconds, unpriced = _seconds(compiled, workload, device)
        return Measurement(
            workload=loaded.label,
            device=device.name,
            policy=loaded.policy,
            schedule=loaded.schedule,
            footprint=compiled.footprint,
            forward_flops=graph.forward_flops,
            recompute_flops=graph.recompute_flops,
            step_seconds=seconds,
            compile_seconds=compiled.compile_seconds,
            attention=",".join(graph.scopes("attention")) or None,
            scanned=graph.scanned_layers > 1,
            unpriced=unpriced,
            warnings=(
                unused_rule(loaded)
                + warnings_about(graph)
                + _offload_warning(graph, compiled)
            ),
            holders=holders(compiled, graph) if peak else (),
            plan=loaded.plan,
        )


def unused_rule(loaded: Loaded) -> tuple[str, ...]:
    """Say so where a policy or schedule was given and the program has no remat."""
    given = [r for r in (loaded.policy, loaded.schedule) if r not in (None, "none")]
    if not given or loaded.plan or loaded.graph.has_remat:
        return ()
    return (
        f"`{given[0]}` was asked for, and the program rematerialises nothing. Does the "
        "workload function use its `policy` and `schedule`?",
    )


def trace_loss(workload: Workload) -> Graph:
    """Trace a workload's loss as training runs it: with a key if it takes one."""

    def loss(params: PyTree, batch: PyTree, rng: Any) -> Any:
        return call_loss(workload.loss_fn, params, batch, rng)

    return trace(loss, workload.params, workload.batch, jax.random.key(0), has_aux=True)


def whole_step(workload: Workload) -> tuple[Callable[..., Any], PyTree]:
    """Return a workload's training step as a pure function, and its abstract state.

    A step of the user's own (`make_step`) takes and returns the workload's `params`.
    """
    if workload.make_step is not None:
        return workload.make_step(workload.loss_fn), workload.params
    if workload.optimizer is None:
        raise WorkloadError(
            f"`{workload.name}` has neither `optimizer` nor `make_step`, so that there "
            "is no training step to compile. Give one of the two."
        )
    step = train_step_fn(workload.loss_fn, workload.optimizer)
    return step, abstract_state(workload.params, workload.optimizer)


def flag_text(flags: Mapping[str, str]) -> str:
    """Return XLA flags as they stand in the environment variable `XLA_FLAGS`."""
    return " ".join(f"--{name}={value}" for name, value in flags.items())


def _seconds(
    compiled: Compilation, workload: Workload, device: Device
) -> tuple[float | None, tuple[str, ...]]:
    if not device.is_attached:
        seconds = step_seconds(compiled.hlo_text, device)
        return seconds.total, seconds.unknown
    if workload.init is None or workload.optimizer is None:
        return None, ()
    params = workload.init(jax.random.key(0))
    state = TrainState.create(params, workload.optimizer, jax.random.key(1))
    batch = next(iter(workload.data("train"))) if workload.data else _zeros(workload)
    return time_step(compiled, (state, batch), repeats=5).median_seconds, ()


def _offload_warning(graph: Graph, compiled: Compilation) -> tuple[str, ...]:
    """Say so where a policy offloads and the compiled program holds nothing there."""
    offloaded = sum(r.bytes for r in graph.residuals if r.decision == "offload")
    if not offloaded or compiled.footprint.host_bytes:
        return ()
    return (
        f"Offload has no effect on `{compiled.device}`: the policy moves {offloaded} "
        "bytes to host memory, and the compiled program holds none there.",
    )


def _zeros(workload: Workload) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), workload.batch)
