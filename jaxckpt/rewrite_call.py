"""One call of any function as a program of flat arrays, with the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

Flat = list[Any]

_NO_ARRAY_KINDS = "OSUMm"  # of NumPy: objects, text, times


@dataclass(frozen=True, eq=False)
class Call:
    """A call, traced.

    Attributes:
        closed: The closed jaxpr of the arrays among the arguments -> those returned.
        arrays: The arrays among the arguments.
        structure: Structure of what is returned.
        fixed: The leaves of it that are no arrays; None for each array.
    """

    closed: Any
    arrays: Flat
    structure: Any
    fixed: tuple[Any, ...]

    def results(self, computed: Sequence[Any]) -> Any:
        """Return what the call returns, of the arrays that the program computed."""
        rest = iter(computed)
        leaves = [next(rest) if x is None else x for x in self.fixed]
        return jax.tree.unflatten(self.structure, leaves)


def trace_call(fn: Callable[..., Any], args: Any, kwargs: Any) -> Call:
    """Trace a call; what is no array stays as it is.

    Python's own numbers and truth values are no arrays: a function may branch on them.
    Nothing is kept from call to call, since what a function closes over may change.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    returned: list[Any] = []

    def flat(*values: Any) -> Flat:
        filled = list(leaves)
        for place, value in zip(places, values, strict=True):
            filled[place] = value
        args, kwargs = jax.tree.unflatten(tree, filled)
        results, structure = jax.tree.flatten(fn(*args, **kwargs))
        fixed = tuple(None if isinstance(x, jax.Array) else x for x in results)
        returned.append((structure, fixed))
        return [x for x in results if isinstance(x, jax.Array)]

    arrays = [leaves[i] for i in places]
    closed = jax.make_jaxpr(flat)(*arrays)
    return Call(closed, arrays, *returned[-1])


def is_array(leaf: Any) -> bool:
    """Return whether a leaf of the arguments is an array, abstract ones included.

    Example:
        >>> is_array(np.ones(2)), is_array(2.0), is_array("train")
        (True, False, False)
    """
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind not in _NO_ARRAY_KINDS
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))
