"""Gradient programs of a function, traced: what is kept and what runs again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxckpt.errors import WorkloadError

PyTree = Any


@dataclass(frozen=True)
class Linearized:
    """A function traced together with the residuals of its backward pass.

    Attributes:
        closed: Closed jaxpr of the flat arguments -> outputs, then residuals.
        num_outputs: How many outputs come before the residuals.
        shardings: Of the arguments; None for what is on one device.
    """

    closed: Any
    num_outputs: int
    shardings: tuple[Any, ...]


@dataclass(frozen=True)
class Differentiable:
    """A function of flat arguments, split by what is differentiated.

    Attributes:
        fn: `fn(*leaves) -> list of output leaves`.
        leaves: Abstract argument leaves, in order.
        wrt: Positions of the leaves that are differentiated.
        has_aux: Whether only the first output leaf is differentiated.
    """

    fn: Callable[..., list[Any]]
    leaves: tuple[Any, ...]
    wrt: tuple[int, ...]
    has_aux: bool = False

    @classmethod
    def of(
        cls,
        fn: Callable[..., Any],
        args: Sequence[PyTree],
        argnums: int | Sequence[int] | None,
        has_aux: bool = False,
    ) -> Differentiable:
        """Flatten a function; `argnums=None` differentiates every inexact argument."""
        leaves, tree = jax.tree.flatten(tuple(args))
        chosen = _positions(argnums, len(args))
        wrt, start = [], 0
        for number, argument in enumerate(args):
            stop = start + len(jax.tree.leaves(argument))
            if number in chosen:
                wrt += [i for i in range(start, stop) if is_inexact(leaves[i])]
            start = stop

        def flat(*values: Any) -> list[Any]:
            return jax.tree.leaves(fn(*jax.tree.unflatten(tree, values)))

        return cls(flat, tuple(map(abstract, leaves)), tuple(wrt), has_aux)

    @property
    def shardings(self) -> tuple[Any, ...]:
        """Shardings of the arguments, None for one that has none."""
        return tuple(getattr(leaf, "sharding", None) for leaf in self.leaves)

    def jaxpr(self) -> Any:
        """Trace the function itself."""
        return jax.make_jaxpr(self.fn)(*self.leaves)

    def linearized(self) -> Linearized:
        """Trace the forward pass with its residuals: what `jax.vjp`'s closure holds."""
        count = []

        def forward(*leaves: Any) -> list[Any]:
            outputs, vjp = self._vjp(leaves)
            count.append(len(outputs))
            return [*outputs, *jax.tree.leaves(vjp)]

        closed = jax.make_jaxpr(forward)(*self.leaves)
        return Linearized(closed, count[-1], self.shardings)

    def gradient(self) -> Any:
        """Trace forward and backward pass: outputs, then gradients (of ones)."""

        def both(*leaves: Any) -> list[Any]:
            outputs, vjp = self._vjp(leaves)
            differentiated = self._differentiated(outputs)
            cotangents = [jnp.ones(o.shape, o.dtype) for o in differentiated]
            return [*outputs, *jax.tree.leaves(vjp(cotangents))]

        return jax.make_jaxpr(both)(*self.leaves)

    def _vjp(self, leaves: Sequence[Any]) -> tuple[list[Any], Callable[..., Any]]:
        def of_chosen(*chosen: Any) -> tuple[list[Any], list[Any]]:
            filled = list(leaves)
            for position, value in zip(self.wrt, chosen, strict=True):
                filled[position] = value
            outputs = self.fn(*filled)
            return self._differentiated(outputs), outputs

        chosen = [leaves[i] for i in self.wrt]
        _, vjp, outputs = jax.vjp(of_chosen, *chosen, has_aux=True)
        return outputs, vjp

    def _differentiated(self, outputs: Sequence[Any]) -> list[Any]:
        wanted = outputs[:1] if self.has_aux else outputs
        return [o for o in wanted if is_inexact(o)]


def abstract(leaf: Any) -> Any:
    """Return the shape and dtype of an argument leaf, and its sharding, if any."""
    if isinstance(leaf, (jax.ShapeDtypeStruct, Tracer)):
        return leaf
    return struct_of(jax.typeof(leaf), getattr(leaf, "sharding", None))


def struct_of(aval: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """Return an abstract array of a type."""
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type
    )


def is_inexact(leaf: Any) -> bool:
    """Return whether a leaf has a gradient: floating or complex, not integer or key."""
    return is_inexact_type(jax.typeof(leaf))


def is_inexact_type(aval: Any) -> bool:
    """Return whether values of a type have a gradient."""
    return jax.dtypes.issubdtype(aval.dtype, jnp.inexact)


def abstract_tree(args: PyTree) -> PyTree:
    """Return abstract arrays in the place of arrays.

    Raises:
        WorkloadError: A leaf is no array.
    """

    def leaf(path: Any, value: Any) -> Any:
        try:
            return abstract(value)
        except TypeError as error:
            name = jax.tree_util.keystr(path[1:])
            raise WorkloadError(
                f"Argument {path[0].idx} holds `{value!r}`{name and f' at `{name}`'}, "
                "which is no array. Close over what is none (`functools.partial`), or "
                "take it out (`equinox.partition`, `nnx.split`)."
            ) from error

    return jax.tree_util.tree_map_with_path(leaf, args)


def _positions(argnums: int | Sequence[int] | None, count: int) -> tuple[int, ...]:
    if argnums is None:
        return tuple(range(count))
    chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if wrong := [i for i in chosen if not _is_position(i, count)]:
        raise ValueError(
            f"`argnums={argnums!r}` has {wrong[0]!r}, but the function is given "
            f"{count} arguments{f': 0 to {count - 1}' * (count > 0)}."
        )
    return tuple(i % count for i in chosen)


def _is_position(given: Any, count: int) -> bool:
    return isinstance(given, int) and -count <= given < count
