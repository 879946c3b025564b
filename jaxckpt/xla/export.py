"""Turn a function into bytes that another process can compile."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import export

_LOCATIONS = "jax_traceback_in_locations_limit"
_location_lock = threading.RLock()

_FMHA = [
    f"__cudnn$fmha{bias}Softmax{dropout}{backward}"
    for bias in ("", "ScaleBias")
    for dropout in ("", "Dropout")
    for backward in ("", "Backward")
]
# Custom calls that JAX does not promise to keep stable. Here the same JAX reads the
# bytes a moment later, so no promise is needed.
_UNSTABLE_CALLS = frozenset(["annotate_device_placement", *_FMHA])


@dataclass(frozen=True)
class Program:
    """A function of flat arguments, lowered for CUDA.

    Attributes:
        serialized: The module in `jax.export`'s format.
        donated: Positions of the donated ones among the flat arguments.
    """

    serialized: bytes
    donated: tuple[int, ...]


def export_program(
    fn: Callable[..., Any],
    args: Sequence[Any],
    donate_argnums: int | Sequence[int] | None = None,
) -> Program:
    """Lower `fn` for CUDA and serialise it.

    The module takes and returns flat lists of arrays, so that no container type of the
    user must be known to `jax.export`; and it carries the names of operations but no
    file or line, so that the bytes do not change when unrelated code moves.

    Args:
        fn: The function, jitted or not.
        args: Abstract or concrete arguments.
        donate_argnums: Donated arguments; None for those that a jitted `fn` donates.
    """
    shapes = jax.eval_shape(lambda *args: args, *args)
    leaves, tree = jax.tree.flatten(shapes)
    donated = _donated_leaves(fn, args, donate_argnums)

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(fn(*jax.tree.unflatten(tree, leaves)))

    abstract = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
        for leaf in leaves
    ]
    with _no_file_locations():
        exported = _export(jax.jit(flat, donate_argnums=donated), abstract)
    return Program(bytes(exported.serialize()), donated)


def _donated_leaves(
    fn: Callable[..., Any], args: Sequence[Any], donate_argnums: Any
) -> tuple[int, ...]:
    """Return the positions of the donated leaves among all leaves of `args`."""
    if donate_argnums is None:
        if not hasattr(fn, "trace"):
            return ()
        infos = jax.tree.leaves(fn.trace(*args).args_info)  # pyright: ignore
        return tuple(i for i, info in enumerate(infos) if info.donated)
    chosen = {donate_argnums} if isinstance(donate_argnums, int) else {*donate_argnums}
    flags = [i in chosen for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    return tuple(i for i, flag in enumerate(flags) if flag)


def _export(fn: Any, abstract: Sequence[Any]) -> export.Exported:
    """Export `fn`, allowing whatever custom calls it turns out to have."""
    allowed = _UNSTABLE_CALLS
    while True:
        checks = [export.DisabledSafetyCheck.custom_call(c) for c in sorted(allowed)]
        try:
            return export.export(fn, platforms=["cuda"], disabled_checks=checks)(
                *abstract
            )
        except ValueError as error:
            named = frozenset(re.findall(r'custom_call @"?([^"(\s]+)', str(error)))
            if named <= allowed:
                raise
            allowed |= named


@contextlib.contextmanager
def _no_file_locations() -> Iterator[None]:
    with _location_lock:
        before = getattr(jax.config, _LOCATIONS)
        jax.config.update(_LOCATIONS, 0)
        try:
            yield
        finally:
            jax.config.update(_LOCATIONS, before)
