"""What an instruction of a compiled module stands for in the program that was traced.

XLA keeps JAX's name stack and primitive with each instruction (`op_name`), but not with
what it adds itself: copies, loops' tuples, updates of stacked arrays. Those are
followed to what made their bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from jaxckpt.xla.peak_proto import Assignment, Node

FORWARD, BACKWARD, RECOMPUTED, OUTSIDE = "forward", "backward", "recomputed", "outside"

_MOVES = (
    "bitcast",
    "copy",
    "convert",
    "dynamic-slice",
    "optimization-barrier",
    "reduce-precision",
    "reshape",
    "slice",
    "transpose",
)
_PLACES = re.compile(
    r"(^|/)(while|body|cond|call_exported|closed_call|eval_jaxpr|checkpoint"
    r"|rematted_computation|jit\([^/]*\))?$"
)
_MOVED = re.compile(
    r"(^|/)(dynamic_update_slice|dynamic_slice|broadcast_in_dim|reshape|transpose"
    r"|squeeze|slice|copy|reduce_precision)$"
)
_FOLLOWED = 100


@dataclass(frozen=True)
class Origin:
    """What made some bytes.

    Attributes:
        op_name: Name stack and primitive of what computed them.
        phase: The part of a training step in which they were made, or in which a part
            was taken out of them.
    """

    op_name: str
    phase: str


def phase(op_name: str) -> str:
    """Return the part of a training step that an operation belongs to.

    Example:
        >>> phase("jit(step)/jvp(mlp)/dot_general")
        'forward'
        >>> phase("jit(step)/transpose(jvp(mlp))/dot_general")
        'backward'
        >>> phase("jit(step)/transpose(jvp(mlp))/rematted_computation/dot_general")
        'recomputed'
        >>> phase("jit(step)/sub")
        'outside'
    """
    found = OUTSIDE
    for part in op_name.split("/"):
        if "transpose(" in part:
            found = BACKWARD
        elif part == "rematted_computation":
            found = RECOMPUTED
        elif "jvp(" in part:
            found = FORWARD if found in (OUTSIDE, FORWARD) else RECOMPUTED
    return found


class Origins:
    """Follows instructions of one module to the operations of the program."""

    def __init__(self, module: Assignment) -> None:
        self._module = module
        self._known: dict[tuple[int, tuple[int, ...]], Origin] = {}

    def of(self, node: int, index: tuple[int, ...] = ()) -> Origin:
        """Return what made a part of an instruction's result.

        Args:
            node: Id of the instruction.
            index: Which part, of a tuple.
        """
        key = node, index
        if key not in self._known:
            self._known[key] = self._follow(node, index)
        return self._known[key]

    def _follow(self, node: int, index: tuple[int, ...]) -> Origin:
        first, cut = "", ""
        for _ in range(_FOLLOWED):
            found = self._module.nodes[node]
            first = first or found.op_name
            if found.opcode == "parameter" and found.op_name:  # the program's own
                return Origin(found.op_name, phase(cut or first))
            if _computes(found):
                return Origin(found.op_name, phase(cut or found.op_name))
            if found.opcode in ("dynamic-slice", "slice"):
                cut = cut or found.op_name
            step = self._before(node, found, index)
            if step is None:
                break
            node, index = step
        return Origin(first, phase(cut or first))

    def _before(
        self, node: int, found: Node, index: tuple[int, ...]
    ) -> tuple[int, tuple[int, ...]] | None:
        """Return the instruction, and the part of it, whose bytes these are."""
        match found.opcode:
            case "get-tuple-element":
                return found.operands[0], (found.index, *index)
            case "tuple":
                return (found.operands[index[0]], index[1:]) if index else None
            case "fusion" | "while" | "call":
                return self._result(found), index
            case "parameter":
                return self._given(node, index)
            case "dynamic-update-slice":
                return found.operands[1], index
        if found.opcode in _MOVES and found.operands:
            return found.operands[0], index
        return None

    def _result(self, caller: Node) -> int:
        """Return the result of the computation that makes what `caller` returns."""
        roots = [self._module.bodies[called].root for called in caller.called]
        if caller.opcode == "while":  # the other one is the condition
            return next(r for r in roots if self._module.nodes[r].opcode == "tuple")
        return roots[0]

    def _given(
        self, parameter: int, index: tuple[int, ...]
    ) -> tuple[int, tuple[int, ...]] | None:
        """Return what a parameter is given; by a loop, what it begins with."""
        home = self._home[parameter]
        caller = self._callers.get(home)
        if caller is None:
            return None
        operands = self._module.nodes[caller].operands
        number = self._module.bodies[home].parameters.index(parameter)
        return (operands[number], index) if number < len(operands) else None

    @cached_property
    def _home(self) -> dict[int, int]:
        bodies = self._module.bodies.items()
        return {node: body for body, found in bodies for node in found.nodes}

    @cached_property
    def _callers(self) -> dict[int, int]:
        nodes = self._module.nodes.items()
        return {body: node for node, found in nodes for body in found.called}


def _computes(node: Node) -> bool:
    """Return whether an instruction's name says what computed its bytes."""
    if node.opcode == "fusion" or _PLACES.search(node.op_name):
        return False
    moves = node.opcode in _MOVES or node.opcode == "dynamic-update-slice"
    return not (moves and _MOVED.search(node.op_name))
