"""Pieces of a program: neighbouring equations as a program of their own."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxckpt import _jax

Flat = list[Any]
Env = MutableMapping[Any, Any]
"""The value of each variable of one jaxpr."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Neighbouring equations of a jaxpr.

    Attributes:
        closed: They alone: what they read of the rest -> what the rest reads of them.
        inputs: Those variables of the jaxpr that they read.
        outputs: Those that they make and that something behind them reads.
    """

    closed: Any
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]

    def run(self, env: Env, fn: Callable[..., Sequence[Any]] | None = None) -> None:
        """Put the outputs into an environment that has the inputs.

        Args:
            env: The environment.
            fn: What to run in place of the equations.
        """
        fn = _jax.jaxpr_function(self.closed) if fn is None else fn
        results = fn(*(env[v] for v in self.inputs))
        env.update(zip(self.outputs, results, strict=True))


class Cutter:
    """Cuts an open jaxpr in pieces.

    Args:
        jaxpr: The jaxpr.
    """

    def __init__(self, jaxpr: Any) -> None:
        self.jaxpr = jaxpr

    @cached_property
    def _last_reads(self) -> dict[Any, int]:
        """The last equation that reads a variable; their number, for a result."""
        last: dict[Any, int] = {}
        for number, eqn in enumerate(self.jaxpr.eqns):
            last.update(dict.fromkeys(_variables(eqn.invars), number))
        count = len(self.jaxpr.eqns)
        return last | dict.fromkeys(_variables(self.jaxpr.outvars), count)

    def cut(self, start: int, stop: int) -> Piece:
        """Return the equations `[start, stop)`."""
        eqns = self.jaxpr.eqns[start:stop]
        inputs: dict[Any, None] = {}
        made: dict[Any, None] = {}
        for eqn in eqns:
            inputs.update((v, None) for v in _variables(eqn.invars) if v not in made)
            made.update((v, None) for v in eqn.outvars if not _jax.is_drop(v))
        outputs = [v for v in made if self._last_reads.get(v, -1) >= stop]
        closed = _jax.cut_jaxpr(self.jaxpr, eqns, inputs, outputs)
        return Piece(closed, tuple(inputs), tuple(outputs))


def _variables(atoms: Sequence[Any]) -> Flat:
    return [v for v in atoms if not isinstance(v, _jax.Literal)]
