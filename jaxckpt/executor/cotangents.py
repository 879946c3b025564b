"""The cotangents that a backward pass begins with, checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxckpt.errors import WorkloadError
from jaxckpt.executor.program import StageProgram, TracedChain
from jaxckpt.graph.gradient import is_inexact_type
from jaxckpt.layers_body import Flat

PyTree = Any


def given_cotangents(
    chain: TracedChain, cotangent: PyTree, aux_cotangents: Sequence[PyTree] | None
) -> tuple[Flat, list[Flat]]:
    """Return the cotangents of a chain's result, and of each stage's aux, flat.

    Those of the result are copies, whose buffers may be reused.

    Args:
        chain: The chain.
        cotangent: Of the result; None is 1 for a scalar.
        aux_cotangents: Of each stage's aux; None for zeros, of all or of a stage's.

    Raises:
        WorkloadError: One is of another structure, shape or dtype.
    """
    last = chain.programs[-1]
    types = last.results[: last.num_after]
    flow = _leaves(cotangent, chain.result_tree, types, "`cotangent`")
    return flow, _of_aux(chain.programs, aux_cotangents)


def _of_aux(programs: Sequence[StageProgram], given: Any) -> list[Flat]:
    trees = [None] * len(programs) if given is None else list(given)
    if len(trees) != len(programs):
        raise WorkloadError(
            f"`aux_cotangents` has {len(trees)} items, and the chain {len(programs)} "
            "stages. Give one for each stage; None for zeros."
        )
    found = []
    for number, (tree, program) in enumerate(zip(trees, programs, strict=True)):
        types = program.results[program.num_after :]
        name = f"`aux_cotangents[{number}]`"
        zeros = [None] * len(types)
        is_zero = tree is None
        found.append(zeros if is_zero else _leaves(tree, program.aux_tree, types, name))
    return found


def _leaves(given: PyTree, tree: Any, types: Sequence[Any], name: str) -> Flat:
    wanted = [is_inexact_type(t) for t in types]
    if given is None and any(wanted):
        return _ones(types, name, tree)
    leaves, structure = jax.tree.flatten(given, is_leaf=lambda x: x is None)
    if structure != tree:
        raise WorkloadError(
            f"`{structure}` is the structure of {name}, and `{tree}` that of the "
            "result. Give a cotangent for each array, and None for integers."
        )
    for leaf, aval, is_wanted in zip(leaves, types, wanted, strict=True):
        if is_wanted and not _suits(leaf, aval):
            found = "None" if leaf is None else jax.typeof(leaf).str_short()
            raise WorkloadError(
                f"{name} holds `{found}` where the result is `{aval.str_short()}`. "
                "Give a cotangent of the result's own shape and dtype."
            )
    pairs = zip(leaves, types, wanted, strict=True)
    return [jnp.array(x, t.dtype, copy=True) if w else None for x, t, w in pairs]


def _ones(types: Sequence[Any], name: str, tree: Any) -> Flat:
    if len(types) == 1 and types[0].shape == ():
        return [jnp.ones((), types[0].dtype)]
    text = tree.unflatten([aval.str_short() for aval in types])
    raise WorkloadError(
        f"{name} is None, and the result is `{text}`. It may be left out for one "
        "scalar alone."
    )


def _suits(leaf: Any, aval: Any) -> bool:
    if leaf is None:
        return False
    found = jax.typeof(leaf)
    same_dtype = found.dtype == aval.dtype or isinstance(leaf, (int, float, complex))
    return found.shape == aval.shape and same_dtype
