"""Read optimized HLO text: computations, instructions, shapes, and who calls whom."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

HOST_MEMORY_SPACE = 5

_BITS = re.compile(r"^(?:bf|f|s|u|c)(\d+)")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](\{[^{}]*\})?")
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.$-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.$-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([a-z][\w-]*)\(")
_OPERAND = re.compile(r"%([\w.$-]+)\s*$")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation"
    r"|called_computations?|branch_computations)=(\{[^}]*\}|%?[\w.$-]+)"
)
_TRIP_COUNT = re.compile(r'"known_trip_count"\s*:\s*\{\s*"n"\s*:\s*"?(\d+)')
_OPENING, _CLOSING = "([{", ")]}"


class HloError(ValueError):
    """Text that is not the HLO of a compiled module."""


@dataclass(frozen=True)
class Shape:
    """An array's type, size and place."""

    dtype: str
    dims: tuple[int, ...]
    memory_space: int = 0

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Size in memory, rounded up to whole bytes."""
        return math.ceil(self.elements * bits(self.dtype) / 8)

    @property
    def on_host(self) -> bool:
        """Whether the array lies in host memory (XLA's memory space 5)."""
        return self.memory_space == HOST_MEMORY_SPACE


def bits(dtype: str) -> int:
    """Return the bits of one element; tokens and opaque types have none.

    Example:
        >>> [bits(t) for t in ("bf16", "pred", "f8e4m3fn", "s4", "c64", "token")]
        [16, 8, 8, 4, 64, 0]
    """
    if dtype == "pred":
        return 8
    found = _BITS.match(dtype)
    return int(found.group(1)) if found else 0


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: Unique in its computation.
        opcode: As HLO writes it, `"dot"`, `"get-tuple-element"`.
        shape_text: The result's type as text.
        operands: Names of the operands.
        literal: What stands in the parentheses where it is no operand (a number).
        attributes: The rest of the line.
    """

    name: str
    opcode: str
    shape_text: str
    operands: tuple[str, ...]
    literal: str
    attributes: str

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays of the result; nested tuples are flattened."""
        return parse_shapes(self.shape_text)

    @property
    def shape(self) -> Shape:
        """The first (for most the only) array of the result."""
        return self.shapes[0] if self.shapes else Shape("token", ())

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that the instruction calls, in order."""
        texts = (found.group(1) for found in _CALLED.finditer(self.attributes))
        return tuple(n for text in texts for n in re.findall(r"[\w.$-]+", text))

    @property
    def trip_count(self) -> int | None:
        """How often a loop's body runs, where the compiler knows it."""
        found = _TRIP_COUNT.search(self.attributes)
        return int(found.group(1)) if found else None

    @property
    def custom_call_target(self) -> str:
        """The function that a custom call names, or nothing."""
        return (self.attribute("custom_call_target") or "").strip('"')

    def attribute(self, name: str) -> str | None:
        """Return the text of `name=...` up to the comma that ends it."""
        found = re.search(rf"(?:^|, ){name}=", self.attributes)
        if found is None:
            return None
        rest = self.attributes[found.end() :]
        return rest[: _end_of_part(rest)]

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return the whole numbers in attribute `name`, none if it is not there."""
        return tuple(int(n) for n in re.findall(r"\d+", self.attribute(name) or ""))


@dataclass(frozen=True)
class Computation:
    """A list of instructions, in a compiled module in the schedule's order."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    @functools.cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """The parameters by number."""
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return tuple(sorted(found, key=lambda i: int(i.literal)))

    def operands(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yield the instructions that `instruction` reads."""
        for name in instruction.operands:
            yield self.instructions[name]


class Module(NamedTuple):
    """All computations by name, and the one that is run."""

    computations: dict[str, Computation]
    entry: Computation

    def callees(self, instruction: Instruction) -> list[Computation]:
        """Return the computations that `instruction` calls."""
        known = self.computations
        return [known[name] for name in instruction.called if name in known]


def parse_hlo(text: str) -> Module:
    """Parse the text of a compiled module.

    Raises:
        HloError: There is no entry computation, or a line cannot be read.

    Example:
        >>> module = parse_hlo('''HloModule m
        ... ENTRY %main (x: f32[2]) -> f32[2] {
        ...   %x = f32[2]{0} parameter(0)
        ...   ROOT %y = f32[2]{0} negate(%x)
        ... }''')
        >>> module.entry.root.opcode
        'negate'
    """
    computations: dict[str, Computation] = {}
    entry = None
    for is_entry, name, lines in _blocks(text):
        computations[name] = _parse_computation(name, lines)
        if is_entry:
            entry = computations[name]
    if entry is None:
        raise HloError("This text has no ENTRY computation: it is not an HLO module.")
    return Module(computations, entry)


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Return the arrays in the type `text`, tuples flattened.

    Example:
        >>> parse_shapes("(bf16[2,3]{1,0:S(5)}, u32[])")[0]
        Shape(dtype='bf16', dims=(2, 3), memory_space=5)
    """
    return tuple(_shape(*found.groups()) for found in _ARRAY.finditer(text))


def _shape(dtype: str, dims: str, layout: str | None) -> Shape:
    space = _MEMORY_SPACE.search(layout or "")
    sizes = tuple(int(n) for n in re.findall(r"\d+", dims))
    return Shape(dtype, sizes, int(space.group(1)) if space else 0)


def _blocks(text: str) -> Iterator[tuple[bool, str, list[str]]]:
    """Yield for each computation: whether it is the entry, its name, its lines."""
    header, lines = None, []
    for line in text.splitlines():
        if header is None:
            header = _HEADER.match(line)
            lines = []
        elif line.startswith("}"):
            yield bool(header.group(1)), header.group(2), lines
            header = None
        else:
            lines.append(line)


def _parse_computation(name: str, lines: list[str]) -> Computation:
    instructions: dict[str, Instruction] = {}
    root = None
    for line in lines:
        if (found := _INSTRUCTION.match(line)) is None:
            continue
        instruction = _parse_instruction(found.group(2), found.group(3))
        instructions[instruction.name] = instruction
        if found.group(1):
            root = instruction
    if root is None:
        raise HloError(f"Computation `{name}` has no ROOT instruction.")
    return Computation(name, instructions, root)


def _parse_instruction(name: str, text: str) -> Instruction:
    text = re.sub(r"/\*index=\d+\*/", "", text)
    type_end = _balanced(text, 0) if text.startswith("(") else text.find(" ")
    opcode = _OPCODE.match(text, type_end)
    if opcode is None:
        raise HloError(f"Cannot read the instruction `{name} = {text[:80]}`.")
    opening = opcode.end() - 1
    closing = _balanced(text, opening)
    inside = text[opening + 1 : closing - 1]
    names = (_OPERAND.search(part) for part in _split(inside))
    operands = tuple(found.group(1) for found in names if found)
    rest = text[closing:].removeprefix(", ")
    return Instruction(name, opcode.group(1), text[:type_end], operands, inside, rest)


def _balanced(text: str, start: int) -> int:
    """Return the position after the bracket that closes the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        if text[position] in _OPENING:
            depth += 1
        elif text[position] in _CLOSING:
            depth -= 1
            if depth == 0:
                return position + 1
    raise HloError(f"A bracket is not closed in `{text[start : start + 80]}`.")


def _end_of_part(text: str) -> int:
    """Return the position of the first comma outside brackets and quotes."""
    depth, quoted = 0, False
    for position, character in enumerate(text):
        if character == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
        elif character == "," and depth == 0:
            return position
    return len(text)


def _split(text: str) -> Iterator[str]:
    while text:
        end = _end_of_part(text)
        yield text[:end].strip()
        text = text[end + 1 :]
