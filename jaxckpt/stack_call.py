"""What linen and nnx stacks share: how a layer is called, and the active schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from jaxckpt.errors import WorkloadError
from jaxckpt.schedule import Schedule, as_schedule

# Part of the key of every trace, so that a jitted function is traced again for another.
_active = jax.make_user_context(None)


@contextlib.contextmanager
def use(schedule: Any) -> Iterator[Schedule]:
    """Give a schedule to every `Stack` that is called inside, in place of its own.

    Args:
        schedule: Whatever `jaxckpt.schedule.as_schedule` takes; None for no remat.

    Example:
        >>> with use("every(4)") as schedule:
        ...     str(schedule)
        'every(4)'
    """
    rule = as_schedule(schedule)
    with _active(rule):
        yield rule


def active_schedule() -> Schedule | None:
    """Return the schedule of the innermost `use`, or None outside of any."""
    return _active.value


class LayerCall:
    """What a layer returns: the next carry, or a pair of it and an output.

    Args:
        carry: The first carry; a layer returns one of the same structure.
        label: How to call a layer in an error.
    """

    def __init__(self, carry: Any, label: str) -> None:
        self.tree = jax.tree.structure(carry)
        self.label = label
        self.has_output = False

    def pair(self, result: Any) -> tuple[Any, Any]:
        """Return carry and output of what a layer returned."""
        if jax.tree.structure(result) == self.tree:
            return result, None
        is_pair = isinstance(result, tuple) and len(result) == 2
        if is_pair and jax.tree.structure(result[0]) == self.tree:
            self.has_output = True
            return result
        raise WorkloadError(
            f"{self.label} was given a carry `{self.tree}` and returned "
            f"`{jax.tree.structure(result)}`. A layer of a Stack returns the next "
            "carry, of the same structure, or `(carry, output)`."
        )

    def result(self, carry: Any, outputs: Any) -> Any:
        """Return what the stack returns."""
        return (carry, outputs) if self.has_output else carry
