"""`trace`: what a function computes, keeps and computes again, without running it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxckpt import _jax
from jaxckpt.graph.flops import Flops, count_flops, equations, matmul_flops
from jaxckpt.graph.gradient import Differentiable, without_remat
from jaxckpt.graph.regions import Region, find_regions, layer_loops
from jaxckpt.graph.residuals import Residual, find_residuals
from jaxckpt.graph.values import Value, find_values
from jaxckpt.matmul import find_matmul


@dataclass(frozen=True)
class Equation:
    """One operation of the program, inner ones included.

    Attributes:
        primitive: Its name.
        flops: Matmul FLOPs of all its runs.
        bytes: Bytes it reads and writes, of all its runs.
        times: How often it runs (lengths of the scans around it).
        name: The name given by `checkpoint_name`, where it is one.
        source: `file:line (function)`.
        scope: Name stack.
    """

    primitive: str
    flops: int
    bytes: int
    times: int
    name: str | None
    source: str
    scope: str


class Graph:
    """A traced function: its values, equations, residuals and costs.

    Build one by `trace`. Everything is worked out from jaxprs when first asked for;
    residuals come from JAX's own linearisation.
    """

    def __init__(self, split: Differentiable) -> None:
        self._split = split

    @cached_property
    def jaxpr(self) -> Any:
        """The closed jaxpr of the function over its flat arguments."""
        return self._split.jaxpr()

    @cached_property
    def values(self) -> tuple[Value, ...]:
        """The forward values that could be kept, in the order of the program."""
        return find_values(self.jaxpr).items

    @cached_property
    def equations(self) -> tuple[Equation, ...]:
        """Every operation that runs; inner ones stand for the calls that hold them."""
        return tuple(
            _equation(eqn, times)
            for eqn, times in equations(self.jaxpr)
            if not _jax.inner_jaxprs(eqn)
        )

    @cached_property
    def residuals(self) -> tuple[Residual, ...]:
        """The arrays that the backward pass reads, arguments included and marked."""
        return find_residuals(self._split.linearized())

    @property
    def residual_bytes(self) -> int:
        """Bytes of the residuals on the device, without arguments and views of them."""
        kept = (r for r in self.residuals if not r.argument and r.decision == "save")
        return sum(r.bytes for r in kept)

    @cached_property
    def work(self) -> Flops:
        """Work of the forward pass."""
        return count_flops(_jax.without_dead_code(self.jaxpr))

    @property
    def forward_flops(self) -> int:
        """Matmul FLOPs of the forward pass."""
        return self.work.matmul

    @cached_property
    def gradient_flops(self) -> int:
        """Matmul FLOPs of forward and backward pass, recomputation included."""
        return matmul_flops(_jax.without_dead_code(self._split.gradient()))

    @cached_property
    def recompute_flops(self) -> int:
        """Matmul FLOPs that run again: the gradient's, less those without remat."""
        if not self.has_remat:
            return 0
        return self.gradient_flops - self.plain.gradient_flops

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The `jax.checkpoint`s of the program, equal ones together."""
        return find_regions(self.jaxpr)

    @property
    def has_remat(self) -> bool:
        """Whether the program uses `jax.checkpoint` anywhere."""
        return bool(self.regions)

    @cached_property
    def scanned_layers(self) -> int:
        """Length of the longest loop over layers, 0 where there is none."""
        return max(layer_loops(self.jaxpr), default=0)

    @cached_property
    def plain(self) -> Graph:
        """The same program with each `jax.checkpoint` in it taken away."""
        return Graph(self._split.with_fn(without_remat(self.jaxpr)))

    def scopes(self, prefix: str) -> tuple[str, ...]:
        """Return what stands in brackets in `named_scope("prefix[...]")`, each once."""
        marks = (
            part for e, _ in equations(self.jaxpr) for part in _jax.scope(e).split("/")
        )
        start = f"{prefix}["
        found = (m[len(start) : -1] for m in marks if m.startswith(start))
        return tuple(dict.fromkeys(found))


def trace(
    fn: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] | None = 0,
    has_aux: bool = False,
) -> Graph:
    """Trace a function for what its gradient keeps and costs.

    Args:
        fn: The function; its outputs are arrays or trees of arrays.
        args: Its arguments; arrays may be abstract (`jax.ShapeDtypeStruct`).
        argnums: Which arguments are differentiated, as in `jax.grad`; None for all that
            hold floating values.
        has_aux: Whether only the first output is differentiated, as in `jax.grad`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> w, x = jnp.ones((8, 8)), jnp.ones((4, 8))
        >>> graph = trace(lambda w, x: jnp.sum(jnp.sin(x @ w)), w, x)
        >>> graph.forward_flops
        512
        >>> [(r.primitive, r.bytes) for r in graph.residuals if not r.argument]
        [('cos', 128)]
    """
    return Graph(Differentiable.of(fn, args, argnums, has_aux))


def _equation(eqn: Any, times: int) -> Equation:
    inputs = [v.aval for v in eqn.invars]
    outputs = [v.aval for v in eqn.outvars]
    matmul = find_matmul(eqn.primitive.name)
    return Equation(
        primitive=eqn.primitive.name,
        flops=times * matmul.flops(inputs, outputs, eqn.params) if matmul else 0,
        bytes=times * sum(map(_jax.nbytes, inputs + outputs)),
        times=times,
        name=_jax.bound_name(eqn),
        source=_jax.source_line(eqn),
        scope=_jax.scope(eqn),
    )
