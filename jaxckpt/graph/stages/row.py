"""The row of a program's operations in which layers are looked for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from jaxckpt import _jax
from jaxckpt.graph.stages.keys import Keys
from jaxckpt.graph.stages.program import Program, variables

_NEAR = 1.05


class Row:
    """The equations of a program that are or depend on products, in order.

    Args:
        program: The program.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.numbers = [i for i, free in enumerate(program.sources) if not free]
        self.position = {number: p for p, number in enumerate(self.numbers)}

    @cached_property
    def keys(self) -> list[int]:
        """A number for each equation of the program, equal for equal operations."""
        keys = Keys(constants=False)
        return list(map(keys.operation, self.program.eqns))

    @cached_property
    def _places(self) -> list[int]:
        """The position at which each equation is needed first."""
        places = [len(self.numbers)] * (len(self.program.eqns) + 1)
        for number in reversed(range(len(self.program.eqns))):
            readers = (places[reader] for reader in self.program.readers[number])
            first = min(readers, default=len(self.numbers))
            places[number] = self.position.get(number, first)
        return places

    @cached_property
    def _spans(self) -> list[tuple[int, int, int]]:
        """Between which positions each computed value is alive, and its bytes."""
        program, spans = self.program, []
        for i, eqn in enumerate(program.eqns):
            reads = [self._places[reader] for reader in program.readers[i]]
            alive = [v for v in eqn.outvars if v not in program.arguments]
            size = sum(_jax.nbytes(v.aval) for v in alive if not _jax.is_drop(v))
            if reads and size:
                first = self.position.get(i, min(reads))
                spans.append((first, max(reads), size))
        return spans

    @cached_property
    def _spans_of_arguments(self) -> list[tuple[int, int, int]]:
        """The same of arguments, from where they are read first.

        What the first layer takes may be an argument.
        """
        reads: dict[Any, list[int]] = {}
        for number, eqn in enumerate(self.program.eqns):
            for v in variables(eqn.invars):
                if v in self.program.arguments:
                    reads.setdefault(v, []).append(self._places[number])
        return [(min(p), max(p), _jax.nbytes(v.aval)) for v, p in reads.items()]

    @cached_property
    def crossing(self) -> list[int]:
        """Bytes alive just before each position, those of arguments included."""
        return self._sums([*self._spans, *self._spans_of_arguments])

    @cached_property
    def alive(self) -> list[int]:
        """How many computed values are alive just before each position."""
        return self._sums([(a, b, 1) for a, b, _ in self._spans])

    def _sums(self, spans: Sequence[tuple[int, int, int]]) -> list[int]:
        changes = [0] * (len(self.numbers) + 2)
        for first, last, size in spans:
            changes[first + 1] += size
            changes[last + 1] -= size
        total, sums = 0, []
        for change in changes:
            total += change
            sums.append(total)
        return sums

    def best_offsets(self, lasts: Sequence[int], most: int) -> list[int]:
        """Return how far behind some products the fewest bytes are alive, best first.

        What is nearly as good is among them: a number that a layer computes of its
        result costs nothing.

        Args:
            lasts: Positions of the products.
            most: The farthest that may be.
        """
        sums = [sum(self.crossing[p + i] for p in lasts) for i in range(1, most + 1)]
        near = [(s, i) for i, s in enumerate(sums, 1) if s <= _NEAR * min(sums)]
        return [i for _, i in sorted(near)]
