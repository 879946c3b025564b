"""A program without its calls: the equations of a call in the place of the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxckpt import _jax

STACK_FUNCTION = "jaxckpt_layers"

Remat = bool | Callable[[Any], bool]
"""Which rematerialised calls and stacks are taken away: all, none, or by equation."""


def flattened(closed: Any, *, remat: Remat = True) -> Any:
    """Return a closed jaxpr with its plain calls, and its remat, taken away.

    Plain calls (a `jit` without shardings or options of its own, and the like) are
    opened wherever the program is not inside a loop or a branch; rematerialised calls
    and the stacks of `jaxckpt` everywhere, since layers are found behind them. Each
    equation keeps where it was written, and gets the name stack of the calls around it.

    Args:
        closed: A closed jaxpr.
        remat: Whether `jax.checkpoint` and the stacks of `jaxckpt` are taken away, or a
            function that says so of each such equation.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> layer = jax.checkpoint(jax.jit(lambda x: jnp.sin(jnp.sin(x))))
        >>> program = flattened(jax.make_jaxpr(lambda x: layer(layer(x)))(1.0))
        >>> [eqn.primitive.name for eqn in _jax.open_jaxpr(program).eqns]
        ['sin', 'sin', 'sin', 'sin']
    """
    inliner = _Inliner(remat)
    jaxpr = _jax.open_jaxpr(closed)
    inliner.constants = dict(zip(map(id, closed.consts), jaxpr.constvars, strict=True))
    flat = inliner.jaxpr(jaxpr, calls=True, top=True)
    return _jax.with_constants(closed, flat, inliner.added)


def flattened_inside(inner: Any) -> Any:
    """Return the open jaxpr of a loop's body or a call with its plain calls opened."""
    return _Inliner(remat=False).jaxpr(_jax.open_jaxpr(inner), calls=True)


def without_remat(closed: Any) -> Callable[..., list[Any]]:
    """Return the program as a function with each `jax.checkpoint` in it taken away."""
    jaxpr = _Inliner(remat=True).jaxpr(_jax.open_jaxpr(closed), calls=False)
    return _jax.jaxpr_function(_jax.with_jaxpr(closed, jaxpr))


class _Inliner:
    """Walks a program and opens calls.

    Args:
        remat: As for `flattened`.

    Attributes:
        constants: The variable of each constant of the program, by identity.
        added: Value by variable of the constants that the opened calls bring along.
    """

    def __init__(self, remat: Remat) -> None:
        self._remat = remat
        self.constants: dict[int, Any] = {}
        self.added: dict[Any, Any] = {}
        self._opened: dict[tuple[int, bool, bool], tuple[Any, Any]] = {}

    def jaxpr(self, jaxpr: Any, *, calls: bool, top: bool = False) -> Any:
        """Return an open jaxpr without what is taken away.

        Args:
            jaxpr: The jaxpr.
            calls: Whether plain calls are opened.
            top: Whether constants can be added to those of the program.
        """
        equations: list[Any] = []
        renamed: dict[Any, Any] = {}

        def current(atom: Any) -> Any:
            return atom if isinstance(atom, _jax.Literal) else renamed.get(atom, atom)

        for eqn in jaxpr.eqns:
            if any(current(v) is not v for v in eqn.invars):
                eqn = eqn.replace(invars=[current(v) for v in eqn.invars])
            called = self._called(eqn, calls=calls, top=top)
            if called is None:
                equations.append(self._around(eqn, calls=calls))
                continue
            body, outputs = self._body(eqn, called, calls=calls, top=top)
            equations += body
            renamed.update(zip(eqn.outvars, outputs, strict=True))
        if len(equations) == len(jaxpr.eqns) and all(
            map(lambda a, b: a is b, equations, jaxpr.eqns)
        ):
            return jaxpr
        outputs = [current(v) for v in jaxpr.outvars]
        return jaxpr.replace(eqns=equations, outvars=outputs)

    def _called(self, eqn: Any, *, calls: bool, top: bool) -> Any | None:
        """Return what stands for an equation that is taken away, else None."""
        called = None
        if calls:
            called = _jax.plain_call(eqn)
        if called is None:
            called = _rematerialised(eqn)
            if called is not None and not self._takes(eqn):
                return None
        if called is None or (_jax.open_jaxpr(called).constvars and not top):
            return None
        return called

    def _takes(self, eqn: Any) -> bool:
        return self._remat if isinstance(self._remat, bool) else self._remat(eqn)

    def _body(
        self, eqn: Any, called: Any, *, calls: bool, top: bool
    ) -> tuple[list[Any], list[Any]]:
        """Return the equations that stand for a call, and what it returns."""
        opened = self._once(_jax.open_jaxpr(called), calls=calls, top=top)
        names = dict(zip(opened.invars, eqn.invars, strict=True))
        constants = getattr(called, "consts", ())
        for variable, value in zip(opened.constvars, constants, strict=True):
            names[variable] = self._constant(variable, value)
        return renamed_body(opened, names, outer=eqn)

    def _once(self, jaxpr: Any, *, calls: bool, top: bool) -> Any:
        """Open a jaxpr; one that many calls share only once."""
        key = (id(jaxpr), calls, top)
        if key not in self._opened:
            self._opened[key] = (jaxpr, self.jaxpr(jaxpr, calls=calls, top=top))
        return self._opened[key][1]

    def _constant(self, variable: Any, value: Any) -> Any:
        """Return the variable of the program that stands for a call's constant."""
        if id(value) not in self.constants:
            self.constants[id(value)] = _jax.new_variable(variable)
            self.added[self.constants[id(value)]] = value
        return self.constants[id(value)]

    def _around(self, eqn: Any, *, calls: bool) -> Any:
        """Return an equation that stays, what it holds opened."""
        calls = calls and eqn.primitive.name in ("shard_map", "jit", "pjit")
        replaced = {}
        for key, inner in _jax.inner_jaxprs(eqn).items():
            jaxpr = _jax.open_jaxpr(inner)
            changed = self._once(jaxpr, calls=calls, top=False)
            if changed is not jaxpr:
                replaced[key] = _jax.with_jaxpr(inner, changed)
        return _jax.replace_inner(eqn, replaced)


def _rematerialised(eqn: Any) -> Any | None:
    """Return what a `jax.checkpoint` runs, or a stack with rules of its own."""
    parameters = _jax.remat_parameters(eqn)
    if parameters is not None:
        return parameters["jaxpr"]
    return eqn.params["call_jaxpr"] if is_stack(eqn) else None


def is_stack(eqn: Any) -> bool:
    """Return whether an equation is a stack of layers in the explicit form.

    Its primal function is the same stack as scans and checkpoints.
    """
    return _jax.called_function(eqn) == STACK_FUNCTION


def is_remat(eqn: Any) -> bool:
    """Return whether an equation is a `jax.checkpoint` or a stack."""
    return _rematerialised(eqn) is not None


def has_remat(closed: Any) -> bool:
    """Return whether a `jax.checkpoint` or a stack stands anywhere in a program."""
    return any(
        is_remat(eqn) or any(map(has_remat, _jax.inner_jaxprs(eqn).values()))
        for eqn in _jax.open_jaxpr(closed).eqns
    )


def renamed_body(
    jaxpr: Any, names: dict[Any, Any], outer: Any
) -> tuple[list[Any], list[Any]]:
    """Return a body's equations over new variables, and what stands for its outputs.

    Args:
        jaxpr: An open jaxpr.
        names: What stands for its inputs and constants.
        outer: The equation whose name stack comes before those of the body.
    """

    def get(atom: Any) -> Any:
        return atom if isinstance(atom, _jax.Literal) else names.get(atom, atom)

    equations = []
    for eqn in jaxpr.eqns:
        inputs = [get(v) for v in eqn.invars]
        for variable in eqn.outvars:
            if not _jax.is_drop(variable):
                names[variable] = _jax.new_variable(variable)
        outputs = [get(v) for v in eqn.outvars]
        eqn = _jax.with_outer_scope(eqn, outer)
        equations.append(eqn.replace(invars=inputs, outvars=outputs))
    return equations, [get(v) for v in jaxpr.outvars]


def opened_at(closed: Any, path: Sequence[Any]) -> Any:
    """Return the open jaxpr that stands at a path (see `jaxckpt.graph.values`)."""
    jaxpr = _jax.open_jaxpr(closed)
    for number, key in zip(path[::2], path[1::2], strict=True):
        jaxpr = _jax.open_jaxpr(_jax.inner_jaxprs(jaxpr.eqns[number])[key])
    return jaxpr
