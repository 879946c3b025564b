"""`trace`: what a function computes, keeps and computes again, without running it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jaxckpt import _jax
from jaxckpt.graph.flops import (
    Flops,
    Operation,
    Unknown,
    count_flops,
    equations,
    find_unknown,
    matmul_flops,
    operations,
)
from jaxckpt.graph.gradient import Differentiable, abstract_tree
from jaxckpt.graph.inline import has_remat, without_remat
from jaxckpt.graph.regions import Region, find_regions, layer_loops
from jaxckpt.graph.residuals import Residual, find_residuals
from jaxckpt.graph.values import Value, find_values

PyTree = Any


@dataclass(frozen=True)
class Equation:
    """One operation of the program, inner ones included.

    Attributes:
        primitive: Its name.
        flops: Matmul FLOPs of all its runs; inside `shard_map`, on all devices.
        bytes: Bytes it reads and writes on one device, of all its runs; never 0 of an
            operation that makes something.
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
    residuals come from JAX's own linearisation. Bytes are those of one device (see
    `jaxckpt.graph.sharding` for what is known before compiling).

    Attributes:
        fn: The function that was traced.
        args: Its arguments, abstract, as trees.
        argnums: Which of them are differentiated; None for all that hold floats.
        has_aux: Whether only the first output is differentiated.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Sequence[PyTree],
        argnums: int | Sequence[int] | None = 0,
        has_aux: bool = False,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"`fn={fn!r}` is no function.")
        self.fn = fn
        self.args = abstract_tree(tuple(args))
        self.argnums = argnums
        self.has_aux = has_aux
        self._output_tree: Any = None
        self._split = Differentiable.of(self._recorded, self.args, argnums, has_aux)

    def _recorded(self, *args: PyTree) -> PyTree:
        outputs = self.fn(*args)
        self._output_tree = jax.tree.structure(outputs)
        return outputs

    @cached_property
    def jaxpr(self) -> Any:
        """The closed jaxpr of the function over its flat arguments."""
        return self._split.jaxpr()

    @property
    def outputs(self) -> PyTree:
        """What the function returns, abstract, as a tree."""
        avals = self.jaxpr.out_avals
        return jax.tree.unflatten(self._output_tree, avals)

    @cached_property
    def values(self) -> tuple[Value, ...]:
        """The forward values that could be kept, in the order of the program.

        They are those of `plain`, whose jaxpr their places refer to: what stands inside
        a `jax.checkpoint` or a `jaxckpt.Stack` is listed as without it.
        """
        shardings = self._split.shardings
        plain = self.plain.jaxpr
        return find_values(plain, opaque_rules=True, shardings=shardings).items

    @cached_property
    def equations(self) -> tuple[Equation, ...]:
        """Every operation that runs; inner ones stand for the calls that hold them."""
        return tuple(map(_equation, operations(self.jaxpr)))

    @cached_property
    def unknown(self) -> dict[str, Unknown]:
        """Operations of unknown work by name, most bytes first: their bytes are a cost.

        Custom calls, kernels, callbacks, solvers: what is no product in the list of
        `jaxckpt.matmul`, no elementwise operation, reduction or move of data.
        """
        return find_unknown(_jax.without_dead_code(self.jaxpr))

    @cached_property
    def residuals(self) -> tuple[Residual, ...]:
        """The arrays that the backward pass reads, arguments included and marked."""
        return find_residuals(self._split.linearized())

    @property
    def residual_bytes(self) -> int:
        """Bytes of the residuals on the device, without arguments and views of them."""
        kept = (r for r in self.residuals if r.held and r.decision == "save")
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
        """The same program with each `jax.checkpoint`, and each stack, taken away."""
        if not has_remat(self.jaxpr):
            return self
        run = without_remat(self.jaxpr)

        def fn(*args: PyTree) -> PyTree:
            return jax.tree.unflatten(self._output_tree, run(*jax.tree.leaves(args)))

        return Graph(fn, self.args, self.argnums, self.has_aux)

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
        args: Its arguments; arrays may be abstract (`jax.ShapeDtypeStruct`), and
            sharded.
        argnums: Which arguments are differentiated, as in `jax.grad`; None for all that
            hold floating values.
        has_aux: Whether only the first output is differentiated, as in `jax.grad`.

    Raises:
        TypeError: `fn` is no function.
        WorkloadError: An argument holds something that is no array.
        ValueError: `argnums` names no argument.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> w, x = jnp.ones((8, 8)), jnp.ones((4, 8))
        >>> graph = trace(lambda w, x: jnp.sum(jnp.sin(x @ w)), w, x)
        >>> graph.forward_flops
        512
        >>> [(r.primitive, r.bytes) for r in graph.residuals if not r.argument]
        [('cos', 128)]
    """
    return Graph(fn, args, argnums, has_aux)


def _equation(operation: Operation) -> Equation:
    eqn = operation.equation
    return Equation(
        primitive=eqn.primitive.name,
        flops=operation.flops,
        bytes=operation.bytes,
        times=operation.times,
        name=_jax.bound_name(eqn),
        source=operation.where.source,
        scope=operation.where.scope,
    )
