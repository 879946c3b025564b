"""A program as the planner sees it: the costs of the layers of each of its stacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxckpt import _jax
from jaxckpt.devices import Device
from jaxckpt.errors import PlanError
from jaxckpt.graph.gradient import is_inexact_type
from jaxckpt.graph.stages import Chain, Stack
from jaxckpt.graph.stages.chain import Stage
from jaxckpt.graph.stages.program import Program
from jaxckpt.graph.trace import Graph
from jaxckpt.planner.costs import LayerCosts, layer_costs
from jaxckpt.rewrite import find_chain

PyTree = Any


@dataclass(frozen=True, eq=False)
class PlannedLayer:
    """One layer of a stack.

    Attributes:
        kind: Layers of equal kind are equal programs.
        costs: What it can keep, and what that saves.
        input_bytes: Of what it gets from the layer before.
        gradient_bytes: Of its parameters that are trained.
        joining_seconds: To join them, as is done where a stack has several runs.
        body: Its closed jaxpr.
        num_consts: Of a loop: how many inputs all layers share.
        num_carry: Of a loop: how many inputs come from the layer before.
        wrt: Which inputs are differentiated.
    """

    kind: int
    costs: LayerCosts
    input_bytes: int
    gradient_bytes: int
    joining_seconds: float
    body: Any
    num_consts: int
    num_carry: int
    wrt: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class PlannedStack:
    """A stack of layers.

    Attributes:
        name: The stack's name, as in a plan.
        scanned: Whether it is a loop.
        layers: Its layers, in order; of a loop the same one each time.
    """

    name: str
    scanned: bool
    layers: tuple[PlannedLayer, ...]

    @property
    def equal(self) -> bool:
        """Whether all layers are equal programs."""
        return len({layer.kind for layer in self.layers}) == 1


def read_stacks(graph: Graph, device: Device) -> tuple[PlannedStack, ...]:
    """Return the stacks of a traced loss function, without any remat of its own.

    Its first argument is what is trained.

    Raises:
        PlanError: A stack stands inside a `shard_map`.
    """
    chain = find_chain(graph.fn, graph.args, existing="replace")
    trained = len(jax.tree.leaves(graph.args[0]))
    reader = _Reader(chain, trained, device)
    return tuple(map(reader.stack, chain.stacks))


class _Reader:
    """Reads the stacks of a chain; equal layers once."""

    def __init__(self, chain: Chain, trained: int, device: Device) -> None:
        self.device = device
        self._known: dict[int, PlannedLayer] = {}
        self._carried: dict[int, set[int]] = {}
        self._jaxprs: dict[Any, tuple[Any, set[Any], set[Any]]] = {}
        jaxpr = _jax.open_jaxpr(chain.closed)
        moving = {v for v in jaxpr.invars[:trained] if is_inexact_type(v.aval)}
        self._enter((), jaxpr, moving)

    def stack(self, stack: Stack) -> PlannedStack:
        """Return one stack with the costs of its layers."""
        for stage in stack.stages:
            carried = self._carried.setdefault(stage.kind, set())
            carried.update(self._carried_inputs(stage))
        layers = [self._layer(stage) for stage in stack.stages]
        if stack.scanned:
            layers *= stack.num_layers
        return PlannedStack(stack.name, stack.scanned, tuple(layers))

    def _carried_inputs(self, stage: Stage) -> Iterator[int]:
        """Yield which inputs of a layer are no arguments of the program.

        The first layer may read the batch itself where later ones of its kind read what
        the layer before has made.
        """
        if not stage.scanned:
            _, _, arguments = self._at(stage.place)
            yield from (i for i, v in enumerate(stage.inputs) if v not in arguments)

    def _layer(self, stage: Stage) -> PlannedLayer:
        if stage.kind not in self._known:
            self._known[stage.kind] = self._read(stage)
            return self._known[stage.kind]
        known = self._known[stage.kind]
        return replace(known, costs=known.costs.named_as(stage.body))

    def _read(self, stage: Stage) -> PlannedLayer:
        jaxpr, moving, _ = self._at(stage.place)
        inside = _jax.open_jaxpr(stage.body).invars
        if stage.scanned:
            eqn = jaxpr.eqns[stage.start]
            consts, carries = _jax.scan_counts(eqn)
            outer = list(eqn.invars)
            carry = range(consts, consts + carries)
            own = range(consts + carries, len(inside))
        else:
            outer = list(stage.inputs)
            carry = sorted(self._carried[stage.kind])
            if not carry:  # a first layer unlike all others
                carry = [i for i, v in enumerate(outer) if v not in moving]
            own = [i for i in range(len(outer)) if i not in carry]
        moved = {v for o, v in zip(outer, inside, strict=True) if _is_in(o, moving)}
        opened = _jax.open_jaxpr(stage.body)
        if stage.scanned:
            first = carry[0] if carry else 0
            pairs = zip(opened.outvars, inside[first:], strict=False)
            _follow_loop(opened, moved, list(pairs)[: len(carry)])
        else:
            # The first layer of a kind may read the batch, where later ones do not.
            moved.update(inside[i] for i in carry)
        wrt = [
            i for i, v in enumerate(inside) if is_inexact_type(v.aval) and v in moved
        ]
        shared = [i for i in range(len(inside)) if i not in carry]
        sizes = [_jax.nbytes(v.aval) for v in inside]
        gradients = sum(sizes[i] for i in own if i in wrt)
        return PlannedLayer(
            stage.kind,
            layer_costs(stage.body, wrt, shared, self.device),
            sum(sizes[i] for i in carry),
            gradients,
            _joining_seconds(gradients, self.device),
            stage.body,
            len(inside) - len(own) - len(carry),
            len(carry),
            tuple(i in wrt for i in range(len(inside))),
        )

    def _at(self, place: Sequence[Any]) -> tuple[Any, set[Any], set[Any]]:
        """Return the jaxpr at a place, what moves in training, and what is given."""
        key = tuple(place)
        if key not in self._jaxprs:
            *above, number, name = place
            jaxpr, moving, _ = self._at(above)
            eqn = jaxpr.eqns[number]
            if eqn.primitive.name == "shard_map":
                raise PlanError(
                    "The layers stand inside a `shard_map`, and plans are for one "
                    "device yet. Write a schedule for them: `jaxckpt.plan_from`."
                )
            inner = _jax.open_jaxpr(_jax.inner_jaxprs(eqn)[name])
            outer = eqn.invars[len(eqn.invars) - len(inner.invars) :]
            pairs = zip(outer, inner.invars, strict=True)
            self._enter(key, inner, {v for o, v in pairs if _is_in(o, moving)})
        return self._jaxprs[key]

    def _enter(self, place: Any, jaxpr: Any, moving: set[Any]) -> None:
        _follow(jaxpr, moving)
        self._jaxprs[place] = jaxpr, moving, Program(jaxpr).arguments


def _joining_seconds(size: int, device: Device) -> float:
    """Return the seconds that gradients of so many bytes take to be joined.

    Joining moves them twice, and then their norm and the optimizer no longer read them
    in one pass: with two runs the compiled step of GPT-2 xl (batch 4 x 1024, 5.5 GiB of
    gradients) moves 25 GB more, four times their bytes (jax 0.10.2).
    """
    rate = device.memory_bytes_per_second
    return 4 * size / (rate * device.efficiency) if rate else 0.0


def _follow(jaxpr: Any, moving: set[Any]) -> None:
    """Add the variables of a jaxpr that depend on what is trained."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "stop_gradient":
            continue
        if any(_is_in(v, moving) for v in eqn.invars):
            moving.update(v for v in eqn.outvars if is_inexact_type(v.aval))


def _follow_loop(body: Any, moving: set[Any], carried: Sequence[Any]) -> None:
    """Do so for a loop's body: what moves at the end of a layer moves in the next."""
    while True:
        _follow(body, moving)
        new = {v for o, v in carried if _is_in(o, moving)} - moving
        if not new:
            return
        moving |= new


def _is_in(atom: Any, variables: set[Any]) -> bool:
    return not isinstance(atom, _jax.Literal) and atom in variables
