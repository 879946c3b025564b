"""Run a step on the attached device and time it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxckpt.devices import ATTACHED
from jaxckpt.xla.compile import Compilation, compile_for


@dataclass(frozen=True)
class StepTime:
    """Measured seconds of one call.

    Attributes:
        median_seconds: Median over the repetitions.
        seconds: Each repetition, in order.
    """

    median_seconds: float
    seconds: tuple[float, ...]


def time_step(
    fn: Callable[..., Any] | Compilation,
    args: Sequence[Any],
    *,
    donate_argnums: int | Sequence[int] | None = None,
    repeats: int = 10,
) -> StepTime:
    """Run `fn(*args)` on the attached device and return how long a call takes.

    Each call is waited for. One call goes before the counted ones. A first argument
    that is donated and comes back as the result or its first part (a train step's
    state) is passed on from call to call, so that no second copy of it takes memory;
    other donated arguments are copied outside of the counted time. As by any call,
    donated arguments are used up.

    Args:
        fn: A function, or what `compile_for` returned for the attached device.
        args: Concrete arguments.
        donate_argnums: As of `compile_for`; not used with a compilation.
        repeats: Number of counted calls.

    Example:
        >>> import jax.numpy as jnp
        >>> time_step(jnp.sin, [jnp.ones(8)], repeats=3).median_seconds > 0
        True
    """
    if repeats < 1:
        raise ValueError(f"`repeats={repeats}` counts no call. Use 1 or more.")
    program = _executable(fn, args, donate_argnums)
    donated = _donated_arguments(program, args)
    passed_on = 0 in donated and _find_like(program.out_info, args[0]) is not None
    copied = donated - {0} if passed_on else donated
    args, seconds = list(args), []
    for _ in range(repeats + 1):
        given = [_copy(arg) if i in copied else arg for i, arg in enumerate(args)]
        jax.block_until_ready(given)
        start = time.perf_counter()
        result = jax.block_until_ready(program(*given))
        seconds.append(time.perf_counter() - start)
        if passed_on:
            args[0] = _find_like(result, args[0])
        del given, result
    return StepTime(statistics.median(seconds[1:]), tuple(seconds[1:]))


def _executable(
    fn: Callable[..., Any] | Compilation, args: Sequence[Any], donate_argnums: Any
) -> Any:
    if not isinstance(fn, Compilation):
        fn = compile_for(fn, *args, device=ATTACHED, donate_argnums=donate_argnums)
    if fn.executable is None:
        raise ValueError(
            f"This was compiled for `{fn.device}`, which is not here, and cannot be "
            "run. Compile it for `attached`."
        )
    return fn.executable


def _donated_arguments(program: Any, args: Sequence[Any]) -> set[int]:
    infos, _ = program.args_info
    return {
        i
        for i, _ in enumerate(args)
        if any(info.donated for info in jax.tree.leaves(infos[i]))
    }


def _find_like(result: Any, argument: Any) -> Any:
    """Return the result, or the first of its parts, if it is made like `argument`."""
    parts = [result, result[0]] if isinstance(result, tuple) and result else [result]
    return next((part for part in parts if _shapes(part) == _shapes(argument)), None)


def _shapes(tree: Any) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _copy(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.numpy.array(leaf, copy=True), tree)
