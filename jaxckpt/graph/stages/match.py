"""What of the first layer stands for what of the second.

What comes before the first layer depends on the program's inputs as its own beginning
does. The two are told apart by following, operand by operand, the second layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxckpt import _jax
from jaxckpt.graph.stages.program import Program, variables
from jaxckpt.graph.stages.row import Row


def first_prefix(
    row: Row, start: int, cuts: Sequence[int], following: int
) -> list[int] | None:
    """Return what of the first layer stands before its first product, else None.

    Args:
        row: The program's row.
        start: Position of the first product of the first layer.
        cuts: Where the second layer begins, and those behind it.
        following: Position of the first product of the second layer.
    """
    image = core_image(row, start, cuts[0], following)
    wanted = row.numbers[cuts[0] : following]
    found = follow(row, image, wanted)
    return None if len(found) < len(wanted) else sorted(found.values())


def core_image(row: Row, start: int, stop: int, following: int) -> dict[int, int]:
    """Return the equation of the first layer for each of the second, where they agree.

    Args:
        row: The program's row.
        start: Position of the first product of the first layer.
        stop: Where the first layer ends.
        following: Position of the first product of the second layer.
    """
    image = {}
    for one, other in zip(
        row.numbers[following : following + stop - start],
        row.numbers[start:stop],
        strict=False,
    ):
        if row.keys[one] == row.keys[other]:
            image[one] = other
    return image


def follow(row: Row, image: dict[int, int], wanted: Sequence[int]) -> dict[int, int]:
    """Return what stands in the first layer for equations of the second.

    An equation stands for another where one that reads it stands for one that reads the
    other, in the same operand.

    Args:
        row: The program's row.
        image: What is known already.
        wanted: Equations of the second layer, in order.
    """
    program = row.program
    known = dict(image)
    found = {}
    for number in reversed(wanted):
        other = next(_operands(program, number, known), None)
        if other is None or row.keys[other] != row.keys[number]:
            continue
        known[number] = found[number] = other
    return found


def _operands(program: Program, number: int, known: dict[int, int]) -> Iterator[int]:
    """Yield what makes the operand that stands for what an equation makes."""
    made = program.eqns[number].outvars
    for reader in program.readers[number]:
        if reader not in known:
            continue
        one, other = program.eqns[reader], program.eqns[known[reader]]
        for atom, counterpart in zip(one.invars, other.invars, strict=True):
            is_made = not isinstance(atom, _jax.Literal) and atom in made
            if is_made and variables([counterpart]) and counterpart in program.maker:
                yield program.maker[counterpart]
