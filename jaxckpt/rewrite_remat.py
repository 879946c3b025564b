"""Remat that a plan takes the place of, told apart from the remat of other parts.

A plan replaces what rematerialises its own stacks, be it around them or in them. A head
or a chunked loss that is rematerialised stays so, as does a stack without a rule.

Which operation came out of which `jax.checkpoint` has to be known when all of them are
taken away and the stacks are found. So each operation carries a mark: the numbers of
the calls around it, outermost first; of such a call, its own is the last. Into the
calls of JAX's new remat engine no mark goes: a plan replaces all of these.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from jaxckpt import _jax
from jaxckpt.errors import PlanError
from jaxckpt.graph.flops import equations
from jaxckpt.graph.inline import is_remat
from jaxckpt.graph.stages import Chain, Stack, stages


def without_own_remat(
    closed: Any, find: Callable[[Chain], tuple[Stack, ...]]
) -> tuple[Chain, tuple[Stack, ...]]:
    """Cut a program in a chain in which other parts keep their remat.

    Args:
        closed: The program as it was traced.
        find: Returns the stacks of a chain that the plan rules.

    Returns:
        The chain, and its stacks that the plan rules.
    """
    marker = _Marker()
    marked = marker.program(closed)
    chain = stages(marked, remat=True)
    found = find(chain)
    owned = _owned(chain, found) | marker.unmarked
    with_others = stages(marked, remat=lambda eqn: owned.issuperset(_own(eqn)))
    # Where the layers are not to be found beside it, the remat of the others goes too.
    with contextlib.suppress(PlanError):
        others = find(with_others)
        if [s.num_layers for s in others] == [s.num_layers for s in found]:
            return with_others, others
    return chain, found


class _Marker:
    """Puts marks into a program; each place gets marks of its own.

    Attributes:
        unmarked: Numbers of the calls whose operations have none.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self.unmarked: set[int] = set()

    def program(self, closed: Any, regions: tuple[int, ...] = ()) -> Any:
        jaxpr = _jax.open_jaxpr(closed)
        eqns = [self._equation(eqn, regions) for eqn in jaxpr.eqns]
        return _jax.with_jaxpr(closed, jaxpr.replace(eqns=eqns))

    def _equation(self, eqn: Any, regions: tuple[int, ...]) -> Any:
        if is_remat(eqn):
            regions = (*regions, next(self._numbers))
        if "_prim" in eqn.params:
            self.unmarked.update(regions[-1:] if is_remat(eqn) else ())
        else:
            inner = _jax.inner_jaxprs(eqn)
            changed = {key: self.program(j, regions) for key, j in inner.items()}
            eqn = _jax.replace_inner(eqn, changed)
        return _jax.with_mark(eqn, regions) if regions else eqn


def _owned(chain: Chain, found: Sequence[Stack]) -> set[int]:
    """Return the rematerialised calls that are around or in the layers of stacks.

    What stands at the edge of a layer may have come from elsewhere, so most counts.
    """
    total = _count(chain.closed)
    inside: Counter[int] = Counter()
    owned: set[int] = set()
    for stage in (stage for stack in found for stage in stack.stages):
        of_layer = _count(stage.body)
        size = sum(1 for _ in equations(stage.body))
        owned |= {region for region, n in of_layer.items() if 2 * n > size}
        inside += of_layer
    return owned | {region for region, n in inside.items() if 2 * n > total[region]}


def _count(closed: Any) -> Counter[int]:
    """Return how many operations came out of each rematerialised call."""
    return Counter(r for eqn, _ in equations(closed) for r in _regions(eqn))


def _regions(eqn: Any) -> tuple[int, ...]:
    return _jax.mark_of(eqn) or ()


def _own(eqn: Any) -> tuple[int, ...]:
    """Return the number of a rematerialised call, where it has one."""
    return _regions(eqn)[-1:]
