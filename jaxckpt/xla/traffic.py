"""Bytes that one instruction of optimized HLO reads and writes.

A fusion reads of each operand only what its results need, so a slice of a stacked array
costs the slice; and an update of a slice is done in place, so it costs the slice too.
Scanned layers depend on both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jaxckpt.xla.hlo import Computation, Instruction, Module, Shape

_SAME_DATA = ("bitcast", "copy", "reshape")
_PARTIAL_READS = ("dynamic-slice", "slice", "gather", "pad", "concatenate")
_WHOLE_READS = ("dot", "convolution", "sort", "custom-call", "fusion", "scatter")

# Calls of these end their results with a workspace, a row of bytes.
_LIBRARY_CALLS = ("__cublas$", "__cudnn$")
_WORKSPACE = ("s8", "u8")


@dataclass(frozen=True)
class Traffic:
    """Bytes read and written, by where they lie."""

    device_bytes: float = 0.0
    host_bytes: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.device_bytes + other.device_bytes, self.host_bytes + other.host_bytes
        )


def instruction_traffic(
    module: Module, computation: Computation, instruction: Instruction
) -> Traffic:
    """Return the bytes that `instruction` moves each time it runs."""
    operands = list(computation.operands(instruction))
    if instruction.opcode in ("fusion", "fusion-start"):
        (fused,) = module.callees(instruction)
        return _fusion_traffic(fused, [o.shapes for o in operands])
    return _single_traffic(instruction, operands)


def _fusion_traffic(fused: Computation, given: list[tuple[Shape, ...]]) -> Traffic:
    """Add what the fusion needs of each parameter to what it writes."""
    needs = _needed_elements(fused)
    total = Traffic()
    for parameter, shapes in zip(fused.parameters, given, strict=True):
        # The caller's shape says where the operand lies.
        for inner, outer in zip(parameter.shapes, shapes, strict=True):
            read = min(needs.get(parameter.name, 0), inner.elements)
            total += _moved(outer, read)
    for result in _results(fused):
        total += _written(fused, result)
    return total


def _results(fused: Computation) -> Iterator[Instruction]:
    """Yield the arrays that the fusion returns."""
    if fused.root.opcode == "tuple":
        yield from fused.operands(fused.root)
    else:
        yield fused.root


def _written(fused: Computation, result: Instruction) -> Traffic:
    updated = _look_through(fused, result)
    if (update := _update_of(fused, updated)) is not None:
        # A scatter combines: it reads what it changes.
        times = 2 if updated.opcode == "scatter" else 1
        return _moved(result.shape, times * update.shape.elements)
    return sum((_moved(shape, shape.elements) for shape in result.shapes), Traffic())


def _needed_elements(fused: Computation) -> dict[str, int | float]:
    """Return how many elements of each value the fusion's results need.

    Users come after producers, so one pass from the end sees all users of a value
    before the value; two users that need different parts add up.
    """
    needs: dict[str, int | float] = {}
    in_place = {_look_through(fused, result).name for result in _results(fused)}
    for result in _results(fused):
        needs[result.name] = result.shape.elements
    for user in reversed(fused.instructions.values()):
        needed = min(needs.get(user.name, 0), user.shape.elements)
        if user.opcode == "tuple" or needed == 0:
            continue
        for position, operand in enumerate(fused.operands(user)):
            more = _need_of_operand(fused, user, needed, position, operand)
            if position == 0 and user.name in in_place and _update_of(fused, user):
                more = 0
            needs[operand.name] = needs.get(operand.name, 0) + more
    return needs


def _need_of_operand(
    fused: Computation,
    user: Instruction,
    needed: int | float,
    position: int,
    operand: Instruction,
) -> int | float:
    """Return how many elements of `operand` it takes to make `needed` of `user`."""
    size = operand.shape.elements
    if (update := _update_of(fused, user)) is not None and position == 0:
        return max(0, needed - update.shape.elements)
    if user.opcode in _PARTIAL_READS or user.opcode == "dynamic-update-slice":
        return min(size, needed)
    if user.opcode in _WHOLE_READS:
        return size
    if user.opcode in ("reduce", "reduce-window"):
        return size * needed / max(1, user.shape.elements)
    return min(size, needed)


def _update_of(fused: Computation, instruction: Instruction) -> Instruction | None:
    """Return the part that an in-place update writes; None for other opcodes."""
    if instruction.opcode == "dynamic-update-slice":
        return fused.instructions[instruction.operands[1]]
    if instruction.opcode == "scatter" and len(instruction.operands) == 3:
        return fused.instructions[instruction.operands[2]]
    return None


def _look_through(fused: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode in _SAME_DATA:
        instruction = fused.instructions[instruction.operands[0]]
    return instruction


def _single_traffic(instruction: Instruction, operands: list[Instruction]) -> Traffic:
    """Return the bytes of an instruction that stands alone."""
    results = instruction.shapes
    if instruction.opcode.endswith("-start"):
        results = results[:1]
    if instruction.custom_call_target.startswith(_LIBRARY_CALLS):
        results = results[:-1] if results[-1].dtype in _WORKSPACE else results
    shapes = [shape for operand in operands for shape in operand.shapes]
    if instruction.opcode == "dynamic-update-slice":
        update = operands[1].shape
        return _moved(update, update.elements) + _moved(results[0], update.elements)
    if instruction.opcode == "scatter" and len(operands) == 3:
        update = operands[2].shape
        touched = _moved(results[0], update.elements)
        return _moved(update, update.elements) + touched + touched
    if instruction.opcode in ("dynamic-slice", "slice", "gather"):
        shapes = [Shape(shapes[0].dtype, results[0].dims, shapes[0].memory_space)]
    return sum((_moved(s, s.elements) for s in [*shapes, *results]), Traffic())


def _moved(shape: Shape, elements: int | float) -> Traffic:
    moved = shape.bytes * elements / max(1, shape.elements)
    return Traffic(host_bytes=moved) if shape.on_host else Traffic(moved)
