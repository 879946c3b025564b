"""A policy's choice among the values of one layer, checked against what is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from jaxckpt import _jax
from jaxckpt.errors import PolicyError, did_you_mean
from jaxckpt.graph.reads import find_reads
from jaxckpt.graph.structure import structure_key
from jaxckpt.graph.tag import results_read_by_derivatives, tag, tag_names
from jaxckpt.graph.values import ForwardRuleError, Values, find_values
from jaxckpt.policy_algebra import Decision, Everything, Policy, matches

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
    reads = _find_reads(values, closed)
    if check:
        check_patterns(policy, values, reads, where)
    candidates = [v.candidate for v in values.items]
    choice = policy.choose(candidates, values.same_data)
    choice = {i: d for i, d in choice.items() if i in reads}
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
    names = {v.name for v in values.items if v.name is not None}
    read = {v.name for i, v in enumerate(values.items) if v.name and i in reads}
    for pattern in policy.patterns():
        _check_pattern(pattern, names, read, where)
    for pattern in policy.excluded_patterns():
        _check_pattern(pattern, names, names, where)
    for group in policy.optional_patterns():
        if not any(matches(p, name) for p in group for name in read):
            raise PolicyError(
                f"None of the names of `{policy}` ({', '.join(group)}) is on a value "
                f"that the backward pass of {where} reads. Names read there: "
                f"{', '.join(sorted(read)) or '(none)'}."
            )


def _check_pattern(pattern: str, names: set[str], read: set[str], where: str) -> None:
    if any(matches(pattern, name) for name in read):
        return
    if not names:
        raise PolicyError(
            f"`{pattern}` names a value of {where}, but that has no named values. Name "
            "them by `x = jax.ad_checkpoint.checkpoint_name(x, name)`, and use the "
            "result. Values inside a `jax.checkpoint` of its own follow its policy."
        )
    unread = sorted(name for name in names if matches(pattern, name))
    if unread:
        raise PolicyError(
            f"`{pattern}` matches `{', '.join(unread)}` of {where}, which neither its "
            "backward pass nor a recomputation reads: keeping it saves nothing. Name "
            f"the layer's input instead, or use one of: {', '.join(sorted(read))}."
        )
    raise PolicyError(
        f"`{pattern}` matches no named value of {where}. {did_you_mean(pattern, names)}"
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
