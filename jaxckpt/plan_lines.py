"""The text of a schedule over several lines, so that two of them compare well."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from jaxckpt.errors import JaxckptError, PlanError
from jaxckpt.schedule import Schedule, parse_schedule, tree
from jaxckpt.schedule_text import split_at

_WIDTH = 64
_MOST_CHARACTERS = 2**16
_CALL = re.compile(r"([^(\"']*\w)\((.*)\)", re.DOTALL)


def to_lines(schedule: Schedule, num_layers: int | None) -> list[str]:
    r"""Return a schedule as lines of the text that `parse_schedule` reads.

    A schedule of a class without a text of its own becomes the tree that it makes.

    Args:
        schedule: The schedule.
        num_layers: The depth of its stack, where that is known.

    Raises:
        PlanError: It has no text, and the depth is not known.

    Example:
        >>> rule = "Segment(Remat(save(query_proj) | offload(context), 2), 4 * Keep(1))"
        >>> print("\n".join(to_lines(parse_schedule(f"{rule}, Keep(1)"), None)))
        Segment(
          Remat(save(query_proj) | offload(context), 2),
          4 * Keep(1)
        ),
        Keep(1)
    """
    if not _has_text(schedule):
        if num_layers is None:
            raise PlanError(
                f"`{schedule}` is a schedule without a text, and the plan does not say "
                "how deep its stack is. Make the plan by `jaxckpt.plan_from`."
            )
        schedule = tree(*schedule.nodes(num_layers))
    return list(_broken(str(schedule)))


def from_lines(lines: Sequence[str]) -> Schedule:
    """Return the schedule that lines of text describe.

    Raises:
        PlanError: The text is too long.
        ScheduleError: It is no schedule.
        PolicyError: A policy inside it is none.
    """
    text = " ".join(line.strip() for line in lines)
    if len(text) > _MOST_CHARACTERS:
        raise PlanError(
            f"The schedule is longer than {_MOST_CHARACTERS} characters. Use "
            "`every(4)` and the like, and `3 * ...` for equal neighbours."
        )
    return parse_schedule(text)


def _has_text(schedule: Schedule) -> bool:
    try:
        return parse_schedule(str(schedule)) == schedule
    except JaxckptError:
        return False


def _broken(
    text: str, indent: str = "", start: str = "", end: str = ""
) -> Iterator[str]:
    """Yield a text in lines: whole where it fits, else its parts below each other."""
    text = text.strip()
    parts = split_at(text, ",")
    if len(parts) > 1:
        yield from _listed(parts, indent, end)
        return
    call, alternatives = _CALL.fullmatch(text), split_at(text, "|")
    if len(indent + start + text + end) <= _WIDTH:
        yield f"{indent}{start}{text}{end}"
    elif len(alternatives) > 1:
        first, *middle, last = alternatives
        yield from _broken(first, indent, start)
        for part in middle:
            yield from _broken(part, indent, "| ")
        yield from _broken(last, indent, "| ", end)
    elif call is not None and _encloses(call[2]):
        yield f"{indent}{start}{call[1]}("
        yield from _listed(split_at(call[2], ","), f"{indent}  ", "")
        yield f"{indent}){end}"
    else:
        yield f"{indent}{start}{text}{end}"


def _listed(parts: Sequence[str], indent: str, end: str) -> Iterator[str]:
    for i, part in enumerate(parts, start=1):
        yield from _broken(part, indent, end="," if i < len(parts) else end)


def _encloses(inside: str) -> bool:
    """Return whether parentheses around a text belong together: not `(a) - (b)`."""
    try:
        return bool(split_at(inside, ","))
    except JaxckptError:
        return False
