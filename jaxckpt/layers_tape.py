"""The tape of one layer: its forward pass with residuals, and the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxckpt import _jax
from jaxckpt.graph.gradient import is_inexact
from jaxckpt.layers_body import Flat, LayerFunction, LayerProgram


@dataclass(frozen=True)
class _Source:
    """Where the backward pass gets a residual from.

    Attributes:
        kind: `"const"` or `"layer"`, an input that is there anyway; `"kept"`;
            `"invariant"`, worked out from the consts again; or `"constant"`.
        number: Which one.
    """

    kind: str
    number: int


class Tape:
    """One layer (or segment), traced with `jax.vjp` for what its backward pass reads.

    Of the residuals, those that are parameters or consts are not kept, nor those that
    depend on consts alone: they are the same for all layers.

    Attributes:
        layers: None for one layer, whose slices have no layer axis; else how many
            layers a segment's slices hold.
    """

    def __init__(
        self,
        fn: LayerFunction,
        inputs: Sequence[Any],
        split: tuple[int, int],
        wrt: tuple[bool, ...],
        layers: int | None,
    ) -> None:
        self.layers = layers
        self._consts, self._carry = split
        self._wrt = wrt
        self._traced = _trace(fn, inputs, split, wrt)
        self._find_sources()

    @classmethod
    def of_layer(
        cls, program: LayerProgram, fn: LayerFunction, wrt: tuple[bool, ...]
    ) -> Tape:
        """Trace one layer."""
        split = program.num_consts, program.num_carry
        return cls(fn, program.inputs, split, wrt, None)

    @classmethod
    def of_segment(
        cls,
        program: LayerProgram,
        fn: LayerFunction,
        wrt: tuple[bool, ...],
        layers: int,
    ) -> Tape:
        """Trace a segment, whose layer inputs are stacks."""
        split = program.num_consts, program.num_carry
        shared = sum(split)
        stacks = [
            jax.ShapeDtypeStruct((layers, *x.shape), x.dtype)
            for x in program.inputs[shared:]
        ]
        return cls(fn, [*program.inputs[:shared], *stacks], split, wrt, layers)

    def forward(self, consts: Flat, carry: Flat, layer: Flat) -> tuple[Flat, Flat]:
        """Return the results, and the residuals that have to be kept."""
        run = _jax.jaxpr_function(self._traced.closed)
        values = run(*consts, *carry, *layer)
        residuals = values[self._traced.num_results :]
        return values[: self._traced.num_results], [residuals[i] for i in self._kept]

    def kept_of_carry(self, carry: Flat) -> Flat:
        """Return what `forward` keeps where that is nothing but the carry."""
        return [carry[self._carried[i]] for i in self._kept]

    def backward(
        self, consts: Flat, layer: Flat, kept: Flat, cotangents: Sequence[Any]
    ) -> Flat:
        """Return the cotangents of the differentiated inputs.

        Args:
            consts: As for `forward`.
            layer: As for `forward`.
            kept: What `forward` kept.
            cotangents: Of each result; None for zero.
        """
        sources = {"const": consts, "layer": layer, "kept": kept}
        sources["invariant"] = self._invariants(consts)
        sources["constant"] = self._constants
        residuals = [sources[s.kind][s.number] for s in self._sources]
        vjp = jax.tree.unflatten(self._traced.vjp_tree, residuals)
        types = [v.aval for v in self._results]
        wanted = [
            jnp.zeros(t.shape, t.dtype) if c is None else c
            for t, c in zip(types, cotangents, strict=True)
            if is_inexact_type(t)
        ]
        return list(vjp(wanted))

    @property
    def _results(self) -> list[Any]:
        jaxpr = _jax.open_jaxpr(self._traced.closed)
        return list(jaxpr.outvars[: self._traced.num_results])

    def _find_sources(self) -> None:
        jaxpr = _jax.open_jaxpr(self._traced.closed)
        residuals = jaxpr.outvars[self._traced.num_results :]
        inputs = {v: i for i, v in enumerate(jaxpr.invars)}
        constants = dict(zip(jaxpr.constvars, self._traced.closed.consts, strict=True))
        varying = _depending_on(jaxpr, jaxpr.invars[self._consts :])
        first_layer = self._consts + self._carry
        self._constants: Flat = []
        self._kept: list[int] = []
        self._carried: dict[int, int] = {}
        self._invariant: list[int] = []
        self._sources: list[_Source] = []
        known: dict[Any, _Source] = {}
        for number, atom in enumerate(residuals):
            if isinstance(atom, _jax.Literal) or atom in constants:
                literal = isinstance(atom, _jax.Literal)
                self._constants.append(atom.val if literal else constants[atom])
                self._sources.append(_Source("constant", len(self._constants) - 1))
                continue
            if atom not in known:
                position = inputs.get(atom)
                if position is not None and position < self._consts:
                    known[atom] = _Source("const", position)
                elif position is not None and position >= first_layer:
                    known[atom] = _Source("layer", position - first_layer)
                elif atom in varying:
                    known[atom] = _Source("kept", len(self._kept))
                    self._kept.append(number)
                    if position is not None:
                        self._carried[number] = position - self._consts
                else:
                    known[atom] = _Source("invariant", len(self._invariant))
                    self._invariant.append(number)
            self._sources.append(known[atom])

    def _invariants(self, consts: Flat) -> Flat:
        """Work out again the residuals that depend on consts alone."""
        if not self._invariant:
            return []
        count = self._traced.num_results
        total = len(_jax.open_jaxpr(self._traced.closed).outvars)
        chosen = {count + i for i in self._invariant}
        closed = _jax.select_outputs(
            self._traced.closed, [i in chosen for i in range(total)]
        )
        inputs = _jax.open_jaxpr(closed).invars[self._consts :]
        unread = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in inputs]
        return _jax.jaxpr_function(closed)(*consts, *unread)


@dataclass(frozen=True)
class _Traced:
    closed: Any
    num_results: int
    vjp_tree: Any


def _trace(
    fn: LayerFunction,
    inputs: Sequence[Any],
    split: tuple[int, int],
    wrt: Sequence[bool],
) -> _Traced:
    """Trace `inputs -> results, residuals` of a function of flat lists."""
    first, second = split[0], sum(split)
    found: list[Any] = []

    def forward(*values: Any) -> Flat:
        def of_chosen(*chosen: Any) -> tuple[Flat, Flat]:
            filled, rest = [], iter(chosen)
            for value, wanted in zip(values, wrt, strict=True):
                filled.append(next(rest) if wanted else value)
            after, outputs = fn(filled[:first], filled[first:second], filled[second:])
            results = [*after, *outputs]
            return [x for x in results if is_inexact(x)], results

        chosen = [x for x, wanted in zip(values, wrt, strict=True) if wanted]
        _, vjp, results = jax.vjp(of_chosen, *chosen, has_aux=True)
        leaves, tree = jax.tree.flatten(vjp)
        found.append((len(results), tree))
        return [*results, *leaves]

    closed = jax.make_jaxpr(forward)(*map(_struct, inputs))
    return _Traced(closed, *found[-1])


def _depending_on(jaxpr: Any, inputs: Sequence[Any]) -> set[Any]:
    """Return the variables of a jaxpr that are worked out from some of its inputs."""
    found = set(inputs)
    for eqn in jaxpr.eqns:
        if any(not isinstance(v, _jax.Literal) and v in found for v in eqn.invars):
            found.update(eqn.outvars)
    return found


def _struct(aval: Any) -> Any:
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=getattr(aval, "sharding", None)
    )


def is_inexact_type(aval: Any) -> bool:
    """Return whether values of a type have a gradient."""
    return jax.dtypes.issubdtype(aval.dtype, jnp.inexact)
