"""Which buffers of a compiled program are held when its memory is fullest."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxckpt.xla.hlo import HOST_MEMORY_SPACE, parse_shapes
from jaxckpt.xla.peak_origin import BACKWARD, FORWARD, OUTSIDE, Origin, Origins
from jaxckpt.xla.peak_proto import Allocation, Assignment, Event, Node

ARGUMENT, RESULT, KEPT, GRADIENT = "argument", "result", "kept", "gradient"
UPDATE, OTHER, REST = "update", "other", "rest"

Events = tuple[Event, ...]

_PLUMBING = ("parameter", "while", "tuple", "get-tuple-element", "conditional", "call")


@dataclass(frozen=True)
class Buffer:
    """Memory that is held when the program's memory is fullest.

    Attributes:
        bytes: Its size.
        kind: What it is for: `"argument"`, `"result"`, `"kept"` for the backward pass,
            `"gradient"`, `"recomputed"`, `"update"` (the optimizer's), else the pass
            that makes it, `"forward"` or `"backward"`, or `"other"`. `"rest"` is what
            no buffer explains.
        op_name: JAX's name stack and primitive of what made it; the name of an
            argument, also for a copy or a part of one.
        shape: Its type, such as `"f32[4,8]"`.
        hlo: Name of the instruction that made it.
    """

    bytes: int
    kind: str
    op_name: str = ""
    shape: str = ""
    hlo: str = ""


@dataclass
class _Life:
    """Buffers that share one place, from the first's beginning to the last's end."""

    bytes: int
    members: list[tuple[int, int]] = field(default_factory=list)  # event, buffer
    running: int = 0
    end: int = -1


@dataclass
class _History:
    """The lives in one allocation, and those that run when they are the most bytes."""

    lives: dict[int, _Life]
    fullest: int
    running: tuple[int, ...]


def held_buffers(module: Assignment, peak_bytes: int) -> tuple[Buffer, ...]:
    """Return what holds the memory of a program when it is fullest.

    Arguments and results hold theirs all the time. The temporaries share one
    allocation: of it, what XLA's simulation of the heap holds at its worst moment; the
    rest (gaps between buffers, tables of pointers) is one buffer more, so that the sum
    is `peak_bytes`.

    Args:
        module: A compiled module.
        peak_bytes: Its footprint's peak.
    """
    found = list(_Held(module).buffers())
    rest = peak_bytes - sum(b.bytes for b in found)
    return (*found, Buffer(rest, REST)) if rest else tuple(found)


def named_arguments(
    buffers: Sequence[Buffer] | None, fn: Callable[..., Any], args: Sequence[Any]
) -> tuple[Buffer, ...]:
    """Name the arguments as `fn` calls them: what was compiled took a flat list.

    Args:
        buffers: With arguments called `args[0]`, `args[1]`, ...
        fn: The function.
        args: Its positional arguments, as trees.
    """
    names = _argument_names(fn, args)

    def named(buffer: Buffer) -> Buffer:
        found = re.fullmatch(r"args\[(\d+)\]", buffer.op_name)
        if found is None:
            return buffer
        return dataclasses.replace(buffer, op_name=names[int(found[1])])

    return tuple(map(named, buffers or ()))


def _argument_names(fn: Callable[..., Any], args: Sequence[Any]) -> list[str]:
    """Return the path of each leaf: `state.params['w']`."""
    try:
        bound = inspect.signature(fn).bind(*args)
    except (TypeError, ValueError):  # a built-in without a signature
        roots = [f"args[{i}]" for i in range(len(args))]
    else:
        roots = list(bound.arguments)
        rest = len(args) - len(roots) + 1
        if rest != 1:  # the last one takes several
            roots[-1:] = [f"{roots[-1]}[{i}]" for i in range(rest)]
    paths = jax.tree_util.tree_flatten_with_path(tuple(args))[0]
    return [roots[path[0].idx] + jax.tree_util.keystr(path[1:]) for path, _ in paths]


class _Held:
    def __init__(self, module: Assignment) -> None:
        self.module = module
        self.origins = Origins(module)
        arguments = (module.nodes[p].part_text(()) for p in module.parameters)
        self.argument_dims = set(map(_dims, arguments))

    def buffers(self) -> Iterator[Buffer]:
        for allocation in self.module.allocations:
            if allocation.kind == "other" or allocation.color == HOST_MEMORY_SPACE:
                continue
            if allocation.kind == ARGUMENT:
                yield self._argument(allocation)
            elif (events := self._events(allocation)) is not None:
                yield from self._shared(events)
            else:
                yield self._alone(allocation)

    def _events(self, allocation: Allocation) -> Events | None:
        """Return the history of an allocation that buffers share in time."""
        traces = (t for t in self.module.traces if t)
        return next((t for t in traces if t[0].buffer in allocation.buffers), None)

    def _argument(self, allocation: Allocation) -> Buffer:
        node = self.module.nodes[self.module.parameters[allocation.argument]]
        name = node.op_name or node.name
        return Buffer(
            allocation.bytes, ARGUMENT, name, node.part_text(()), hlo=node.name
        )

    def _alone(self, allocation: Allocation) -> Buffer:
        """Return the buffer of an allocation that is not shared in time."""
        kind = RESULT if allocation.kind == RESULT else OTHER
        if not allocation.buffers:
            return Buffer(allocation.bytes, kind)
        return self._described(allocation.bytes, kind, min(allocation.buffers))

    def _shared(self, events: Events) -> Iterator[Buffer]:
        history = _replay(events, self.module)
        phases = [
            None if event.kind == "end" else self._origin(event.buffer).phase
            for event in events
        ]
        for first in history.running:
            life = history.lives[first]
            buffer = self._maker(life, history.fullest)
            kind = self._kind(life, buffer, phases)
            yield self._described(life.bytes, kind, buffer)

    def _kind(self, life: _Life, buffer: int, phases: list[str | None]) -> str:
        """Say what a temporary is for, by what makes it and what runs when it ends."""
        made = self._origin(buffer).phase
        backward = [i for i, found in enumerate(phases) if found == BACKWARD]
        if not backward:
            return OTHER if made == OUTSIDE else made
        if made == FORWARD:
            return KEPT if life.end > backward[0] else FORWARD
        if made not in (BACKWARD, OUTSIDE):
            return made
        begins, ends = life.members[0][0], life.end
        runs_last = next((p for p in reversed(phases[:ends]) if p), OUTSIDE)
        waits = runs_last == OUTSIDE or ends > backward[-1]
        early = made == BACKWARD or begins < backward[-1]
        dims = _dims(self._shape(buffer))
        if early and waits and dims and dims in self.argument_dims:
            return GRADIENT
        if made == BACKWARD:
            return BACKWARD
        return OTHER if early else UPDATE

    def _maker(self, life: _Life, moment: int) -> int:
        """Return the buffer of a life that was made last at a moment.

        What a loop carries begins with zeros, or a copy, and is written inside it.
        """
        nodes = [
            (when, buffer, self._node(buffer))
            for when, buffer in life.members
            if self._node(buffer).opcode not in _PLUMBING
        ]
        carried = any(self._node(b).opcode == "parameter" for _, b in life.members)
        if carried and len(nodes) > 1:
            nodes = nodes[1:]
        before = [buffer for when, buffer, _ in nodes if when <= moment]
        after = [buffer for when, buffer, _ in nodes if when > moment]
        return (before[-1:] or after[:1] or [life.members[0][1]])[0]

    def _described(self, size: int, kind: str, buffer: int) -> Buffer:
        node = self._node(buffer)
        return Buffer(
            size, kind, self._origin(buffer).op_name, self._shape(buffer), node.name
        )

    def _node(self, buffer: int) -> Node:
        return self.module.nodes[self.module.made[buffer].node]

    def _shape(self, buffer: int) -> str:
        made = self.module.made[buffer]
        return self._node(buffer).part_text(made.index)

    def _origin(self, buffer: int) -> Origin:
        made = self.module.made[buffer]
        return self.origins.of(made.node, made.index)


def _dims(shape: str) -> tuple[int, ...]:
    """Return what a shape and that of its transposes have in common; () of scalars."""
    return tuple(sorted(dim for dim in parse_shapes(shape)[0].dims if dim > 1))


def _replay(events: Events, module: Assignment) -> _History:
    """Follow the events of one allocation to its worst moment.

    A buffer may end and another begin in its place at the next instruction: one life.
    """
    lives: dict[int, _Life] = {}
    first_of: dict[int, int] = {}
    running: dict[int, int] = {}
    most, fullest, held = 0, 0, ()
    total = 0
    for now, event in enumerate(events):
        if event.kind == "end":
            first = first_of[event.buffer]
            life = lives[first]
            life.running -= 1
            life.end = now
            if life.running == 0:
                total -= running.pop(first)
            continue
        if event.kind == "begin":
            first = event.buffer
            lives[first] = _Life(module.made[first].bytes)
        else:
            first = first_of[event.place_of]
        life = lives[first]
        first_of[event.buffer] = first
        life.members.append((now, event.buffer))
        life.running += 1
        if first not in running:
            running[first] = life.bytes
            total += life.bytes
        if total > most:
            most, fullest, held = total, now, tuple(running)
    return _History(lives, fullest, held)
