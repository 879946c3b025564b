"""When two programs are the same: the key by which equal layers are known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxckpt import _jax


def structure_key(closed: Any) -> tuple[Any, ...]:
    """Return a key that programs of equal structure share.

    It holds the operations, their parameters, types and links, the source lines of the
    derivative rules, and how forward rules look traced; not name stacks,
    source lines of operations, or constants.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> one, two = (jax.make_jaxpr(lambda x: x * 2)(jnp.ones(3)) for _ in "ab")
        >>> structure_key(one) == structure_key(two)
        True
    """
    return (str(_jax.open_jaxpr(closed)), *_rules(closed))


def _rules(closed: Any, inside: bool = False) -> Iterator[str]:
    """Yield what tells derivative rules; `inside` a forward rule no other one runs."""
    for eqn in _jax.open_jaxpr(closed).eqns:
        yield from _jax.rule_sources(eqn)
        rule = None if inside else _jax.forward_rule(eqn)
        if rule is not None:
            yield str(rule[0])
            yield from _rules(rule[0], inside=True)
        for inner in _jax.inner_jaxprs(eqn).values():
            yield from _rules(inner, inside)
