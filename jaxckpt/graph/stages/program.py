"""What one jaxpr says about its own equations: links, work, and what is a parameter."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from jaxckpt import _jax
from jaxckpt.graph.flops import matmul_flops
from jaxckpt.graph.values import VIEWS
from jaxckpt.matmul import find_matmul

# Parts of an argument, and how it is cast, are the argument.
_PARTS = VIEWS | frozenset(
    ("slice", "split", "dynamic_slice", "convert_element_type", "sharding_constraint")
    + ("broadcast_in_dim", "reshard", "device_put")
)


class Program:
    """An open jaxpr with the links between its equations.

    Equations go by their number.

    Args:
        jaxpr: An open jaxpr.
    """

    def __init__(self, jaxpr: Any) -> None:
        self.jaxpr = jaxpr
        self.eqns = list(jaxpr.eqns)
        self._flops_of_inner: dict[Any, tuple[Any, int]] = {}

    @cached_property
    def maker(self) -> dict[Any, int]:
        """The equation that makes a variable."""
        return {
            v: i
            for i, eqn in enumerate(self.eqns)
            for v in eqn.outvars
            if not _jax.is_drop(v)
        }

    @cached_property
    def readers(self) -> list[list[int]]:
        """The equations that read what an equation makes; their number for a result."""
        found: list[list[int]] = [[] for _ in self.eqns]
        for i, eqn in enumerate(self.eqns):
            for v in variables(eqn.invars):
                if v in self.maker:
                    found[self.maker[v]].append(i)
        for v in variables(self.jaxpr.outvars):
            if v in self.maker:
                found[self.maker[v]].append(len(self.eqns))
        return found

    def makers(self, number: int) -> list[int]:
        """Return the equations that make what an equation reads."""
        read = variables(self.eqns[number].invars)
        return [self.maker[v] for v in read if v in self.maker]

    @cached_property
    def flops(self) -> list[int]:
        """Matmul FLOPs of each equation, those inside it included."""
        return list(map(self._flops, self.eqns))

    @cached_property
    def products(self) -> list[int]:
        """The equations that are products, or hold some."""
        return [i for i, flops in enumerate(self.flops) if flops]

    @cached_property
    def sources(self) -> list[bool]:
        """Whether an equation depends on the program's inputs without any product.

        One with an effect does not count: it keeps its turn.
        """
        found: list[bool] = []
        for i, eqn in enumerate(self.eqns):
            free = not self.flops[i] and not eqn.effects
            found.append(free and all(found[j] for j in self.makers(i)))
        return found

    @cached_property
    def constants(self) -> set[Any]:
        """The variables that no input of the program leads to."""
        found = set(self.jaxpr.constvars)
        for eqn in self.eqns:
            if not eqn.effects and all(v in found for v in variables(eqn.invars)):
                found.update(eqn.outvars)
        return found

    @cached_property
    def arguments(self) -> set[Any]:
        """The inputs, and the variables that are one of them, cast or in part."""
        found = {*self.jaxpr.invars, *self.jaxpr.constvars}
        for eqn in self.eqns:
            read = variables(eqn.invars)
            if eqn.primitive.name in _PARTS and read and all(v in found for v in read):
                found.update(eqn.outvars)
        return found

    def ancestors(self, variable: Any) -> set[int]:
        """Return the equations that a variable depends on."""
        found: set[int] = set()
        queue = [self.maker[variable]] if variable in self.maker else []
        while queue:
            number = queue.pop()
            if number not in found:
                found.add(number)
                queue += self.makers(number)
        return found

    def _flops(self, eqn: Any) -> int:
        if find_matmul(eqn.primitive.name) is None and not _jax.inner_jaxprs(eqn):
            return 0
        inner = tuple(_jax.inner_jaxprs(eqn).values())
        alone = _jax.cut_jaxpr(self.jaxpr, [eqn], (), ())
        if not inner:
            return matmul_flops(alone)
        key = (*map(id, inner), eqn.params.get("length"))
        if key not in self._flops_of_inner:
            self._flops_of_inner[key] = (inner, matmul_flops(alone))
        return self._flops_of_inner[key][1]


def variables(atoms: Any) -> list[Any]:
    """Return the variables among the operands of an equation."""
    return [v for v in atoms if not isinstance(v, _jax.Literal)]
