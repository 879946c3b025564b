"""A policy's choice among the values of one layer, checked against what is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxckpt import _jax
from jaxckpt.errors import PolicyError, did_you_mean
from jaxckpt.graph.reads import find_reads
from jaxckpt.graph.structure import structure_key
from jaxckpt.graph.tag import results_read_by_derivatives, tag, tag_names
from jaxckpt.graph.values import ForwardRuleError, Values, find_values
from jaxckpt.policy_algebra import Candidate, Decision, Everything, Policy

_READS: dict[Any, Collection[int]] = {}
_READS_KEPT = 256


@dataclass(frozen=True)
class Chosen:
    """A layer with the chosen values named.

    Attributes:
        closed: The layer's closed jaxpr, tagged.
        saved: Names of the values kept on the device.
        offloaded: Names of the values moved to host memory.
        in_rules: Those of them that are named inside a `custom_vjp` forward rule.
        results: Those of them that an operation's own derivative reads; found only
            where JAX's new remat engine is on.
    """

    closed: Any
    saved: tuple[str, ...]
    offloaded: tuple[str, ...]
    in_rules: tuple[str, ...] = ()
    results: tuple[str, ...] = ()


def choose(closed: Any, policy: Policy, *, where: str, check: bool = True) -> Chosen:
    """Apply a policy to a layer: choose, drop what is the same bytes twice, tag.

    Args:
        closed: Closed jaxpr of the layer.
        policy: The rule.
        where: What to call the layer in an error.
        check: Whether a pattern without effect is an error.

    Raises:
        PolicyError: For a pattern that matches nothing, or only values that nothing
            reads again.
    """
    if isinstance(policy, Everything):
        return Chosen(closed, (), ())
    try:
        values = find_values(closed)
    except ForwardRuleError:
        # No gradient is taken of such a call, or JAX says itself what the rule says.
        return Chosen(closed, (), ())
    if check:
        check_patterns(policy, values, _find_reads(values, closed), where)
    candidates = [v.candidate for v in values.items]
    choice = policy.choose(candidates, values.same_data)
    return choose_values(closed, choice, where=where, values=values)


def choose_values(
    closed: Any,
    choice: Mapping[int, Decision],
    *,
    where: str = "a layer",
    values: Values | None = None,
) -> Chosen:
    """Name chosen values of a layer, whether the program names them or not.

    Left out are values that neither the backward pass nor a recomputation reads, and of
    several views of the same bytes all but one.

    Args:
        closed: Closed jaxpr of the layer.
        choice: Decision by the number of the value in `find_values(closed).items`.
        where: What to call the layer in an error.
        values: `find_values(closed)`, where it is there already.

    Raises:
        PolicyError: A value that the program names is complex.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def layer(w, x):
        ...     return jnp.sin(jnp.sin(x @ w) @ w)
        >>> closed = jax.make_jaxpr(layer)(jnp.ones((4, 4)), jnp.ones((2, 4)))
        >>> [v.primitive for v in find_values(closed).items]
        ['dot_general', 'sin', 'dot_general', 'sin']
        >>> choose_values(closed, {1: Decision.SAVE, 2: Decision.OFFLOAD}).saved
        ('layer/sin',)
    """
    if values is None:
        values = find_values(closed)
    reads = _find_reads(values, closed)
    choice = {
        i: d for i, d in choice.items() if i in reads and d is not Decision.RECOMPUTE
    }
    choice = one_of_each(values, _without_complex(values, choice, where))
    names = tag_names(values, choice)
    places = {values.items[i].place: name for i, name in names.items()}
    tagged = tag(closed, places)

    def of(decision: Decision) -> tuple[str, ...]:
        return tuple(n for i, n in names.items() if choice[i] is decision)

    in_rules = tuple(n for i, n in names.items() if values.items[i].in_rule)
    remat3 = _jax.remat3_enabled()
    results = results_read_by_derivatives(closed, places) if remat3 else ()
    return Chosen(tagged, of(Decision.SAVE), of(Decision.OFFLOAD), in_rules, results)


def _without_complex(
    values: Values, choice: Mapping[int, Decision], where: str
) -> dict[int, Decision]:
    """Drop complex values, which JAX cannot keep: it rounds what it keeps.

    Raises:
        PolicyError: For one that the program names.
    """
    complex_ones = {i for i in choice if values.items[i].dtype.startswith("complex")}
    for index in complex_ones:
        if name := values.items[index].name:
            raise PolicyError(
                f"`{name}` of {where} is complex, and JAX cannot keep complex values "
                "under a policy. Name its real and its imaginary part instead."
            )
    return {i: d for i, d in choice.items() if i not in complex_ones}


def one_of_each(values: Values, choice: Mapping[int, Decision]) -> dict[int, Decision]:
    """Keep one of the values that are views of the same bytes: what they are views of.

    Derivative rules read a value as it was made, before its name (that of `tanh` does,
    and so do `custom_vjp` backward rules): with only the named view kept, the operation
    would run again for them. A view of what is kept is free. The decision of a value
    that the program names goes first.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for index in sorted(choice):
        groups[values.root(index)].append(index)
    kept = {}
    for members in groups.values():
        named = [i for i in members if values.items[i].name is not None]
        first = (named or members)[0]
        kept[values.root(first, own_name=True)] = choice[first]
    return kept


def _find_reads(values: Values, closed: Any) -> Collection[int]:
    """Return what is read; everything, where not all inputs can be differentiated.

    A layer may hold a loop without a gradient that only frozen inputs go through, and
    which inputs are differentiated is not known before JAX does it. Layers of equal
    structure share one answer, since it takes a trace of the gradient to find.
    """
    key = (structure_key(closed), _jax.trace_context())
    if key not in _READS:
        while len(_READS) >= _READS_KEPT:
            del _READS[next(iter(_READS))]
        try:
            _READS[key] = find_reads(values, closed)
        except Exception:
            _READS[key] = range(len(values.items))
    return _READS[key]


def check_patterns(
    policy: Policy, values: Values, reads: Collection[int], where: str
) -> None:
    """Raise `PolicyError` for a name pattern that has no effect."""
    names = _Names(values, reads, where)
    for pattern in policy.patterns():
        names.check(pattern, must_be_read=True)
    for pattern in policy.excluded_patterns():
        names.check(pattern, must_be_read=False)
    for group in policy.optional_patterns():
        if not any(map(names.read_matching, group)):
            raise PolicyError(
                f"None of the names of `{policy}` ({', '.join(group)}) is on a value "
                f"that the backward pass of {where} reads. Names read there: "
                f"{', '.join(sorted(names.read)) or '(none)'}."
            )


class _Names:
    """The names of a layer, those that are read, and what a pattern matches of them."""

    def __init__(self, values: Values, reads: Collection[int], where: str) -> None:
        self.candidates = [v.candidate for v in values.items]
        self.reads = reads
        self.where = where
        self.all = {c.name for c in self.candidates if c.name is not None}
        self.read = {c.name for i, c in self._read if c.name is not None}

    @property
    def _read(self) -> Iterator[tuple[int, Candidate]]:
        return ((i, c) for i, c in enumerate(self.candidates) if i in self.reads)

    def read_matching(self, pattern: str) -> bool:
        """Return whether a pattern matches a value that is read."""
        return any(c.matches(pattern) for _, c in self._read)

    def check(self, pattern: str, *, must_be_read: bool) -> None:
        """Raise `PolicyError` where a pattern has no effect."""
        found = [c for c in self.candidates if c.matches(pattern)]
        if self.read_matching(pattern) or (found and not must_be_read):
            return
        if found:
            unread = sorted({c.name or c.label or "" for c in found})
            raise PolicyError(
                f"`{pattern}` matches `{', '.join(unread)}` of {self.where}, which "
                "neither its backward pass nor a recomputation reads: keeping it saves "
                "nothing. Name the layer's input instead, or use one of: "
                f"{', '.join(sorted(self.read))}."
            )
        if "/" in pattern:
            labels = {c.label for _, c in self._read if c.label is not None}
            raise PolicyError(
                f"`{pattern}` matches no value of {self.where}, named or not. "
                f"{did_you_mean(pattern, labels)}"
            )
        if not self.all:
            raise PolicyError(
                f"`{pattern}` names a value of {self.where}, but that has no named "
                "values. Name them by `x = jax.ad_checkpoint.checkpoint_name(x, "
                "name)`, and use the result. Values inside a `jax.checkpoint` of its "
                "own follow its policy."
            )
        raise PolicyError(
            f"`{pattern}` matches no named value of {self.where}. "
            f"{did_you_mean(pattern, self.all)}"
        )


def refuse_unseen(chosen: Chosen, policy: Policy, where: str) -> None:
    """Raise `PolicyError` where JAX's new remat engine would not see the names."""
    if not _jax.remat3_enabled():
        return
    if _jax.version() < (0, 12):
        raise PolicyError(
            f"JAX_REMAT3 of jax {'.'.join(map(str, _jax.version()))} does not follow "
            "policies of names everywhere. Switch it off, or use jax 0.12 or newer."
        )
    if unseen := chosen.in_rules + chosen.results:
        raise PolicyError(
            f"`{policy}` keeps {', '.join(f'`{n}`' for n in unseen)} of {where}, which "
            "JAX_REMAT3 would compute again in silence: it sees no names inside the "
            "forward rule of a `custom_vjp`, and none on a result that the operation's "
            "own derivative reads (`tanh`, `exp`). Switch JAX_REMAT3 off for it."
        )
