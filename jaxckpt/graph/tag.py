"""Names for chosen values: what makes a policy exact.

`tag` returns the same program in which each chosen value carries a name that no other
value carries, also inside `jit`, `scan` and the forward rules of `custom_vjp` calls. A
policy made of those names then keeps exactly the chosen values.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from jaxckpt import _jax
from jaxckpt.graph.results import derivative_reads_result, named_operation
from jaxckpt.graph.values import FORWARD_RULE, Path, Place, Values, opens


def tag_names(values: Values, indices: Iterable[int]) -> dict[int, str]:
    """Return a readable, unique and stable name for each chosen value.

    It is its label (`Value.label`). Of several chosen values that the program gave the
    same name, those from the second on are numbered, in the order of the program.
    """
    used: Counter[str] = Counter()
    names: dict[int, str] = {}
    taken: set[str] = set()
    for index in sorted(indices):
        name = label = values.items[index].label
        while name in taken:
            used[label] += 1
            name = f"{label}#{used[label] + 1}"
        taken.add(name)
        names[index] = name
    return names


def tag(closed: Any, names: Mapping[Place, str]) -> Any:
    """Return the program with the values at the given places named.

    Args:
        closed: A closed jaxpr.
        names: Name by place (`Value.place`). A value that has a name gets this one
            instead; any other value with a name that is in use here loses it.
    """
    taken = frozenset(names.values())

    def insert(eqn: Any, wanted: Mapping[int, str], here: Path) -> list[Any]:
        own = _jax.bound_name(eqn)
        if own is not None:
            name = wanted.get(0, f"{own}~" if own in taken else own)
            return [eqn if name == own else _jax.rename(eqn, name)]
        # A forward rule is not differentiated itself; and JAX's new remat engine does
        # not look into derivative rules.
        derived = FORWARD_RULE not in here and not _jax.remat3_enabled()
        if wanted and derived and derivative_reads_result(eqn):
            return named_operation(eqn, wanted)
        return _followed(eqn, wanted, _jax.name_equation)

    return _Inserter(names, insert).program(closed)


def results_read_by_derivatives(
    closed: Any, names: Mapping[Place, str]
) -> tuple[str, ...]:
    """Return those of the names whose operation's derivative reads its own result."""
    found: list[str] = []

    def look(eqn: Any, wanted: Mapping[int, str], here: Path) -> list[Any]:
        if wanted and FORWARD_RULE not in here and derivative_reads_result(eqn):
            found.extend(wanted.values())
        return [eqn]

    _Inserter(names, look).program(closed)
    return tuple(found)


def mark(closed: Any, numbers: Mapping[Place, int]) -> Any:
    """Return the program with a numbered mark on the values at the given places."""

    def insert(eqn: Any, wanted: Mapping[int, int], here: Path) -> list[Any]:
        return _followed(eqn, wanted, _jax.mark_equation)

    return _Inserter(numbers, insert).program(closed)


def _followed(eqn: Any, wanted: Mapping[int, Any], make: Any) -> list[Any]:
    """Return the equation, and one after it for each wanted output."""
    if not wanted:
        return [eqn]
    outputs = list(eqn.outvars)
    after = []
    for index, label in wanted.items():
        raw = _jax.new_variable(outputs[index])
        after.append(make(raw, outputs[index], label, eqn))
        outputs[index] = raw
    return [eqn.replace(outvars=outputs), *after]


class _Inserter:
    """Walks a program and puts equations behind those at given places."""

    def __init__(self, labels: Mapping[Place, Any], insert: Any) -> None:
        self.labels: dict[Path, dict[int, Any]] = defaultdict(dict)
        for (path, index), label in labels.items():
            self.labels[path][index] = label
        self.insert = insert

    def program(self, closed: Any) -> Any:
        return _jax.with_jaxpr(closed, self.jaxpr(_jax.open_jaxpr(closed), ()))

    def jaxpr(self, jaxpr: Any, path: Path) -> Any:
        equations = []
        for number, eqn in enumerate(jaxpr.eqns):
            here = (*path, number)
            wanted = self.labels.get(here, {})
            equations.extend(self.insert(self._opened(eqn, here), wanted, here))
        if [*map(id, equations)] == [*map(id, jaxpr.eqns)]:
            return jaxpr
        return jaxpr.replace(eqns=equations)

    def _opened(self, eqn: Any, here: Path) -> Any:
        if eqn.primitive.name == "custom_vjp_call":
            if FORWARD_RULE in here:
                return eqn
            inside = (*here, FORWARD_RULE)
            return _jax.with_forward_rule(eqn, lambda j: self.jaxpr(j, inside))
        if not opens(eqn):
            return eqn
        replaced = {}
        for key, inner in _jax.inner_jaxprs(eqn).items():
            jaxpr = _jax.open_jaxpr(inner)
            changed = self.jaxpr(jaxpr, (*here, key))
            if changed is not jaxpr:
                replaced[key] = _jax.with_jaxpr(inner, changed)
        return _jax.replace_inner(eqn, replaced)
