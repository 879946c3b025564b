"""How a flax Module becomes a function of arrays around a rematerialised call."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import linen, nnx
from flax.core import lift
from flax.linen import transforms

from jaxckpt.errors import WorkloadError

MakeRematted = Callable[[Callable[..., Any], str], Callable[..., Any]]
"""`(function of arrays, label for errors) -> the same function, rematerialised`."""


class StaticArguments:
    """Binds a call and takes its static arguments out, however they were passed."""

    def __init__(
        self, fn: Callable[..., Any], names: Sequence[str], label: str, skip: int = 0
    ) -> None:
        parameters = list(inspect.signature(fn).parameters.values())[skip:]
        self.signature = inspect.Signature(parameters)
        self.names = tuple(names)
        unknown = set(names) - set(self.signature.parameters)
        if unknown:
            raise WorkloadError(
                f"`static_argnames` has `{sorted(unknown)[0]}`, which is no argument "
                f"of {label}. Its arguments: {', '.join(self.signature.parameters)}."
            )

    def split(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        """Return positional and keyword arguments, and the static ones by name."""
        if not self.names:
            return tuple(args), dict(kwargs), {}
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        static = {n: bound.arguments[n] for n in self.names}
        # What follows a static positional argument has to go by keyword.
        kinds = {p.name: p.kind for p in self.signature.parameters.values()}
        positional: list[Any] = []
        keyword: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            if name in static:
                continue
            if kinds[name] is inspect.Parameter.VAR_POSITIONAL:
                positional.extend(value)
            elif kinds[name] is inspect.Parameter.VAR_KEYWORD:
                keyword.update(value)
            elif keyword or kinds[name] is inspect.Parameter.KEYWORD_ONLY:
                keyword[name] = value
            elif len(positional) == list(kinds).index(name):
                positional.append(value)
            else:
                keyword[name] = value
        return tuple(positional), keyword, static


def remat_linen(
    module: type[linen.Module], make: MakeRematted, static_argnames: tuple[str, ...]
) -> Any:
    """Return the Module class with `__call__` rematerialised and its name kept.

    Variables and random streams go through the call as arrays (`flax.core.lift.pack`),
    so the parameter tree, initial values, dropout masks, batch statistics and sown
    values are those of the class itself.
    """
    label = f"`{module.__name__}`"
    static = StaticArguments(module.__call__, static_argnames, label, skip=1)

    def transform(fn: Callable[..., Any]) -> Callable[..., Any]:
        def inner(
            scope_fn: Any,
            repack_fn: Any,
            variables: Any,
            rngs: Any,
            *args: Any,
            **kw: Any,
        ) -> Any:
            positional, keyword, fixed = static.split(args, kw)

            def body(variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
                scope = scope_fn(variables, rngs)
                return fn(scope, *args, **kwargs, **fixed), repack_fn(scope)

            return make(body, label)(variables, rngs, *positional, **keyword)

        return lift.pack(
            inner, (True,), (True,), (True,), name="remat", enable_kwargs=True
        )

    lifted: Any = transforms.lift_transform(transform, module, methods=None)
    lifted.__name__ = module.__name__
    lifted.__qualname__ = module.__qualname__
    lifted.__module__ = module.__module__
    lifted.__doc__ = module.__doc__
    return lifted


def remat_nnx_class(module: type[nnx.Module], call: Callable[..., Any]) -> Any:
    """Return a subclass of the Module, of the same name, with another `__call__`."""
    body = {
        "__call__": call,
        "__doc__": module.__doc__,
        "__module__": module.__module__,
        "__qualname__": module.__qualname__,
    }
    return types.new_class(
        module.__name__, (module,), exec_body=lambda ns: ns.update(body)
    )


def with_nnx_state(
    fn: Callable[..., Any], make: MakeRematted, static_argnames: tuple[str, ...]
) -> Callable[..., Any]:
    """Return a function with a rematerialised body, nnx Modules allowed as arguments.

    A Module's state (parameters, batch statistics, counts of random streams) goes in
    and comes out as arrays, and the caller's Module is updated in place.
    """
    label = f"`{getattr(fn, '__qualname__', type(fn).__name__)}`"
    static = StaticArguments(fn, static_argnames, label) if static_argnames else None
    plain: dict[Any, Callable[..., Any]] = {}

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        fixed: dict[str, Any] = {}
        if static is not None:
            args, kwargs, fixed = static.split(args, kwargs)
        if _has_module((args, kwargs)):
            return _call_with_modules(fn, make, label, args, kwargs, fixed)
        key = tuple(sorted(fixed.items())) if fixed else ()
        if key not in plain:
            plain[key] = make(functools.partial(fn, **fixed), label)
        return plain[key](*args, **kwargs)

    return wrapped


def _call_with_modules(
    fn: Callable[..., Any],
    make: MakeRematted,
    label: str,
    args: Any,
    kwargs: Any,
    fixed: Mapping[str, Any],
) -> Any:
    graphdef, state, arrays = nnx.split((args, kwargs), nnx.Variable, ...)

    def body(state: Any, arrays: Any) -> Any:
        args, kwargs = nnx.merge(graphdef, state, arrays)
        out = fn(*args, **kwargs, **fixed)
        return out, nnx.state((args, kwargs), nnx.Variable)

    out, updated = make(body, label)(state, arrays)
    nnx.update((args, kwargs), updated)
    return out


def _has_module(tree: Any) -> bool:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Module))
    return any(isinstance(leaf, nnx.Module) for leaf in leaves)
