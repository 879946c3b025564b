"""What `fit` found out about a plan: predicted, compiled, and for which arguments."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


@dataclass(frozen=True)
class PlanFigures:
    """What one training step under a plan takes.

    Attributes:
        peak_bytes: Device bytes of the whole step.
        step_seconds: Time of one step; None where it is not known.
    """

    peak_bytes: int
    step_seconds: float | None


@dataclass(frozen=True)
class ArgumentShapes:
    """Shapes and types of a loss function's arguments.

    Attributes:
        batch: Each array of the batch, as `tokens int32[16,129]`.
        parameters: A hash of the same of all parameters.
    """

    batch: tuple[str, ...]
    parameters: str


@dataclass(frozen=True)
class Verified:
    """What holds for a plan on one device, for arguments of certain shapes.

    Attributes:
        device: What it was compiled for.
        budget_bytes: What the step had to fit in.
        predicted: What the model said last.
        compiled: What the compiler said.
        host_bytes: Host memory of the compiled step.
        forward_flops: Matmul FLOPs of one forward pass.
        recompute_flops: Matmul FLOPs that the backward pass runs again.
        lower_bound_seconds: Less than any plan takes in this budget, by the model; None
            where there is no such bound.
        gap: How far the predicted step lies above that bound, as a share of it.
        solve_seconds: Time that finding the plan took, compiling left out.
        compiles: How many steps were compiled.
        argument_shapes: Of the parameters and the batch.
        versions: Packages and their versions, as `("jax", "0.10.2")`.
        xla_flags: With which it was compiled, as in `XLA_FLAGS`.
        cost_model: Name and version of what predicted the seconds: `roofline-1`.

    Example:
        >>> verified = Verified(
        ...     device="h100-80gb", budget_bytes=70 * 2**30,
        ...     predicted=PlanFigures(66 * 2**30, 1.10),
        ...     compiled=PlanFigures(67 * 2**30, 1.12),
        ...     host_bytes=0, forward_flops=4 * 10**13, recompute_flops=10**13,
        ...     lower_bound_seconds=1.0, gap=0.1, solve_seconds=2.0, compiles=2,
        ...     argument_shapes=ArgumentShapes(("tokens int32[4,4097]",), "1f0c"),
        ...     versions=(("jax", "0.10.2"),), xla_flags="", cost_model="roofline-1")
        >>> print(verified)
        verified on h100-80gb for tokens int32[4,4097], budget 70.00 GiB
          peak      67.00 GiB compiled, 66.00 GiB predicted
          step      1.12 s compiled, 1.1 s predicted; at least 1 s, gap 10.0 %
          products  4e+13 FLOP forward, 25.0 % of it again
    """

    device: str
    budget_bytes: int
    predicted: PlanFigures
    compiled: PlanFigures
    host_bytes: int
    forward_flops: int
    recompute_flops: int
    lower_bound_seconds: float | None
    gap: float | None
    solve_seconds: float
    compiles: int
    argument_shapes: ArgumentShapes
    versions: tuple[tuple[str, str], ...]
    xla_flags: str
    cost_model: str

    def __str__(self) -> str:
        compiled, predicted = self.compiled, self.predicted
        batch = ", ".join(self.argument_shapes.batch) or "no arrays"
        host = f", {_bytes(self.host_bytes)} on the host" if self.host_bytes else ""
        return "\n".join(
            [
                f"verified on {self.device} for {batch}, "
                f"budget {_bytes(self.budget_bytes)}",
                f"  peak      {_bytes(compiled.peak_bytes)} compiled, "
                f"{_bytes(predicted.peak_bytes)} predicted{host}",
                f"  step      {_seconds(compiled.step_seconds)} compiled, "
                f"{_seconds(predicted.step_seconds)} predicted{self._bound()}",
                f"  products  {self.forward_flops:.4g} FLOP forward{self._again()}",
            ]
        )

    def _bound(self) -> str:
        if self.lower_bound_seconds is None:
            return ""
        gap = "" if self.gap is None else f", gap {100 * self.gap:.1f} %"
        return f"; at least {_seconds(self.lower_bound_seconds)}{gap}"

    def _again(self) -> str:
        if not self.forward_flops:
            return ""
        return f", {100 * self.recompute_flops / self.forward_flops:.1f} % of it again"


def argument_shapes(params: PyTree, batch: PyTree) -> ArgumentShapes:
    """Return the shapes of a loss function's arguments; arrays may be abstract.

    Example:
        >>> shape = jax.ShapeDtypeStruct
        >>> argument_shapes([], {"tokens": shape((4, 8), "int32")}).batch
        ('tokens int32[4,8]',)
    """
    parameters = repr(_described(params)).encode()
    return ArgumentShapes(
        _described(batch), hashlib.sha256(parameters).hexdigest()[:16]
    )


def _described(tree: PyTree) -> tuple[str, ...]:
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        size = ",".join(map(str, jnp.shape(leaf)))
        found.append(f"{name} {jnp.result_type(leaf)}[{size}]".strip())
    return tuple(found)


def _bytes(amount: int) -> str:
    if amount < 2**30:
        return f"{amount / 2**20:.2f} MiB"
    return f"{amount / 2**30:.2f} GiB"


def _seconds(amount: float | None) -> str:
    if amount is None:
        return "?"
    return f"{amount:.3g} s" if amount >= 1 else f"{1e3 * amount:.3g} ms"
