"""The stages of a chain that the host drives, each compiled for itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxckpt import _jax
from jaxckpt.executor.program import StageProgram, TracedChain
from jaxckpt.graph.gradient import is_inexact_type
from jaxckpt.layers_body import Flat
from jaxckpt.layers_tape import Tape
from jaxckpt.policy import Policy


@dataclass(frozen=True)
class ChainPrograms:
    """A traced chain without its arrays, and the compiled functions of its stages.

    Attributes:
        chain: The chain; abstract arrays stand for x0 and the shared arrays.
        wrt_consts: Which of the chain's `consts` are differentiated.
    """

    chain: TracedChain
    wrt_consts: tuple[bool, ...]
    _compiled: dict[Any, Any] = field(default_factory=dict)

    def forward(self, index: int) -> Any:
        """Return `forward(consts, state, layer) -> results`, compiled."""
        program = self.chain.programs[index]
        if program not in self._compiled:
            run = _jax.jaxpr_function(program.closed)
            self._compiled[program] = jax.jit(lambda c, s, p: run(*c, *s, *p))
        return self._compiled[program]

    def taped(self, index: int, policy: Policy, wrt: tuple[bool, ...]) -> TapedStage:
        """Return a stage's tape, compiled.

        Args:
            index: The stage.
            policy: What is kept.
            wrt: Which of its parameters are differentiated.
        """
        program = self.chain.programs[index]
        key = program, policy, wrt
        if key not in self._compiled:
            tape = program.tape(policy, self.wrt_consts, wrt)
            self._compiled[key] = TapedStage(program, tape)
        return self._compiled[key]


class TapedStage:
    """A stage's forward run that leaves a tape, and its backward run, compiled.

    Parameters, shared arrays and what is read of the input are not among the results
    of the forward run: a compiled function would return copies.
    """

    def __init__(self, program: StageProgram, tape: Tape) -> None:
        self._tape = tape
        self._passed_on: list[int | None] = []
        self._forward = jax.jit(self._run_forward)
        # The cotangent of the result gives its buffer to that of the input.
        same = _types(program.state) == _types(program.results[: program.num_after])
        self._backward = jax.jit(self._run_backward, donate_argnums=3 if same else ())

    def forward(self, consts: Flat, state: Flat, layer: Flat) -> tuple[Flat, Flat]:
        """Return the results and the tape."""
        results, made = self._forward(consts, state, layer)
        rest = iter(made)
        return results, [next(rest) if p is None else state[p] for p in self._passed_on]

    def backward(
        self, consts: Flat, layer: Flat, kept: Flat, flow: Flat, d_aux: Flat
    ) -> Flat:
        """Return the cotangents of consts, state and parameters; `flow` is used up."""
        return self._backward(consts, layer, kept, flow, d_aux)

    def _run_forward(self, consts: Flat, state: Flat, layer: Flat) -> tuple[Flat, Flat]:
        results, kept = self._tape.forward(consts, state, layer)
        self._passed_on = [_position(state, value) for value in kept]
        made = zip(kept, self._passed_on, strict=True)
        return results, [value for value, position in made if position is None]

    def _run_backward(
        self, consts: Flat, layer: Flat, kept: Flat, flow: Flat, d_aux: Flat
    ) -> Flat:
        return self._tape.backward(consts, layer, kept, [*flow, *d_aux])


def _position(state: Flat, value: Any) -> int | None:
    return next((i for i, x in enumerate(state) if x is value), None)


def _types(avals: Sequence[Any]) -> list[tuple[Any, Any]]:
    types = [(t.shape, str(t.dtype)) for t in avals if is_inexact_type(t)]
    return sorted(types)
