"""`fit`: the fastest plan that fits a byte budget by the compiler's own count.

What is returned fits, or `BudgetError` says what the least is (`fitting.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax

from jaxckpt.devices import Device, get_device
from jaxckpt.errors import PlanError
from jaxckpt.plan import Plan
from jaxckpt.planner.budget import parse_budget, parse_host_budget
from jaxckpt.planner.fitting import Fit, FitResult
from jaxckpt.planner.target import Target
from jaxckpt.progress import Progress, silent
from jaxckpt.workload import Workload

PyTree = Any


def fit(
    loss_fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    *,
    budget: str | int,
    optimizer: optax.GradientTransformation | None = None,
    device: Device | str = "attached",
    mesh: None = None,
    host_budget: str | int | None = None,
    progress: Progress = silent,
) -> Plan:
    """Return the fastest plan whose whole training step fits a byte budget.

    Args:
        loss_fn: `loss_fn(params, batch, rng=None)` returns a loss or `(loss, aux)`.
        params: What is trained; arrays may be abstract.
        batch: One batch; arrays may be abstract.
        budget: Bytes on the device for parameters, gradients, optimizer state and
            activations: `"70GiB"`, or `"90%"` of the device's usable memory.
        optimizer: The optax transformation; None to count loss and gradients alone.
        device: What the step runs on; it may be absent.
        mesh: Not supported yet.
        host_budget: Bytes of host memory that kept values may take; None for none.
        progress: `progress(text)` is entered while a step runs, and says so.

    Returns:
        A plan with `verified`: what was predicted and what the compiler said.

    Raises:
        BudgetError: No plan fits; it says what the least budget is.
        PlanError: The program has no layers to rematerialise.
        DeviceError: The device is unknown, or cannot be compiled for here.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def loss(weights, x):
        ...     x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)
        ...     return jnp.mean(x**2)
        >>> weights = jax.ShapeDtypeStruct((8, 64, 64), jnp.float32)
        >>> batch = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
        >>> plan = fit(loss, weights, batch, budget="16MiB")
        >>> plan.compiled.peak_bytes <= 16 * 2**20
        True
    """
    _check_later(mesh=mesh)
    name = getattr(loss_fn, "__qualname__", type(loss_fn).__name__)
    workload = Workload(name, loss_fn, params, batch, optimizer=optimizer)
    return fit_workload(
        workload,
        budget=budget,
        device=get_device(device),
        host_budget=host_budget,
        progress=progress,
    ).plan


def auto(
    loss_fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    *,
    budget: str | int,
    optimizer: optax.GradientTransformation | None = None,
    device: Device | str = "attached",
) -> Callable[..., Any]:
    """Return a loss function that fits: `fit(...).apply(loss_fn)`; arguments as there.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def loss(weights, x):
        ...     x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)
        ...     return jnp.mean(x**2)
        >>> weights, x = jnp.ones((3, 4, 4)), jnp.ones((2, 4))
        >>> fitted = auto(loss, weights, x, budget="1MiB")
        >>> jax.grad(fitted)(weights, x).shape
        (3, 4, 4)
    """
    plan = fit(
        loss_fn, params, batch, budget=budget, optimizer=optimizer, device=device
    )
    return plan.apply(loss_fn)


def fit_workload(
    workload: Workload,
    *,
    budget: str | int,
    device: Device,
    host_budget: str | int | None = None,
    progress: Progress = silent,
) -> FitResult:
    """Return the fastest plan of a workload that fits a budget, as `fit`."""
    budget_bytes = parse_budget(budget, device)
    host_bytes = 0 if host_budget is None else parse_host_budget(host_budget)
    target = Target(workload, device)
    return Fit(target, budget_bytes, progress, host_budget=host_bytes).run()


def _check_later(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise PlanError(
                f"`{name}={value!r}` is not supported yet. Leave it out: plans are for "
                "one device, and keep or recompute."
            )
