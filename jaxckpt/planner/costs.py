"""What the layers of a program cost: a layer's jaxpr -> `StageCosts`.

Values, residuals and what makes them come from JAX's own linearisation of the layer.
Seconds come from the roofline of `jaxckpt.memory`, with one simplification that keeps
them sums over operations: elementwise work is free where it ends up inside the kernels
that read it, and costs its traffic where a product, a loop or a call reads its result
from memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxckpt import _jax
from jaxckpt.devices import Device
from jaxckpt.graph.gradient import Differentiable, struct_of
from jaxckpt.graph.inline import flattened
from jaxckpt.graph.stages.program import variables
from jaxckpt.graph.tag import mark
from jaxckpt.graph.values import VIEWS, Values, find_values
from jaxckpt.matmul import find_matmul
from jaxckpt.memory.chip import Chip
from jaxckpt.memory.fuse import fuse
from jaxckpt.memory.lower import lower
from jaxckpt.memory.seconds import roofline_seconds
from jaxckpt.planner.stage import Operation, StageCosts
from jaxckpt.policy import Policy, offload, save, save_nothing

_LEAST_SHARE = 1e-4
"""Values of a smaller share of all residuals are not offered: they clutter a plan."""


@dataclass(frozen=True, eq=False)
class LayerCosts:
    """One layer as the planner sees it.

    Attributes:
        stage: Its values and operations.
        indices: Of each value that can be kept, its number among the layer's values
            (`jaxckpt.graph.values.find_values`).
        labels: What a policy calls each of them.
        forward_seconds: One forward run.
    """

    stage: StageCosts
    indices: Mapping[int, int]
    labels: Mapping[int, str]
    forward_seconds: float

    def policy(
        self, saved: Collection[int], offloaded: Collection[int] = frozenset()
    ) -> Policy:
        """Return the policy that keeps these values, some of them in host memory."""
        names = dict.fromkeys(self.labels[v] for v in sorted(saved))
        moved = {self.labels[v] for v in offloaded}
        here = [_escaped(name) for name in names if name not in moved]
        there = [_escaped(name) for name in names if name in moved]
        if not there:
            return save(*here) if here else save_nothing()
        return save(*here) | offload(*there) if here else offload(*there)

    def named_as(self, closed: Any) -> LayerCosts:
        """Return the costs of an equal layer, which may call its values otherwise."""
        items = find_values(closed).items
        labels = {number: items[i].label for number, i in self.indices.items()}
        return dataclasses.replace(self, labels=labels)


def layer_costs(
    closed: Any, wrt: Sequence[int], shared: Sequence[int], device: Device
) -> LayerCosts:
    """Return the costs of one layer.

    Args:
        closed: Its closed jaxpr.
        wrt: Which inputs are differentiated.
        shared: Inputs that are there anyway: parameters, and what all layers share.
            What depends on them alone costs nothing to have again.
        device: What it runs on.
    """
    values = find_values(closed)
    marked = mark(closed, {v.place: i for i, v in enumerate(values.items)})
    inputs = [struct_of(v.aval) for v in _jax.open_jaxpr(closed).invars]
    run = _jax.jaxpr_function(marked)
    linearized = Differentiable.of(run, inputs, tuple(wrt)).linearized()
    flat = flattened(linearized.closed, remat=False)
    return _Reader(flat, linearized.num_outputs, values, shared, device).costs()


class _Reader:
    """Reads a linearised layer: outputs, then residuals, marks on its values."""

    def __init__(
        self,
        closed: Any,
        num_outputs: int,
        values: Values,
        shared: Sequence[int],
        device: Device,
    ) -> None:
        self.jaxpr = _jax.open_jaxpr(closed)
        self.values = values
        self.device = device
        self.chip = Chip.of(device)
        self._num_outputs = num_outputs
        self._free = {*self.jaxpr.constvars, *(self.jaxpr.invars[i] for i in shared)}
        self._marked: dict[Any, Any] = {}
        self._index: dict[Any, int] = {}
        self._equations = [e for e in self.jaxpr.eqns if not self._is_mark(e)]

    def _is_mark(self, eqn: Any) -> bool:
        """Note which variable a mark stands on; it is that variable from here on."""
        index = _jax.mark_index(eqn)
        if index is None:
            return False
        variable = self._of(eqn.invars[0])
        self._marked[eqn.outvars[0]] = variable
        if not isinstance(variable, _jax.Literal):
            self._index.setdefault(variable, index)
        return True

    def _of(self, variable: Any) -> Any:
        if isinstance(variable, _jax.Literal):
            return variable
        return self._marked.get(variable, variable)

    def _reads(self, eqn: Any) -> list[Any]:
        """Return the variables that an equation reads."""
        return self._unmarked(eqn.invars)

    def _unmarked(self, atoms: Sequence[Any]) -> list[Any]:
        """Return the variables among atoms; a mark may stand on a number."""
        return variables([self._of(v) for v in atoms])

    def costs(self) -> LayerCosts:
        """Return the layer's costs."""
        primal = self._forward_equations()
        varying = [e for e in primal if self._varies(e)]
        numbers: dict[Any, int] = {}
        for eqn in varying:
            for v in eqn.outvars:
                if not _jax.is_drop(v):
                    numbers[v] = len(numbers)
        self._variables = list(numbers)
        heavy = [_is_heavy(eqn) for eqn in varying]
        stored = self._stored(varying, heavy)
        seconds = self._seconds(varying, heavy, stored)
        operations = tuple(
            Operation(
                seconds[i],
                tuple(
                    dict.fromkeys(numbers[v] for v in self._reads(e) if v in numbers)
                ),
                tuple(numbers[v] for v in e.outvars if v in numbers),
            )
            for i, e in enumerate(varying)
        )
        outputs = self.jaxpr.outvars[self._num_outputs :]
        residuals = set(self._unmarked(outputs))
        read = frozenset(numbers[v] for v in residuals if v in numbers)
        sizes = tuple(_jax.nbytes(v.aval) for v in numbers)
        plain = StageCosts(sizes, operations, read)
        stands_for = {n: self._named_end(plain, n) for n in numbers.values()}
        indices = self._indices(numbers, stands_for)
        labels = {n: self.values.items[i].label for n, i in indices.items()}
        least = _LEAST_SHARE * plain.bytes(read)
        fixed = frozenset(
            n for n, size in enumerate(sizes) if n not in labels or size < least
        )
        passes = self._passes(varying, heavy, stored, numbers)
        keeping = tuple(
            self._memory_seconds(passes[stands_for[n]] * size)
            for n, size in enumerate(sizes)
        )
        together = _of_one_name(labels)
        stage = StageCosts(sizes, operations, read, fixed, keeping, together)
        return LayerCosts(stage, indices, labels, sum(seconds))

    def _named_end(self, stage: StageCosts, number: int) -> int:
        """Return the value that is kept in the place of one.

        Where a value is read only to make another one of it for nothing (a bias added,
        a view, a name), the last of them that the program names is as good.
        """
        named, current = number, number
        while current not in stage.residuals:
            readers = [o for o in stage.operations if current in o.reads]
            if len(readers) != 1 or readers[0].seconds or len(readers[0].reads) > 1:
                break
            writes = readers[0].writes
            if len(writes) != 1 or stage.sizes[writes[0]] != stage.sizes[number]:
                break
            current = writes[0]
            index = self._index.get(self._variables[current])
            if index is not None and self.values.name_of(index) is not None:
                named = current
        return named

    def _indices(
        self, numbers: Mapping[Any, int], stands_for: Mapping[int, int]
    ) -> dict[int, int]:
        """Return which values a policy can keep, as numbers of the layer's values.

        Not complex ones, nor those without a name or a label with a path.
        """
        found: dict[int, int] = {}
        taken: set[tuple[str, int]] = set()
        for number in numbers.values():
            index = self._index.get(self._variables[stands_for[number]])
            if index is None:
                continue
            value = self.values.items[index]
            unnamed = self.values.name_of(index) is None and "/" not in value.label
            same = value.label, self.values.root(index)
            if unnamed or same in taken or value.dtype.startswith("complex"):
                continue
            taken.add(same)
            found[number] = index
        return found

    def _forward_equations(self) -> list[Any]:
        """Return what makes the residuals and the layer's results."""
        needed = set(self._unmarked(self.jaxpr.outvars))
        kept = []
        for eqn in reversed(self._equations):
            if eqn.effects or any(v in needed for v in eqn.outvars):
                kept.append(eqn)
                needed.update(self._reads(eqn))
        return kept[::-1]

    def _varies(self, eqn: Any) -> bool:
        """Return whether an equation depends on more than what is there anyway."""
        if all(v in self._free for v in self._reads(eqn)):
            self._free.update(eqn.outvars)
            return False
        return True

    def _seconds(
        self, eqns: Sequence[Any], heavy: Sequence[bool], stored: set[Any]
    ) -> list[float]:
        """Return what each equation takes, as the module says."""
        sources: dict[Any, frozenset[Any]] = {}
        found = []
        for eqn, is_heavy in zip(eqns, heavy, strict=True):
            reads = self._reads(eqn)
            behind = frozenset[Any]().union(*(sources.get(v, {v}) for v in reads))
            outputs = [v for v in eqn.outvars if not _jax.is_drop(v)]
            if is_heavy:
                found.append(self._roofline(eqn))
                continue
            if any(v in stored for v in outputs) and not _is_view(eqn):
                traffic = sum(_jax.nbytes(v.aval) for v in {*behind, *outputs})
                found.append(self._memory_seconds(traffic))
                continue
            found.append(0.0)
            sources.update((v, behind) for v in outputs)
        return found

    def _stored(self, eqns: Sequence[Any], heavy: Sequence[bool]) -> set[Any]:
        """Return the results that something reads from memory."""
        stored: set[Any] = set()
        for eqn, is_heavy in reversed(list(zip(eqns, heavy, strict=True))):
            through = _is_view(eqn) and any(v in stored for v in eqn.outvars)
            if is_heavy or through:
                stored.update(self._reads(eqn))
        return stored

    def _passes(
        self,
        eqns: Sequence[Any],
        heavy: Sequence[bool],
        stored: set[Any],
        numbers: Mapping[Any, int],
    ) -> dict[int, int]:
        """Return how often the bytes of each value are moved if it is kept.

        Seen in the traffic of compiled programs (Llama-3-1b, jax 0.10.2), where each
        value was kept in turn: what a product makes is copied into the stack and read
        from there (3); what elementwise work makes is written there at once (2), but
        cut out of the stack again where a product reads it (5).
        """
        found: dict[int, int] = {}
        for eqn, is_heavy in zip(eqns, heavy, strict=True):
            for v in eqn.outvars:
                if v not in numbers:
                    continue
                of_source = [found.get(numbers.get(u, -1), 2) for u in self._reads(eqn)]
                made = 3 if is_heavy else 2
                if _is_view(eqn) and of_source:
                    made = of_source[0]
                found[numbers[v]] = 5 if made == 2 and v in stored else made
        return found

    def _memory_seconds(self, traffic: int) -> float:
        rate = self.device.memory_bytes_per_second
        return traffic / (rate * self.device.efficiency) if rate else float(traffic)

    def _roofline(self, eqn: Any) -> float:
        """Return what one equation takes, loops and calls opened."""
        inputs = dict.fromkeys(variables(eqn.invars))
        outputs = [v for v in eqn.outvars if not _jax.is_drop(v)]
        program = lower(_jax.cut_jaxpr(self.jaxpr, [eqn], inputs, outputs), self.chip)
        fuse(program, self.chip)
        return roofline_seconds(program, self.device) or 0.0


def _of_one_name(labels: Mapping[int, str]) -> tuple[tuple[int, ...], ...]:
    """Return the values that a policy can only keep together."""
    groups: dict[str, list[int]] = {}
    for number, label in labels.items():
        groups.setdefault(label, []).append(number)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _is_heavy(eqn: Any) -> bool:
    """Return whether an equation reads from memory, and fuses with nothing."""
    if find_matmul(eqn.primitive.name) or _jax.inner_jaxprs(eqn):
        return True
    return eqn.primitive.name in _APART


_APART = frozenset(("sort", "top_k", "cumsum", "cumlogsumexp", "fft", "scatter-add"))


def _is_view(eqn: Any) -> bool:
    return eqn.primitive.name in VIEWS


def _escaped(label: str) -> str:
    """Return a pattern that matches a label and nothing else."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in label)
