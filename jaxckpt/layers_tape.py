"""The tape of one layer: its forward pass with residuals, and the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxckpt import _jax
from jaxckpt.graph.gradient import is_inexact, is_inexact_type
from jaxckpt.layers_body import Flat, LayerFunction, LayerProgram, as_arrays
from jaxckpt.layers_order import depending_on, gradients_in_turn

_REORDERED = frozenset(
    ("convert_element_type", "transpose", "reshape", "squeeze", "expand_dims")
)


@dataclass(frozen=True)
class _Source:
    """Where the backward pass gets a residual from.

    Attributes:
        kind: `"const"` or `"layer"`, an input that is there anyway; `"kept"`;
            `"again"`, worked out from those inputs again; or `"constant"`.
        number: Which one.
    """

    kind: str
    number: int


class Tape:
    """One layer (or segment), traced with `jax.vjp` for what its backward pass reads.

    Of the residuals, those that are parameters or consts are not kept; nor those that
    depend on consts alone, which are the same for all layers; nor a parameter in
    another dtype or order. These take no product to have again.

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
        stacks = [_jax.abstract_array(x, layers) for x in program.inputs[shared:]]
        return cls(fn, [*program.inputs[:shared], *stacks], split, wrt, layers)

    def forward(self, consts: Flat, carry: Flat, layer: Flat) -> tuple[Flat, Flat]:
        """Return the results, and the residuals that have to be kept."""
        run = _jax.jaxpr_function(self._traced.closed)
        values = as_arrays(run(*consts, *carry, *layer))
        residuals = values[self._traced.num_results :]
        return values[: self._traced.num_results], [residuals[i] for i in self._kept]

    @property
    def kept_types(self) -> list[Any]:
        """Types of what `forward` keeps."""
        jaxpr = _jax.open_jaxpr(self._traced.closed)
        residuals = jaxpr.outvars[self._traced.num_results :]
        return [residuals[i].aval for i in self._kept]

    def kept_of_carry(self, carry: Flat) -> Flat:
        """Return what `forward` keeps where that is nothing but the carry."""
        positions = [self._carried[i] for i in self._kept]
        return [carry[i] for i in positions if i is not None]

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
        sources["again"] = self._run_again(consts, layer)
        sources["constant"] = self._constants
        residuals = [sources[s.kind][s.number] for s in self._sources]
        vjp = jax.tree.unflatten(self._traced.vjp_tree, residuals)
        types = [v.aval for v in self._results]
        wanted = [
            _jax.zeros(t) if c is None else c
            for t, c in zip(types, cotangents, strict=True)
            if is_inexact_type(t)
        ]
        backward = jax.make_jaxpr(lambda vjp, wanted: list(vjp(wanted)))(vjp, wanted)
        is_cotangent = [False] * len(residuals) + [True] * len(wanted)
        backward = gradients_in_turn(
            backward, self._gradients_of_parameters, is_cotangent
        )
        return as_arrays(_jax.jaxpr_function(backward)(*residuals, *wanted))

    @property
    def _gradients_of_parameters(self) -> list[bool]:
        """Which results of the backward pass are no cotangents of the carry."""
        first = self._consts + self._carry
        carried = range(self._consts, first)
        return [i not in carried for i, w in enumerate(self._wrt) if w]

    @property
    def _results(self) -> list[Any]:
        jaxpr = _jax.open_jaxpr(self._traced.closed)
        return list(jaxpr.outvars[: self._traced.num_results])

    def _find_sources(self) -> None:
        """Decide for each residual where the backward pass gets it from."""
        jaxpr = _jax.open_jaxpr(self._traced.closed)
        first_layer = self._consts + self._carry
        consts, layer = jaxpr.invars[: self._consts], jaxpr.invars[first_layer:]
        carry = jaxpr.invars[self._consts : first_layer]
        varying = depending_on(jaxpr, [*carry, *layer]) - _same_data_as(jaxpr, layer)
        known = {v: _Source("const", i) for i, v in enumerate(consts)}
        known |= {v: _Source("layer", i) for i, v in enumerate(layer)}
        self._constants: Flat = list(self._traced.closed.consts)
        known |= {v: _Source("constant", i) for i, v in enumerate(jaxpr.constvars)}
        self._kept: list[int] = []
        self._again: list[int] = []
        self._sources: list[_Source] = []
        residuals = jaxpr.outvars[self._traced.num_results :]
        for number, atom in enumerate(residuals):
            if isinstance(atom, _jax.Literal):
                self._constants.append(atom.val)
                self._sources.append(_Source("constant", len(self._constants) - 1))
                continue
            if atom not in known:
                kind, places = "again", self._again
                if atom in varying:
                    kind, places = "kept", self._kept
                known[atom] = _Source(kind, len(places))
                places.append(number)
            self._sources.append(known[atom])
        numbers = {v: i for i, v in enumerate(carry)}
        self._carried = {i: numbers.get(residuals[i]) for i in self._kept}

    def _run_again(self, consts: Flat, layer: Flat) -> Flat:
        """Work out the residuals that consts and parameters give again."""
        if not self._again:
            return []
        count = self._traced.num_results
        total = len(_jax.open_jaxpr(self._traced.closed).outvars)
        wanted = {count + i for i in self._again}
        closed = _jax.select_outputs(
            self._traced.closed, [i in wanted for i in range(total)], effects=False
        )
        shared = self._consts + self._carry
        carry = _jax.open_jaxpr(closed).invars[self._consts : shared]
        unread = [_jax.zeros(v.aval) for v in carry]
        return _jax.jaxpr_function(closed)(*consts, *unread, *layer)


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

    closed = jax.make_jaxpr(forward)(*map(_jax.abstract_array, inputs))
    return _Traced(closed, *found[-1])


def _same_data_as(jaxpr: Any, inputs: Sequence[Any]) -> set[Any]:
    """Return the variables that are some of the inputs, in another dtype or order."""
    found = set(inputs)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in _REORDERED:
            continue
        if not isinstance(eqn.invars[0], _jax.Literal) and eqn.invars[0] in found:
            found.update(eqn.outvars)
    return found
