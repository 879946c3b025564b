"""What stands for a stage: a function, a linen Module or an nnx Module, as one form."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

from jaxckpt.errors import WorkloadError

PyTree = Any


@dataclass(frozen=True)
class Stage:
    """One stage of a chain as a pure function.

    Attributes:
        fn: `fn(params, x, **given) -> y`, or `(y, aux)`. Equal Modules share one.
        names: The keywords of `given` that it takes; None for any.
        label: How to call it in errors.
        params: The parameters that an nnx Module brings; None for other stages.
    """

    fn: Callable[..., Any]
    names: frozenset[str] | None
    label: str
    params: PyTree = None

    def takes(self, name: str) -> bool:
        """Return whether the stage takes a keyword."""
        return self.names is None or name in self.names

    def __call__(
        self, params: PyTree, x: PyTree, rng: Any, shared: Mapping[str, PyTree]
    ) -> Any:
        """Run it with what it takes of a random key and of the shared arrays."""
        given = {name: value for name, value in shared.items() if self.takes(name)}
        if rng is not None and self.takes("rng"):
            given["rng"] = rng
        return self.fn(params, x, **given)


def as_stages(targets: Any) -> list[Stage]:
    """Return stages for whatever stands for them.

    Args:
        targets: Functions `stage(params, x)`, which take by keyword what they name of
            `rng` and of the shared arrays; linen Modules, whose parameters are
            `variables["params"]`; nnx Modules, whose parameters are their `nnx.Param`s.

    Raises:
        WorkloadError: There is none, or one is neither.
    """
    if isinstance(targets, (str, Mapping)) or not isinstance(targets, Sequence):
        raise WorkloadError(
            f"`stages` is of type `{type(targets).__name__}`. Give a list of stages: "
            "functions `stage(params, x)`, linen or nnx Modules."
        )
    if not targets:
        raise WorkloadError("`stages` is empty. Give one stage at least.")
    return [_as_stage(target, number) for number, target in enumerate(targets)]


def check_shared(stages: Sequence[Stage], shared: Mapping[str, PyTree]) -> None:
    """Raise `WorkloadError` for keywords that no stage takes, or that are no arrays."""
    for name, given in shared.items():
        flags = [x for x in jax.tree.leaves(given) if isinstance(x, (bool, str))]
        if flags or callable(given):
            raise WorkloadError(
                f"`{name}={given!r}` is no array. Bind what is none to the stage, by "
                f"`functools.partial(stage, {name}=...)`."
            )
        if not any(stage.takes(name) for stage in stages):
            known = sorted({n for s in stages for n in s.names or ()} - {"rng"})
            raise WorkloadError(
                f"`{name}` is a keyword of no stage. Stages take "
                f"{', '.join(f'`{n}`' for n in known) or 'none'}."
            )


def check_key(rng: Any) -> None:
    """Raise `WorkloadError` for what is no random key."""
    if rng is None:
        return
    dtype = getattr(rng, "dtype", None)
    is_key = dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    if not (is_key and rng.shape == ()) and not (dtype == "uint32" and rng.ndim == 1):
        raise WorkloadError(
            f"`rng={rng!r}` is no random key. Use `jax.random.key(seed)`."
        )


def stage_key(rng: Any, index: Any) -> Any:
    """Return a stage's own random key, the same whenever the stage runs again."""
    return None if rng is None else jax.random.fold_in(rng, index)


def _as_stage(target: Any, number: int) -> Stage:
    name = getattr(target, "__name__", type(target).__name__)
    label = f"stage {number} (`{name}`)"
    if isinstance(target, Stage):
        return target
    if isinstance(target, nn.Module):
        try:
            fn = _shared_linen_call(target)
        except TypeError:  # it holds an array
            fn = _linen_call(target)
        return Stage(fn, _keywords(type(target).__call__, 2), label)
    if isinstance(target, nnx.Module):
        fn, params = _nnx_call(target)
        return Stage(fn, _keywords(type(target).__call__, 2), label, params)
    if inspect.isclass(target) or not callable(target):
        raise WorkloadError(
            f"{label} is of type `{type(target).__name__}`. Give a function "
            "`stage(params, x)`, a linen Module such as `Block()`, or an nnx Module."
        )
    return Stage(target, _keywords(target, 2), label)


def _keywords(fn: Callable[..., Any], positional: int) -> frozenset[str] | None:
    """Return the names that may be given by keyword; None for any name."""
    parameters = list(inspect.signature(fn).parameters.values())
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    kinds = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return frozenset(
        p.name
        for i, p in enumerate(parameters)
        if p.kind in kinds and (i >= positional or p.kind is kinds[0])
    ) | ({"rng"} if _is_module_call(fn) else set())


def _is_module_call(fn: Callable[..., Any]) -> bool:
    return getattr(fn, "__name__", "") == "__call__"


def identity(fn: Any) -> Any:
    """Return what tells a function from others: itself, or its number."""
    try:
        hash(fn)
    except TypeError:
        return id(fn)
    return fn


def _linen_call(module: nn.Module) -> Callable[..., Any]:
    def call(params: PyTree, x: PyTree, *, rng: Any = None, **given: Any) -> Any:
        rngs = None if rng is None else {"params": rng, "dropout": rng}
        return module.apply({"params": params}, x, rngs=rngs, **given)

    return call


_shared_linen_call = functools.lru_cache(maxsize=256)(_linen_call)


def _nnx_call(module: nnx.Module) -> tuple[Callable[..., Any], PyTree]:
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)
    if not jax.tree.leaves(rest):
        return _nnx_stateless(graphdef), params

    def call(params: PyTree, x: PyTree, *, rng: Any = None, **given: Any) -> Any:
        merged = nnx.merge(graphdef, params, rest)
        if rng is not None:
            _reseed(merged, rng)
        return merged(x, **given)

    return call, params


@functools.lru_cache(maxsize=256)
def _nnx_stateless(graphdef: Any) -> Callable[..., Any]:
    def call(params: PyTree, x: PyTree, *, rng: Any = None, **given: Any) -> Any:
        return nnx.merge(graphdef, params, nnx.State({}))(x, **given)

    return call


def _reseed(module: Any, rng: Any) -> None:
    """Derive each random stream of a Module from a key, from its first number on."""
    streams = [
        node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.RngStream)
    ]
    for number, stream in enumerate(streams):
        key = jax.random.fold_in(rng, number)
        stream.key[...] = key
        stream.count[...] = 0
