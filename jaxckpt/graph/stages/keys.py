"""Keys of operations and programs: equal keys, equal work. Linear in their size.

Two programs are equal where they do the same to what they are given, variables renamed.
Where a slice begins counts as something that they are given.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from jaxckpt import _jax

# A call's name and how it is compiled say nothing about what it computes.
_NO_MEANING = frozenset(
    ("ctx_mesh", "inline", "keep_unused", "donated_invars", "out_trees")
)

MARK = "jaxckpt stage: "
"""Prefix of the names that only say where a stage begins."""

_PARTS = frozenset(("slice", "dynamic_slice"))


class Keys:
    """Numbers for operations and programs, equal for equal ones.

    Args:
        constants: Whether numbers written into the program, names and derivative rules
            count; else operations that differ in nothing else are equal.
    """

    def __init__(self, *, constants: bool) -> None:
        self._constants = constants
        self._numbers: dict[Hashable, int] = {}
        self._of_jaxpr: dict[int, tuple[Any, int]] = {}
        self._in_rule = False

    def operation(self, eqn: Any) -> int:
        """Return the number of an equation, whatever its operands are called."""
        return self._number(self._operation(eqn))

    def program(self, closed: Any) -> int:
        """Return the number of a program, whatever its variables are called."""
        jaxpr = _jax.open_jaxpr(closed)
        if id(jaxpr) not in self._of_jaxpr:
            key = self._number(self._program(jaxpr))
            self._of_jaxpr[id(jaxpr)] = (jaxpr, key)
        return self._of_jaxpr[id(jaxpr)][1]

    def _program(self, jaxpr: Any) -> Hashable:
        places: dict[Any, int] = {}
        for variable in (*jaxpr.constvars, *jaxpr.invars):
            places.setdefault(variable, len(places))
        inputs = tuple(self._aval(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars))
        lines = []
        for eqn in jaxpr.eqns:
            operands = self._links(eqn.invars, places)
            for variable in eqn.outvars:
                places[variable] = len(places)
            lines.append((self.operation(eqn), operands))
        return (inputs, tuple(lines), self._links(jaxpr.outvars, places))

    def _links(self, atoms: Sequence[Any], places: dict[Any, int]) -> Hashable:
        return tuple(None if isinstance(a, _jax.Literal) else places[a] for a in atoms)

    def _operation(self, eqn: Any) -> Hashable:
        if eqn.primitive.name in _PARTS:
            return self._part(eqn)
        params = [
            (key, self._parameter(value))
            for key, value in sorted(eqn.params.items())
            if key not in _NO_MEANING and not (key == "name" and _is_call(eqn))
        ]
        if self._constants:
            params += [("rule", s) for s in _jax.rule_sources(eqn)]
            params += self._forward_rule(eqn)
        inputs = tuple(map(self._atom, eqn.invars))
        outputs = tuple(self._aval(v.aval) for v in eqn.outvars)
        return (eqn.primitive.name, tuple(params), inputs, outputs)

    def _forward_rule(self, eqn: Any) -> list[tuple[str, Hashable]]:
        """Return the key of a forward rule; one that stands in another never runs.

        Most forward rules call the function itself, whose rule they would hold again.
        """
        rule = None if self._in_rule else _jax.forward_rule(eqn)
        if rule is None:
            return []
        self._in_rule = True
        try:
            return [("forward", self.program(rule[0]))]
        finally:
            self._in_rule = False

    def _part(self, eqn: Any) -> Hashable:
        """Return the key of a slice: what it takes a part of, and how much, not where.

        Layers that take their weights from a stack differ in nothing else.
        """
        avals = tuple(self._aval(v.aval) for v in (eqn.invars[0], *eqn.outvars))
        given = tuple(isinstance(v, _jax.Literal) for v in eqn.invars)
        return (eqn.primitive.name, avals, given, eqn.params.get("strides"))

    def _atom(self, atom: Any) -> Hashable:
        aval = self._aval(atom.aval)
        if not isinstance(atom, _jax.Literal):
            return aval
        return ("literal", aval, _value(atom.val) if self._constants else None)

    def _aval(self, aval: Any) -> Hashable:
        return self._number((type(aval).__name__, aval))

    def _parameter(self, value: Any) -> Hashable:
        if _jax.is_jaxpr(value):
            return ("program", self.program(value))
        if isinstance(value, (tuple, list)):
            return tuple(map(self._parameter, value))
        if isinstance(value, dict):
            return tuple((k, self._parameter(v)) for k, v in sorted(value.items()))
        if isinstance(value, str):
            says = self._constants and not value.startswith(MARK)
            return value if says else "text"
        if isinstance(value, np.ndarray):
            return _value(value) if self._constants else value.shape
        return self._other(value)

    def _other(self, value: Any) -> Hashable:
        """Return the key of an object; of functions, only where they were written."""
        inner = getattr(value, "params", None)
        if isinstance(inner, dict):  # an operation of JAX's new remat engine
            name = getattr(value, "name", "") if self._constants else ""
            return (type(value).__name__, name, self._parameter(inner))
        if (info := getattr(value, "debug_info", None)) is not None:
            return ("function", info.func_src_info)
        if isinstance(value, (types.FunctionType, functools.partial)):
            return self._function(value)
        try:
            hash(value)
        except TypeError:
            return repr(value)
        return (type(value).__name__, value)

    def _function(self, value: Any) -> Hashable:
        if isinstance(value, functools.partial):
            held = (value.func, value.args, value.keywords)
            return ("partial", self._parameter(held))
        cells = (cell.cell_contents for cell in value.__closure__ or ())
        held = tuple(map(self._parameter, cells)) if self._constants else ()
        code = value.__code__
        return ("function", value.__qualname__, code.co_filename, code.co_code, held)

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def _is_call(eqn: Any) -> bool:
    return bool(_jax.inner_jaxprs(eqn))


def _value(value: Any) -> Hashable:
    array = np.asarray(value)
    return (str(array.dtype), array.shape, array.tobytes())
