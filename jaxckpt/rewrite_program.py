"""A program run with its stacks under their schedules; the rest runs as it stands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxckpt import _jax
from jaxckpt.errors import PlanError
from jaxckpt.graph.values import Path
from jaxckpt.layers import run_layers
from jaxckpt.remat import refuse_callbacks
from jaxckpt.rewrite_cut import Cutter, Env, Flat
from jaxckpt.rewrite_unrolled import Unrolled, abstract
from jaxckpt.schedule import Schedule
from jaxckpt.schedule_tree import Keep

Change = Callable[[Env], None]
"""Runs a part of a program: puts what it makes into the environment."""


@dataclass(frozen=True, eq=False)
class Ruled:
    """A stack of a program, and what rules it.

    Attributes:
        name: The stack's name.
        place: Path of the jaxpr in which it stands.
        ranges: The equations `[start, stop)` of each layer; of a scan, its own.
        num_layers: How many layers it has.
        scanned: Whether they are a scan.
        schedule: Which of them are rematerialised, and how.
    """

    name: str
    place: Path
    ranges: tuple[tuple[int, int], ...]
    num_layers: int
    scanned: bool
    schedule: Schedule

    @property
    def start(self) -> int:
        """Its first equation."""
        return self.ranges[0][0]

    @property
    def stop(self) -> int:
        """The equation behind its last."""
        return self.ranges[-1][1]


class Rewriter:
    """Runs a program whose stacks follow their schedules.

    Args:
        stacks: The stacks.
        form: The form of scanned ones, as for `run_layers`.
    """

    def __init__(self, stacks: Sequence[Ruled], form: str | None) -> None:
        self._stacks = stacks
        self._form = form

    def run(self, closed: Any, arguments: Sequence[Any], path: Path = ()) -> Flat:
        """Return the results of the closed jaxpr that stands at a path."""
        jaxpr = _jax.open_jaxpr(closed)
        cutter = Cutter(jaxpr)
        env: dict[Any, Any] = {}
        env.update(zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True))
        env.update(zip(jaxpr.invars, arguments, strict=True))
        position = 0
        for (start, stop), change in self._changes(cutter, path):
            _check_apart(position, start, jaxpr)
            cutter.cut(position, start).run(env)
            change(env)
            position = stop
        cutter.cut(position, len(jaxpr.eqns)).run(env)
        outs = jaxpr.outvars
        return [v.val if isinstance(v, _jax.Literal) else env[v] for v in outs]

    def _changes(
        self, cutter: Cutter, path: Path
    ) -> list[tuple[tuple[int, int], Change]]:
        """Return what does not run as it stands: the equations, and what does."""
        found: dict[tuple[int, int], Change] = {}
        for stack in self._inside(path):
            if stack.place == path:
                found[stack.start, stack.stop] = self._stack(stack, cutter)
            else:
                number = stack.place[len(path)]
                found[number, number + 1] = self._opened(cutter, number, path)
        return sorted(found.items(), key=lambda item: item[0])

    def _inside(self, path: Path) -> list[Ruled]:
        return [s for s in self._stacks if s.place[: len(path)] == path]

    def _stack(self, stack: Ruled, cutter: Cutter) -> Change:
        nodes = stack.schedule.nodes(stack.num_layers)
        if not stack.scanned:
            layers = Unrolled(cutter, stack.ranges, stack.name)
            return lambda env: layers.run(nodes, env)
        piece = cutter.cut(stack.start, stack.stop)
        if self._form is None and all(isinstance(node, Keep) for node in nodes):
            return piece.run
        eqn = cutter.jaxpr.eqns[stack.start]
        if not all(isinstance(node, Keep) for node in nodes):
            refuse_callbacks(eqn.params["jaxpr"], f"A layer of `{stack.name}`")

        def run(env: Env) -> None:
            with _jax.in_place_of(eqn):
                results = run_scan(eqn, _inputs(eqn, env), stack, self._form)
            env.update(zip(eqn.outvars, results, strict=True))

        return run

    def _opened(self, cutter: Cutter, number: int, path: Path) -> Change:
        """Return an equation with stacks inside it as what runs them."""
        eqn = cutter.jaxpr.eqns[number]
        here = (*path, number)
        rebuild = _REBUILT.get(eqn.primitive.name)
        if _jax.remat_parameters(eqn) is not None:
            rebuild = _remat
        if rebuild is None:
            piece = cutter.cut(number, number + 1)
            changed = self._with_inner(eqn, here)
            closed = _jax.with_jaxpr(
                piece.closed, _jax.open_jaxpr(piece.closed).replace(eqns=[changed])
            )
            return lambda env: piece.run(env, _jax.jaxpr_function(closed))

        def run(env: Env) -> None:
            with _jax.in_place_of(eqn):
                results = rebuild(eqn, self._function(eqn, "jaxpr", here))(
                    *_inputs(eqn, env)
                )
            env.update(zip(eqn.outvars, results, strict=True))

        return run

    def _function(self, eqn: Any, key: str, here: Path) -> Callable[..., Flat]:
        inner = _jax.inner_jaxprs(eqn)[key]
        return lambda *values: self.run(inner, values, (*here, key))

    def _with_inner(self, eqn: Any, here: Path) -> Any:
        """Return a loop, a branch or a call with what it runs traced anew."""
        if eqn.primitive.name not in _OPENED:
            raise PlanError(
                f"The plan rules a stack inside `{eqn.primitive.name}` at "
                f"`{_jax.source_line(eqn)}`, which has derivative rules of its own: "
                "what it keeps is its own affair. Leave that stack out of the plan."
            )
        changed = {}
        for key, inner in _jax.inner_jaxprs(eqn).items():
            if self._inside((*here, key)):
                types = [abstract(v) for v in _jax.open_jaxpr(inner).invars]
                changed[key] = jax.make_jaxpr(self._function(eqn, key, here))(*types)
        return _jax.replace_inner(eqn, changed)


_OPENED = frozenset(
    ("scan", "while", "cond", "jit", "pjit", "closed_call", "core_call")
)


def run_scan(eqn: Any, inputs: Flat, stack: Ruled, form: str | None) -> Flat:
    """Return the results of a scan over layers, run under a schedule."""
    num_consts, num_carry = _jax.scan_counts(eqn)
    consts = inputs[:num_consts]
    carry = inputs[num_consts : num_consts + num_carry]
    layers = inputs[num_consts + num_carry :]
    run = _jax.jaxpr_function(eqn.params["jaxpr"])
    turned = _turned if eqn.params["reverse"] else list

    def body(carry: Flat, layer: Flat) -> tuple[Flat, Flat]:
        results = run(*consts, *carry, *(layer if layers else ()))
        return results[:num_carry], results[num_carry:]

    # A loop without anything of each layer's own still needs a number of layers.
    stacked = turned(layers) or [jnp.arange(eqn.params["length"], dtype=jnp.int32)]
    carry, outputs = run_layers(
        body,
        carry,
        stacked,
        stack.schedule,
        form=form,
        label=f"a layer of `{stack.name}`",
    )
    return [*carry, *turned(outputs)]


def _turned(stacks: Flat) -> Flat:
    """Return stacks with their last layer first."""
    return [jnp.flip(x, 0) for x in stacks]


def _inputs(eqn: Any, env: Env) -> Flat:
    return [v.val if isinstance(v, _jax.Literal) else env[v] for v in eqn.invars]


def _remat(eqn: Any, fn: Callable[..., Flat]) -> Callable[..., Flat]:
    parameters = _jax.remat_parameters(eqn)
    assert parameters is not None
    policy, prevent_cse = parameters["policy"], parameters["prevent_cse"]
    return jax.checkpoint(fn, policy=policy, prevent_cse=prevent_cse)


def _shard_map(eqn: Any, fn: Callable[..., Flat]) -> Callable[..., Flat]:
    return jax.shard_map(
        fn,
        mesh=eqn.params["mesh"],
        in_specs=tuple(eqn.params["in_specs"]),
        out_specs=list(eqn.params["out_specs"]),
        axis_names=frozenset(eqn.params["newly_manual_axes"]),
        check_vma=eqn.params["check_vma"],
    )


_REBUILT = {"shard_map": _shard_map}
"""Equations that JAX rebuilds from a function: their jaxpr has no constants."""


def _check_apart(position: int, start: int, jaxpr: Any) -> None:
    if start < position:
        raise PlanError(
            "Two stacks of the plan overlap at "
            f"`{_jax.source_line(jaxpr.eqns[start])}`. Give a rule to one of them."
        )
