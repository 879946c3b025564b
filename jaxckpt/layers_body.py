"""One layer of a stack as a program of flat arrays, traced once for every form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxckpt import _jax
from jaxckpt.errors import WorkloadError
from jaxckpt.graph.gradient import is_inexact
from jaxckpt.policy import Policy
from jaxckpt.remat import remat_jaxpr

PyTree = Any
Flat = list[Any]
LayerFunction = Callable[[Flat, Flat, Flat], Any]
"""`(consts, carry, layer) -> (carry, outputs)`, flat lists."""

CARRY_NAME = "layer_input"


@dataclass(frozen=True, eq=False)
class LayerProgram:
    """One layer: `consts, carry, layer -> carry, outputs`, all flat.

    Attributes:
        closed: Its closed jaxpr; what the body closes over comes first.
        num_consts: Number of inputs that are the same for each layer.
        num_carry: Number of arrays carried from layer to layer.
        label: How to call a layer in an error.
    """

    closed: Any
    num_consts: int
    num_carry: int
    label: str
    _functions: dict[Any, LayerFunction] = field(default_factory=dict)

    def under(self, policy: Policy | None, *, prevent_cse: bool) -> LayerFunction:
        """Return the layer as a function, rematerialised under a policy if not None."""
        key = (policy, prevent_cse)
        if key not in self._functions:
            self._functions[key] = self._under(policy, prevent_cse)
        return self._functions[key]

    def _under(self, policy: Policy | None, prevent_cse: bool) -> LayerFunction:
        if policy is None:
            flat = _jax.jaxpr_function(self.closed)
        else:
            flat = remat_jaxpr(
                self.closed, policy, label=self.label, prevent_cse=prevent_cse
            )

        def layer(consts: Any, carry: Any, layer: Any) -> tuple[Flat, Flat]:
            results = as_arrays(flat(*consts, *carry, *layer))
            return results[: self.num_carry], results[self.num_carry :]

        return layer

    @property
    def inputs(self) -> list[Any]:
        """Types of the inputs."""
        return [v.aval for v in _jax.open_jaxpr(self.closed).invars]

    @property
    def results(self) -> list[Any]:
        """Types of the results."""
        return [v.aval for v in _jax.open_jaxpr(self.closed).outvars]


@dataclass(frozen=True)
class TracedBody:
    """A body, traced over one layer's slices.

    Attributes:
        program: The layer.
        consts: The arrays that the body closes over.
        carry: The first layer's carry, flat.
        carry_tree: Structure of the carry.
        output_tree: Structure of a layer's outputs.
        passed_on: For each output leaf, the number of the layer input that it is
            unchanged, or None where the program computes it.
    """

    program: LayerProgram
    consts: Flat
    carry: Flat
    carry_tree: Any
    output_tree: Any
    passed_on: tuple[int | None, ...]


def trace_body(
    body: Callable[..., Any], carry: PyTree, stacked: PyTree, label: str
) -> TracedBody:
    """Trace `body(carry, layer) -> (carry, outputs)` for one layer.

    Raises:
        WorkloadError: The body does not return a pair, or changes the carry's type.
    """
    leaves, carry_tree = jax.tree.flatten(carry)
    leaves = [strong(x) for x in leaves]
    slices, layer_tree = jax.tree.flatten(jax.eval_shape(_first_layer, stacked))
    trees: list[Any] = []

    def flat(*values: Any) -> Flat:
        carried = carry_tree.unflatten(values[: len(leaves)])
        layer = layer_tree.unflatten(values[len(leaves) :])
        after, outputs = _pair(body(carried, layer), label)
        after_leaves, after_tree = jax.tree.flatten(after)
        _check_tree(carry_tree, after_tree, label)
        output_leaves, output_tree = jax.tree.flatten(outputs)
        trees.append(output_tree)
        return [*map(strong, after_leaves), *output_leaves]

    closed = _named_carry(jax.make_jaxpr(flat)(*leaves, *slices), len(leaves))
    closed, consts = _jax.constants_as_inputs(closed)
    first = len(consts)
    _check_types(closed, first, len(leaves), label)
    closed, passed_on = _without_passed_on(closed, first, len(leaves))
    program = LayerProgram(closed, first, len(leaves), label)
    return TracedBody(program, consts, leaves, carry_tree, trees[-1], passed_on)


def as_arrays(results: Sequence[Any]) -> Flat:
    """Return results of a jaxpr as arrays: its literals come as numbers."""
    return [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in results]


def _first_layer(stacked: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[0], stacked)


def strong(leaf: Any) -> Any:
    """Return an array whose type is not weak: a scan's carry must keep its type."""
    leaf = jnp.asarray(leaf)
    if getattr(jax.typeof(leaf), "weak_type", False):
        return lax.convert_element_type(leaf, leaf.dtype)
    return leaf


def _pair(result: Any, label: str) -> tuple[PyTree, PyTree]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise WorkloadError(
            f"{label} returned `{type(result).__name__}`. The body of a stack returns "
            "a pair: the next carry, and the layer's outputs or None."
        )
    return result


def _check_tree(before: Any, after: Any, label: str) -> None:
    if before != after:
        raise WorkloadError(
            f"{label} changes the structure of the carry from `{before}` to `{after}`. "
            "Each layer must return what the next one takes."
        )


def _check_types(closed: Any, first: int, count: int, label: str) -> None:
    jaxpr = _jax.open_jaxpr(closed)
    before = [v.aval for v in jaxpr.invars[first : first + count]]
    after = [v.aval for v in jaxpr.outvars[:count]]
    for one, other in zip(before, after, strict=True):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            raise WorkloadError(
                f"{label} changes the type of the carry from `{one.str_short()}` to "
                f"`{other.str_short()}`. Each layer must return what the next one "
                "takes; cast or project inside the layer."
            )


def _named_carry(closed: Any, count: int) -> Any:
    """Name the carry at the top of a body that does not do it itself.

    A name on what a scan's body returns has no effect; at the top it has.
    """
    jaxpr = _jax.open_jaxpr(closed)
    carries = jaxpr.invars[:count]
    names = (e for e in jaxpr.eqns if _jax.bound_name(e) is not None)
    named = [e.invars[0] for e in names]
    if any(v is x for v in carries for x in named):
        return closed
    flat = _jax.jaxpr_function(closed)

    def with_names(*values: Any) -> Flat:
        carry = [
            checkpoint_name(x, CARRY_NAME) if is_inexact(x) else x
            for x in values[:count]
        ]
        return flat(*carry, *values[count:])

    inputs = [_jax.abstract_array(v.aval) for v in jaxpr.invars]
    return jax.make_jaxpr(with_names)(*inputs)


def _without_passed_on(
    closed: Any, first: int, count: int
) -> tuple[Any, tuple[int | None, ...]]:
    """Drop outputs that are a layer's own inputs: stacking them would copy them."""
    jaxpr = _jax.open_jaxpr(closed)
    layer = {v: i for i, v in enumerate(jaxpr.invars[first + count :])}
    outputs = jaxpr.outvars[count:]
    passed = tuple(
        None if isinstance(v, _jax.Literal) else layer.get(v) for v in outputs
    )
    wanted = [True] * count + [p is None for p in passed]
    return _jax.select_outputs(closed, wanted), passed
