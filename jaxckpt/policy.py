"""Policies: which values a layer keeps, moves to the host, or computes again.

A policy is frozen, hashable data with a small algebra. It is also a callable with JAX's
policy signature, so it works wherever JAX takes one; `jaxckpt.remat` goes further and
executes any policy exactly, by names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxckpt.errors import PolicyError
from jaxckpt.policy_algebra import Decision as Decision
from jaxckpt.policy_algebra import (
    Dots,
    Everything,
    LargerThan,
    Names,
    Nothing,
)
from jaxckpt.policy_algebra import Policy as Policy
from jaxckpt.units import parse_bytes

Name = str | Iterable[Any]
"""A name, a glob pattern, or lists and tuples of them, nested or not."""


def save(*names: Name) -> Policy:
    """Keep the values whose name matches one of the glob patterns on the device.

    Args:
        names: Names as given to `checkpoint_name`, or glob patterns (`*`, `?`,
            `[...]`); lists and tuples of them are taken apart.

    Raises:
        PolicyError: For no name, or one that is not a string.

    Example:
        >>> str(save("query_proj", ["key_proj", "value_proj"]))
        'save(query_proj, key_proj, value_proj)'
    """
    return Names(_flat_names(names, "save"))


def offload(*names: Name) -> Policy:
    """Move the values whose name matches to host memory, and back when they are read.

    Example:
        >>> str(save("context") | offload("out_proj"))
        'save(context) | offload(out_proj)'
    """
    return Names(_flat_names(names, "offload"), Decision.OFFLOAD)


def save_dots(batch_dims: bool = True) -> Policy:
    """Keep the results of matmul-like operations (see `jaxckpt.matmul`).

    Args:
        batch_dims: Whether products of batches of matrices (attention scores, fused
            attention, experts under `vmap`) are meant too.

    Example:
        >>> str(save_dots(batch_dims=False))
        'save_dots(batch_dims=False)'
    """
    return Dots(_checked_bool(batch_dims))


def offload_dots(batch_dims: bool = True) -> Policy:
    """Move the results of matmul-like operations to host memory.

    Example:
        >>> str(offload_dots())
        'offload_dots()'
    """
    return Dots(_checked_bool(batch_dims), Decision.OFFLOAD)


def save_everything() -> Policy:
    """Keep every value that the backward pass reads, as without remat.

    Example:
        >>> str(save_everything() - save("gathered_weight"))
        'save_everything() - save(gathered_weight)'
    """
    return Everything()


def save_nothing() -> Policy:
    """Keep the layer's inputs only, and compute everything else again.

    Example:
        >>> str(save_nothing())
        'save_nothing()'
    """
    return Nothing()


def save_larger_than(size: int | str) -> Policy:
    """Keep the values that are larger than a size on one device.

    Args:
        size: Bytes as an int, or with a unit as in `"1MiB"`.

    Raises:
        PolicyError: For a size without a unit, or that is not positive.

    Example:
        >>> str(save_larger_than("1MiB"))
        'save_larger_than(1048576B)'
    """
    try:
        return LargerThan(parse_bytes(size, argument="size"))
    except ValueError as error:
        raise PolicyError(str(error)) from None


def recompute(*names: Name) -> Policy:
    """Keep all but the values whose name matches: `save_everything() - save(...)`.

    Example:
        >>> recompute("context") == save_everything() - save("context")
        True
    """
    return save_everything() - Names(_flat_names(names, "recompute"))


def parse_policy(text: str) -> Policy | None:
    """Return the policy that a text describes; `"none"` (no remat) gives None.

    The grammar is that of Python expressions over the constructors, with bare names:
    `save(a, b*) | offload(c) - save(d)`; quote a name that holds other characters.
    `full`, `dots`, `dots_no_batch` and recipes (`maxtext:minimal`) are atoms.

    Raises:
        PolicyError: For text that is not a policy; it says where and what is valid.

    Example:
        >>> parse_policy("save(a, 'b,c') | offload(d)")
        Or(left=Names(names=('a', 'b,c'), decision=<Decision.SAVE: 'save'>), \
right=Names(names=('d',), decision=<Decision.OFFLOAD: 'offload'>))
    """
    from jaxckpt.policy_text import parse

    return parse(text)


def _checked_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise PolicyError(f"`batch_dims={value!r}` is neither True nor False.")
    return value


def _flat_names(names: Any, function: str) -> tuple[str, ...]:
    flat: list[str] = []
    for name in names:
        if isinstance(name, str):
            flat.append(name)
        elif isinstance(name, Iterable):
            flat.extend(_flat_names(name, function))
        else:
            raise PolicyError(
                f"`{name!r}` in `{function}(...)` is not a name (a string)."
            )
    if not flat:
        raise PolicyError(
            f"`{function}()` needs a name. To keep only a layer's inputs, use "
            "`save_nothing()`."
        )
    if any(not name for name in flat):
        raise PolicyError(f"`{function}(...)` was given an empty name.")
    return tuple(dict.fromkeys(flat))
