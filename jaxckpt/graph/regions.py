"""Rematerialised regions of a program: what each keeps and what it computes again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from jaxckpt import _jax
from jaxckpt.graph.flops import equations, matmul_flops
from jaxckpt.graph.gradient import Differentiable, struct_of
from jaxckpt.graph.inline import is_stack
from jaxckpt.graph.reads import find_reads, find_recomputed
from jaxckpt.graph.residuals import Residual, find_residuals
from jaxckpt.graph.structure import structure_key
from jaxckpt.graph.values import SAME_DATA, VIEWS, Value, Values, find_values


@dataclass(frozen=True, eq=False)
class Region:
    """One `jax.checkpoint` in a program.

    Attributes:
        body: Closed jaxpr of what it holds.
        policy: JAX's policy callable; None keeps nothing.
        times: How often it runs (lengths of the scans around it).
        calls: How many calls of the same body stand in the program, one after another.
        whole_stack: Whether a scan with products stands inside it over inputs of the
            program as they are: over all layers, not over some.
    """

    body: Any
    policy: Callable[..., Any] | None
    times: int
    calls: int = 1
    whole_stack: bool = False

    @cached_property
    def _values(self) -> Values:
        return find_values(self.body, opaque_rules=True)

    @property
    def _arguments(self) -> list[Any]:
        return [struct_of(v.aval) for v in _jax.open_jaxpr(self.body).invars]

    @cached_property
    def kept(self) -> tuple[Residual, ...]:
        """What it keeps for the backward pass besides its inputs."""
        fn = jax.checkpoint(_jax.jaxpr_function(self.body), policy=self.policy)
        return _kept(fn, self._arguments)

    @cached_property
    def recomputed(self) -> tuple[Value, ...]:
        """What the backward pass computes again, in order; a view's name counts."""
        values = self._values
        indices = sorted(find_recomputed(values, self.body, self.policy))
        return tuple(replace(values.items[i], name=values.name_of(i)) for i in indices)

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the values in it, without those of regions inside it."""
        return frozenset(v.name for v in self._values.items if v.name is not None)

    @cached_property
    def names_without_effect(self) -> frozenset[str]:
        """Names of values that neither backward pass nor a recomputation reads."""
        read = find_reads(self._values, self.body)
        return self.names - {self._values.items[i].name for i in read}

    @cached_property
    def skipped_dots(self) -> tuple[Value, ...]:
        """Products of batches of matrices that are computed again."""
        dots = (v for v in self.recomputed if v.dot == "batched")
        return tuple(v for v in dots if v.primitive not in VIEWS)

    @cached_property
    def transient_bytes(self) -> int:
        """Bytes that the backward pass holds of one run, computed again."""
        return sum(
            r.bytes for r in _kept(_jax.jaxpr_function(self.body), self._arguments)
        )

    @cached_property
    def inner(self) -> tuple[Region, ...]:
        """The rematerialised regions inside it."""
        return find_regions(self.body)


def find_regions(closed: Any) -> tuple[Region, ...]:
    """Return the rematerialised regions, outermost only, equal ones together."""
    found: dict[Any, Region] = {}
    for parameters, times, whole_stack in _remat_calls(closed, 1):
        body = _jax.close_jaxpr(parameters["jaxpr"])
        key = (structure_key(body), parameters["policy"], times)
        known = found.get(key)
        calls = known.calls + 1 if known else 1
        found[key] = Region(body, parameters["policy"], times, calls, whole_stack)
    return tuple(found.values())


def layer_loops(closed: Any) -> Iterator[int]:
    """Yield the lengths of loops over layers.

    They are outermost scans with products over the program's inputs, and the scans of a
    `jaxckpt.Stack`, which may go over parts of them.
    """
    for length, _ in _layer_scans(closed):
        yield length
    for eqn, _ in equations(closed):
        if is_stack(eqn):
            inside = equations(eqn.params["call_jaxpr"])
            yield from (
                e.params["length"] for e, _ in inside if e.primitive.name == "scan"
            )


def _layer_scans(closed: Any) -> Iterator[tuple[int, set[int]]]:
    """Yield length, and which inputs of the program are scanned; {} where unknown."""
    jaxpr = _jax.open_jaxpr(closed)
    position = {v: i for i, v in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        given = [None if _is_literal(v) else position.get(v) for v in eqn.invars]
        if eqn.primitive.name == "scan":
            scanned = given[sum(_jax.scan_counts(eqn)) :]
            found = {i for i in scanned if i is not None}
            if found and matmul_flops(eqn.params["jaxpr"]):
                yield eqn.params["length"], found
        elif eqn.primitive.name != "custom_vjp_call" or is_stack(eqn):
            for inner in _jax.inner_jaxprs(eqn).values():
                takes_same = len(_jax.open_jaxpr(inner).invars) == len(given)
                for length, places in _layer_scans(inner):
                    outer = {given[i] for i in places} if takes_same else set()
                    yield length, {i for i in outer if i is not None}


def _remat_calls(closed: Any, times: int) -> Iterator[tuple[Any, int, bool]]:
    jaxpr = _jax.open_jaxpr(closed)
    inputs = set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        parameters = _jax.remat_parameters(eqn)
        if parameters is not None:
            scanned = (
                eqn.invars[i]
                for _, places in _layer_scans(parameters["jaxpr"])
                for i in places
            )
            yield parameters, times, times == 1 and any(v in inputs for v in scanned)
            continue
        source = eqn.invars[0] if eqn.primitive.name in SAME_DATA else None
        if source is not None and not _is_literal(source) and source in inputs:
            inputs.update(eqn.outvars)  # parameters, cast for the layers
        length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in _jax.inner_jaxprs(eqn).values():
            yield from _remat_calls(inner, times * length)


def _kept(fn: Callable[..., Any], arguments: list[Any]) -> tuple[Residual, ...]:
    split = Differentiable.of(fn, arguments, None)
    return tuple(r for r in find_residuals(split.linearized()) if r.held)


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, _jax.Literal)
