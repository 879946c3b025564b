"""Who holds memory at the peak: the compiler's buffers, by the names of the program."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxckpt.graph.names import function_of
from jaxckpt.graph.residuals import Residual
from jaxckpt.graph.trace import Graph
from jaxckpt.graph.values import Value
from jaxckpt.xla.compile import Compilation
from jaxckpt.xla.hlo import parse_shapes
from jaxckpt.xla.peak_buffers import (
    ARGUMENT,
    BACKWARD,
    GRADIENT,
    KEPT,
    REST,
    Buffer,
)

_TRANSFORMED = re.compile(r"^(?:jvp|transpose|vmap)\((.*)\)$")
_AROUND = re.compile(
    r"^(?:p?jit(?:\(.*\))?|while|body|cond|branch_\d+_fun|call_exported|closed_call"
    r"|eval_jaxpr|checkpoint|remat|rematted_computation|shard_map|custom_[jv]\w+)$"
)
Place = tuple[str, str]

_INDEX = re.compile(r"(?<![^\W_])\d+")


@dataclass(frozen=True)
class Holder:
    """What holds memory at the peak: the buffers of one kind and name, over all layers.

    Attributes:
        bytes: Bytes of all of them.
        kind: What they are: `"argument"`, `"result"`, `"kept"` for the backward pass,
            `"gradient"`, `"recomputed"`, `"update"` (the optimizer's work), `"forward"`
            or `"backward"` (of that pass), `"other"`; `"rest"` is what no buffer
            explains: gaps between them.
        name: Path of an argument; else the name in the program, or the module path and
            the operation. `*` stands for numbers that differ.
        count: How many buffers.
        source: `file:line (function)` of the operation, where it is known.
    """

    bytes: int
    kind: str
    name: str
    count: int
    source: str

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return dataclasses.asdict(self)


def holders(compiled: Compilation, graph: Graph | None = None) -> tuple[Holder, ...]:
    """Return what holds memory when a compiled program's memory is fullest.

    Args:
        compiled: What `compile_for(..., peak=True)` returned.
        graph: The traced loss function, for names of values and source lines.

    Returns:
        The largest first; their bytes sum to the footprint's peak.

    Raises:
        ValueError: It was compiled without `peak=True`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxckpt.xla import compile_for
        >>> x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
        >>> program = compile_for(lambda x: x + 1, x, device="attached", peak=True)
        >>> [(h.kind, h.name, h.bytes) for h in holders(program)]
        [('argument', 'x', 4096), ('result', 'add f32[8,128]', 4096)]
    """
    if compiled.buffers is None:
        raise ValueError(
            "This was compiled without a record of its buffers. Use "
            "`compile_for(..., peak=True)`."
        )
    names = _Names(graph)
    groups: dict[tuple[str, str], list[tuple[Buffer, str, str]]] = defaultdict(list)
    for buffer in compiled.buffers:
        name, source = names.of(buffer)
        path, space, shape = name.partition(" ")
        pattern = _INDEX.sub("*", path) + space + shape
        groups[buffer.kind, pattern].append((buffer, name, source))
    found = [_holder(kind, name, group) for (kind, name), group in groups.items()]
    return tuple(sorted(found, key=lambda h: (-h.bytes, h.kind, h.name)))


def _holder(
    kind: str, pattern: str, group: Sequence[tuple[Buffer, str, str]]
) -> Holder:
    names = {name for _, name, _ in group}
    return Holder(
        bytes=sum(buffer.bytes for buffer, _, _ in group),
        kind=kind,
        name=names.pop() if len(names) == 1 else pattern,
        count=len(group),
        source=group[0][2],
    )


class _Names:
    """Names and source lines of operations, from the traced program."""

    def __init__(self, graph: Graph | None) -> None:
        self._values: dict[Place, list[Value]] = defaultdict(list)
        for value in graph.values if graph else ():
            self._values[value.scope, value.primitive].append(value)
        self._residuals = [r for r in graph.residuals if r.held] if graph else []
        self._sources: dict[Place, str] = {}
        for found in (*graph.equations, *self._residuals) if graph else ():
            self._sources.setdefault((found.scope, found.primitive), found.source)

    def of(self, buffer: Buffer) -> tuple[str, str]:
        """Return the name of a buffer, and its source line or nothing."""
        if buffer.kind == ARGUMENT:
            return buffer.op_name, ""
        if buffer.kind == REST:
            return "gaps between buffers", ""
        place = place_of(buffer.op_name)
        named = self._named(buffer, place)
        if named is not None and buffer.kind not in (BACKWARD, GRADIENT):
            return named
        if "/" not in buffer.op_name:
            return f"{buffer.op_name or _stem(buffer.hlo)} {buffer.shape}".strip(), ""
        source = self._sources.get(place, "")
        where = place[0] or function_of(source)
        if buffer.kind == GRADIENT and where:
            return where, source
        name = "/".join(filter(None, (where, place[1])))
        if not where and buffer.shape:
            name = f"{name or _stem(buffer.hlo)} {buffer.shape}"
        return name, source

    def _named(self, buffer: Buffer, place: Place) -> tuple[str, str] | None:
        """Return name and line of the one value that a buffer can be, if it is one."""
        size = _elements(buffer.shape)
        found: list[Value | Residual] = [
            v
            for v in self._values.get(place, ())
            if size in (math.prod(v.shape), math.prod(v.shape) * v.times)
        ]
        if not found and buffer.kind == KEPT:
            alike = [r for r in self._residuals if size == math.prod(r.shape)]
            # What a loop carries is known by what it begins with.
            found += [r for r in alike if r.carried] or alike
        labels = {value.label.partition("#")[0] for value in found}
        return (labels.pop(), found[0].source) if len(labels) == 1 else None


def place_of(op_name: str) -> Place:
    """Return module path and primitive of an operation, as the trace names them.

    Example:
        >>> place_of("jit(step)/transpose(jvp(GPT))/layers/while/body/mlp/dot_general")
        ('GPT/layers/mlp', 'dot_general')
    """
    parts = []
    for part in op_name.split("/"):
        while (found := _TRANSFORMED.match(part)) is not None:
            part = found[1]
        if part and "->" not in part and "." not in part and not _AROUND.match(part):
            parts.append(part)
    ended = bool(parts) and op_name.endswith(parts[-1])
    return ("/".join(parts[:-1]), parts[-1]) if ended else ("/".join(parts), "")


def _stem(hlo: str) -> str:
    return hlo.rstrip(".0123456789")


def _elements(shape: str) -> int:
    return parse_shapes(shape)[0].elements if shape else 0
