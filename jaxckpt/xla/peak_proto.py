"""Read XLA's `HloProto`: instructions, buffers, and where each buffer lies and when.

A protocol buffer is a list of numbered fields; of those of `xla/service/hlo.proto` a
few are read, whose numbers XLA keeps. That is all that is needed of the format, so that
no protobuf package is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# By number in `xla_data.proto`; `_` is no array.
_DTYPES = (
    "_", "pred", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64", "f16", "f32",
    "f64", "_", "_", "c64", "bf16", "token", "c128", "f8e5m2", "f8e4m3fn", "s4", "u4",
)  # fmt: skip

Fields = dict[int, list[Any]]


class ProtoError(ValueError):
    """Bytes that are no `HloProto` with a buffer assignment."""


@dataclass(frozen=True)
class Node:
    """One instruction.

    Attributes:
        name: Unique in the module.
        opcode: As HLO writes it.
        op_name: JAX's name stack and primitive, or nothing.
        operands: Ids of the operands.
        called: Ids of the computations that it calls.
        shape: Encoded type.
        index: Of the part, for a `get-tuple-element`.
    """

    name: str
    opcode: str
    op_name: str
    operands: tuple[int, ...]
    called: tuple[int, ...]
    shape: bytes
    index: int

    def part_text(self, index: tuple[int, ...]) -> str:
        """Return the type of one array of the result, such as `"f32[4,8]"`."""
        shape = _fields(self.shape)
        for position in index:
            shape = _fields(shape[4][position])
        dims = ",".join(map(str, _numbers(shape, 3)))
        number = _number(shape, 2)
        dtype = _DTYPES[number] if number < len(_DTYPES) else "_"
        return f"{dtype.replace('_', 'data')}[{dims}]"


@dataclass(frozen=True)
class Body:
    """One computation, by ids of its instructions.

    Attributes:
        parameters: Its parameters by number.
        root: Its result.
        nodes: All of it.
    """

    parameters: tuple[int, ...]
    root: int
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Made:
    """A buffer: where it is made, and its size."""

    node: int
    index: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Allocation:
    """A stretch of memory.

    Attributes:
        bytes: Its size.
        kind: `"argument"`, `"result"`, `"temp"`, or `"other"` (constants, registers).
        argument: Number of the entry's parameter, for an argument.
        color: Memory space.
        buffers: Ids of the buffers in it.
    """

    bytes: int
    kind: str
    argument: int
    color: int
    buffers: frozenset[int]


@dataclass(frozen=True)
class Event:
    """One step of a shared allocation's history.

    Attributes:
        kind: `"begin"`, `"share"` (begins in the place of another one) or `"end"`.
        buffer: Id of the buffer.
        place_of: Id of the other buffer.
    """

    kind: str
    buffer: int
    place_of: int


@dataclass(frozen=True)
class Assignment:
    """A compiled module and its memory.

    Attributes:
        nodes: Instructions by id.
        bodies: Computations by id.
        parameters: The entry's parameters by number, as ids.
        made: Buffers by id.
        allocations: All allocations.
        traces: For each allocation that is shared in time, its events in order.
    """

    nodes: dict[int, Node]
    bodies: dict[int, Body]
    parameters: tuple[int, ...]
    made: dict[int, Made]
    allocations: tuple[Allocation, ...]
    traces: tuple[tuple[Event, ...], ...]


def read_assignment(data: bytes) -> Assignment:
    """Read an `HloProto`.

    Raises:
        ProtoError: The bytes are none, or hold no module or no buffer assignment.
    """
    try:
        top = _fields(data)
        module, memory = _fields(top[1][0]), _fields(top[3][0])
        nodes: dict[int, Node] = {}
        bodies = dict(_body(_fields(c), nodes) for c in module[3])
        return Assignment(
            nodes,
            bodies,
            bodies[_number(module, 6)].parameters,
            dict(_made(_fields(b)) for b in memory.get(1, ())),
            tuple(_allocation(_fields(a)) for a in memory.get(3, ())),
            tuple(_events(_fields(t)) for t in memory.get(4, ())),
        )
    except (IndexError, KeyError, UnicodeDecodeError) as error:
        raise ProtoError(
            f"These {len(data)} bytes hold no HLO module with a buffer assignment."
        ) from error


def _body(computation: Fields, nodes: dict[int, Node]) -> tuple[int, Body]:
    parameters: dict[int, int] = {}
    inside: list[int] = []
    for encoded in computation[2]:
        fields = _fields(encoded)
        identity = _number(fields, 35)
        inside.append(identity)
        metadata = _fields(fields[7][-1]) if 7 in fields else {}
        node = nodes[identity] = Node(
            name=_text(fields, 1),
            opcode=_text(fields, 2),
            op_name=_text(metadata, 2),
            operands=_numbers(fields, 36),
            called=_numbers(fields, 38),
            shape=fields[3][-1],
            index=_number(fields, 13),
        )
        if node.opcode == "parameter":
            parameters[_number(fields, 9)] = identity
    ordered = tuple(parameters[i] for i in sorted(parameters))
    return _number(computation, 5), Body(
        ordered, _number(computation, 6), tuple(inside)
    )


def _made(fields: Fields) -> tuple[int, Made]:
    place = _fields(fields[3][-1])
    made = Made(_number(place, 4), _numbers(place, 3), _number(fields, 2))
    return _number(fields, 1), made


def _allocation(fields: Fields) -> Allocation:
    if _number(fields, 5):
        kind = "argument"
    elif _number(fields, 3) or _number(fields, 12):  # thread-local, constant
        kind = "other"
    else:
        kind = "result" if _number(fields, 7) else "temp"
    buffers = frozenset(_number(_fields(b), 1) for b in fields.get(9, ()))
    return Allocation(
        _number(fields, 2), kind, _number(fields, 6), _number(fields, 8), buffers
    )


def _events(trace: Fields) -> tuple[Event, ...]:
    events = map(_fields, trace.get(1, ()))
    kinds = "begin", "end", "share"
    return tuple(
        Event(kinds[_number(e, 1)], _number(e, 2), _number(e, 5)) for e in events
    )


def _fields(data: bytes) -> Fields:
    """Return the fields of one message by number, each a list in the order written."""
    found: Fields = {}
    for number, value in _read(data):
        found.setdefault(number, []).append(value)
    return found


def _read(data: bytes) -> Iterator[tuple[int, Any]]:
    position, end = 0, len(data)
    while position < end:
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, position = _varint(data, position)
        else:
            if wire == 2:
                size, position = _varint(data, position)
            elif wire in (1, 5):
                size = 8 if wire == 1 else 4
            else:
                raise KeyError(wire)
            value = data[position : position + size]
            position += size
        yield number, value


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the number that begins at `position`, seven bits a byte, and its end."""
    byte = data[position]
    if byte < 128:
        return byte, position + 1
    value, shift = byte & 127, 7
    while True:
        position += 1
        byte = data[position]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position + 1
        shift += 7


def _number(fields: Fields, number: int) -> int:
    """Return a whole number; a field that is not written is 0."""
    return fields[number][-1] if number in fields else 0


def _numbers(fields: Fields, number: int) -> tuple[int, ...]:
    """Return a list of whole numbers, written one by one or packed."""
    found: list[int] = []
    for value in fields.get(number, ()):
        if isinstance(value, int):
            found.append(value)
            continue
        position = 0
        while position < len(value):
            one, position = _varint(value, position)
            found.append(one)
    return tuple(found)


def _text(fields: Fields, number: int) -> str:
    return fields[number][-1].decode() if number in fields else ""
