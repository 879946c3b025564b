"""`predict`: what a training step will hold and cost, without compiling it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import optax

from jaxckpt import _jax
from jaxckpt.devices import Device, get_device, use
from jaxckpt.errors import WorkloadError
from jaxckpt.graph.trace import Graph, trace
from jaxckpt.memory.checks import check_kinds, check_loss, check_trained, positions
from jaxckpt.memory.chip import Chip
from jaxckpt.memory.fuse import fuse
from jaxckpt.memory.lower import lower
from jaxckpt.memory.peak import Moment, find_peak
from jaxckpt.memory.program import Buffer, Program
from jaxckpt.memory.seconds import roofline_seconds
from jaxckpt.plan import Plan
from jaxckpt.training import abstract_state, train_step_fn

PyTree = Any
_MOST_LINES = 12


@dataclass(frozen=True)
class Phase:
    """What a step holds while one of its loops runs.

    Attributes:
        name: Name stack of the loop, as `jvp`s and `transpose`s left out.
        bytes: Device bytes, arguments included.
        working_bytes: Those of them that the loop's body holds.
    """

    name: str
    bytes: int
    working_bytes: int


@dataclass(frozen=True)
class Prediction:
    """A training step as the compiler is expected to make it.

    Attributes:
        peak_bytes: Device bytes of the whole step: argument + output + temp - alias.
        argument_bytes: Arguments, exactly.
        host_bytes: Most bytes in host memory.
        step_seconds: By a roofline over the expected kernels; None where the device's
            rates are not known.
        forward_flops: Matmul FLOPs of one forward pass, where the loss is known.
        recompute_flops: Matmul FLOPs that the backward pass runs again.
        phases: The loops of the step, in order.
        holders: Who holds memory at the peak besides the arguments: (label, bytes of
            one, how many), the largest sum first.
    """

    peak_bytes: int
    argument_bytes: int
    host_bytes: int
    step_seconds: float | None
    forward_flops: int | None
    recompute_flops: int | None
    phases: tuple[Phase, ...]
    holders: tuple[tuple[str, int, int], ...]

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    def __str__(self) -> str:
        """Return the figures and the largest holders, one a line."""
        lines = [f"peak {self.peak_bytes / 2**20:,.2f} MiB, predicted"]
        if self.host_bytes:
            lines.append(f"host {self.host_bytes / 2**20:,.2f} MiB")
        if self.recompute_flops is not None:
            lines.append(f"run again: {self.recompute_flops / 1e12:.4g} TFLOP")
        if self.step_seconds is not None:
            lines.append(f"step: {self.step_seconds * 1e3:,.3g} ms, by a roofline")
        lines.append("held at the peak, MiB:")
        held = [("arguments", self.argument_bytes, 1), *self.holders]
        largest = sorted(held, key=lambda row: -row[1] * row[2])[:_MOST_LINES]
        for label, size, count in largest:
            times = f"{count} x {label}" if count > 1 else label
            lines.append(f"  {size * count / 2**20:12,.2f}  {times}")
        return "\n".join(lines)


def predict(
    graph: Graph,
    plan: Plan | None = None,
    *,
    optimizer: optax.GradientTransformation | None = None,
    device: Device | str = "h100-80gb",
) -> Prediction:
    """Predict the whole training step of a traced loss under a plan.

    The real gradient program is walked: forward, backward and the optimizer's update,
    with donated parameters and optimizer state. `benchmarks/README.md` holds the errors
    against the compiler.

    Args:
        graph: `jaxckpt.trace(loss_fn, params, *batch)`; a scalar loss, or with
            `has_aux=True` the loss and more. The first argument is what is trained.
        plan: What runs again; None for the program as it is.
        optimizer: The optax transformation; None for the gradients alone.
        device: What the step would run on.

    Raises:
        PlanError: The plan does not suit the program.
        WorkloadError: The loss is not a scalar, or is not differentiated by its first
            argument.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import jaxckpt
        >>> def loss(weights, x):
        ...     x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)
        ...     return jnp.mean(x**2)
        >>> weights = jax.ShapeDtypeStruct((16, 128, 128), jnp.float32)
        >>> batch = jax.ShapeDtypeStruct((8192, 128), jnp.float32)
        >>> graph = jaxckpt.trace(loss, weights, batch)
        >>> plain, full = (
        ...     predict(graph, plan, optimizer=optax.sgd(0.1))
        ...     for plan in (None, jaxckpt.plan_from("every(4)", loss, weights, batch))
        ... )
        >>> full.peak_bytes < plain.peak_bytes
        True
    """
    device = get_device(device)
    check_kinds(graph, plan, optimizer)
    if graph.argnums not in (0, (0,), [0]):
        raise WorkloadError(
            f"`argnums={graph.argnums}`: a step trains the first argument of a loss. "
            "Trace it with `argnums=0`."
        )
    fn = graph.fn if plan is None else plan.apply(graph.fn)
    params, *rest = graph.args
    check_trained(params)

    def loss(params: PyTree, rest: Sequence[PyTree]) -> Any:
        return fn(params, *rest)

    with use(device):
        traced = (
            graph if plan is None else trace(fn, *graph.args, has_aux=graph.has_aux)
        )
        check_loss(traced)
        if optimizer is None:
            step: Callable[..., Any] = jax.value_and_grad(loss, has_aux=graph.has_aux)
            state, donated = params, ()
        else:
            step, donated = train_step_fn(loss, optimizer), (0,)
            state = abstract_state(params, optimizer)
        return predict_step(
            step, state, rest, donate_argnums=donated, device=device, loss=traced
        )


def predict_step(
    step: Callable[..., Any],
    *args: PyTree,
    donate_argnums: int | Sequence[int] = (),
    device: Device | str = "h100-80gb",
    loss: Graph | None = None,
) -> Prediction:
    """Predict any step: what compiling `jax.jit(step)` for a device would show.

    Args:
        step: A function of trees of arrays.
        args: Its arguments; arrays may be abstract.
        donate_argnums: Arguments whose memory the results may take.
        device: What it would run on; active while it is traced.
        loss: The traced loss, for the FLOPs.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
        >>> predict_step(lambda x: jnp.sin(x @ x) @ x, x).peak_bytes / 2**20
        12.0
    """
    device = get_device(device)
    chip = Chip.of(device)
    with use(device):
        closed, count = _flat_jaxpr(step, args, donate_argnums)
    program = lower(closed, chip)
    fuse(program, chip)
    aliased = _aliased(closed, program, count)
    walk = find_peak(program, aliased)
    arguments = sum(b.bytes for b in program.inputs if not b.host)
    return Prediction(
        peak_bytes=arguments + walk.worst.bytes,
        argument_bytes=arguments,
        host_bytes=walk.host_bytes + sum(b.bytes for b in program.inputs if b.host),
        step_seconds=roofline_seconds(program, device),
        forward_flops=None if loss is None else loss.forward_flops,
        recompute_flops=None if loss is None else loss.recompute_flops,
        phases=tuple(_phase(moment, arguments) for moment in walk.loops),
        holders=_summed(walk.worst),
    )


def _flat_jaxpr(
    step: Callable[..., Any], args: Sequence[PyTree], donate_argnums: Any
) -> tuple[Any, list[bool]]:
    """Trace a step over flat arguments; and say which of them are donated."""
    chosen = positions(donate_argnums, len(args))
    donated = [i in chosen for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    leaves, tree = jax.tree.flatten(tuple(args))

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(step(*tree.unflatten(leaves)))

    return _jax.without_dead_code(jax.make_jaxpr(flat)(*leaves)), donated


def _aliased(closed: Any, program: Program, donated: Sequence[bool]) -> set[Buffer]:
    """Return the results that take the memory of donated arguments.

    JAX gives each donated argument to the first result of its shape and dtype.
    """
    jaxpr = _jax.open_jaxpr(closed)
    free = [v.aval for v, given in zip(jaxpr.invars, donated, strict=True) if given]
    found = set()
    for variable, buffer in zip(jaxpr.outvars, program.outputs, strict=True):
        aval = variable.aval
        same = (i for i, a in enumerate(free) if _alike(a, aval))
        place = next(same, None)
        if buffer is not None and place is not None:
            del free[place]
            found.add(buffer)
    return found


def _alike(one: Any, other: Any) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _phase(moment: Moment, arguments: int) -> Phase:
    assert moment.at is not None
    name = _jax.scope(moment.at.eqn) or moment.at.primitive
    working = moment.inner.bytes if moment.inner else 0
    return Phase(name, arguments + moment.bytes, working)


def _summed(moment: Moment) -> tuple[tuple[str, int, int], ...]:
    counts: dict[tuple[str, int], int] = {}
    for holder in moment.holders():
        counts[holder] = counts.get(holder, 0) + 1
    rows = [(label, size, count) for (label, size), count in counts.items()]
    return tuple(sorted(rows, key=lambda row: -row[1] * row[2]))
