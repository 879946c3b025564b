"""How a flax Module becomes a function of arrays around a rematerialised call."""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections import OrderedDict
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
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a call's other arguments and its static ones, by name."""
        bound = self.signature.bind(*args, **kwargs).arguments
        defaults = {n: self.signature.parameters[n].default for n in self.names}
        static = {n: bound.get(n, defaults[n]) for n in self.names}
        return {n: v for n, v in bound.items() if n not in static}, static

    def join(
        self, others: Mapping[str, Any], static: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of a call."""
        given = {**others, **static}
        ordered = {n: given[n] for n in self.signature.parameters if n in given}
        bound = inspect.BoundArguments(self.signature, OrderedDict(ordered))
        return bound.args, bound.kwargs


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

    def inner(
        fn: Callable[..., Any],
        scope_fn: Any,
        repack_fn: Any,
        variables: Any,
        rngs: Any,
        /,
        *args: Any,
        **kw: Any,
    ) -> Any:
        scopes = scope_fn(variables, rngs)
        if is_initializing(scopes):
            # Nothing is differentiated, and parameters are made inside the layer.
            return fn(scopes, *args, **kw), repack_fn(scopes)
        others, fixed = static.split(args, kw)

        def body(variables: Any, rngs: Any, others: Any) -> Any:
            scope = scope_fn(variables, rngs)
            args, kwargs = static.join(others, fixed)
            return fn(scope, *args, **kwargs), repack_fn(scope)

        return make(body, label)(variables, rngs, others)

    return lifted_class(module, inner, name="remat")


def lifted_class(
    module: type[linen.Module], inner: Callable[..., Any], *, name: str
) -> Any:
    """Return the Module class with another `__call__`, its own name and variables.

    Args:
        module: The class.
        inner: `inner(fn, scope_fn, repack_fn, variables, rngs, *args, **kwargs)`, with
            `fn` the call itself as a function of a scope, and the others as
            `flax.core.lift.pack` gives them; returns results and packed variables.
        name: What happens to the scope, for its debug name.
    """

    def transform(fn: Callable[..., Any]) -> Callable[..., Any]:
        packed = functools.partial(inner, fn)
        return lift.pack(
            packed, (True,), (True,), (True,), name=name, enable_kwargs=True
        )

    lifted: Any = transforms.lift_transform(transform, module, methods=None)
    lifted.__name__ = module.__name__
    lifted.__qualname__ = module.__qualname__
    lifted.__module__ = module.__module__
    lifted.__doc__ = module.__doc__
    return lifted


def is_initializing(scopes: Any) -> bool:
    """Return whether linen makes variables in a scope, or in one of several."""
    return any(s.flags.get("initializing") for s in jax.tree.leaves(scopes))


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
    if not static_argnames:
        return functools.wraps(fn)(_with_modules(fn, make, label))
    static = StaticArguments(fn, static_argnames, label)
    # One function of the other arguments for each set of static ones, so that calls
    # with the same share a trace.
    plain: dict[Any, Callable[..., Any]] = {}

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        others, fixed = static.split(args, kwargs)
        key = _hashable(fixed, label)
        if key not in plain:

            def call(others: Any) -> Any:
                args, kwargs = static.join(others, fixed)
                return fn(*args, **kwargs)

            plain[key] = _with_modules(call, make, label)
        return plain[key](others)

    return wrapped


def _hashable(fixed: Mapping[str, Any], label: str) -> tuple[Any, ...]:
    """Return a key of static values; 1, 1.0 and True differ."""
    for name, value in fixed.items():
        try:
            hash(value)
        except TypeError:
            raise WorkloadError(
                f"The static argument `{name}={value!r}` of {label} is not hashable. "
                "Give a tuple for a list, or do not declare it static."
            ) from None
    return tuple((name, type(value), value) for name, value in fixed.items())


def _with_modules(
    fn: Callable[..., Any], make: MakeRematted, label: str
) -> Callable[..., Any]:
    """Rematerialise a function whose arguments may hold nnx state."""
    of_arrays = make(fn, label)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not _has_state((args, kwargs)):
            return of_arrays(*args, **kwargs)
        graphdef, state, arrays = nnx.split((args, kwargs), nnx.Variable, ...)

        def body(state: Any, arrays: Any) -> Any:
            before = arrays_of(state)  # the call writes into the state's own variables
            args, kwargs = nnx.merge(graphdef, state, arrays)
            out = fn(*args, **kwargs)
            after = nnx.state((args, kwargs), nnx.Variable)
            return out, changed_state(before, after)

        out, updated = make(body, label)(state, arrays)
        nnx.update((args, kwargs), updated)
        return out

    return wrapped


def arrays_of(state: Any) -> dict[Any, list[Any]]:
    """Return the arrays of each variable of a state, by path."""
    return {path: jax.tree.leaves(v) for path, v in nnx.to_flat_state(state)}


def changed_state(before: Mapping[Any, list[Any]], after: Any) -> Any:
    """Return the part of a state that holds other arrays than before.

    What does not may belong to an outer trace, where it cannot be written: a Module
    that a transformation closes over, or one put together again inside the function.

    Args:
        before: The state's arrays, by `arrays_of`.
        after: The state.
    """
    changed = [
        (path, variable)
        for path, variable in nnx.to_flat_state(after)
        if not _same(before.get(path, ()), jax.tree.leaves(variable))
    ]
    return nnx.from_flat_state(changed)


def _same(before: Sequence[Any], after: Sequence[Any]) -> bool:
    return len(before) == len(after) and all(map(operator.is_, before, after))


def _has_state(tree: Any) -> bool:
    """Return whether a tree holds nnx state anywhere."""
    return any(map(is_stateful, jax.tree.leaves(tree, is_leaf=is_stateful)))


def is_stateful(value: Any) -> bool:
    """Return whether a value is nnx state: a Module, Rngs, Pytree or Variable."""
    return isinstance(value, (nnx.Module, nnx.Pytree, nnx.Rngs, nnx.Variable))
