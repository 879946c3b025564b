"""What linen and nnx stacks share: how a layer is called, and the active schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jaxckpt.errors import WorkloadError
from jaxckpt.layers import check_form
from jaxckpt.schedule import Schedule, as_schedule

# Part of the key of every trace, so that a jitted function is traced again for another.
_active = jax.make_user_context(None)


@dataclass(frozen=True)
class How:
    """How a stack runs its layers.

    Attributes:
        schedule: Which of them are rematerialised, and how.
        scan: Whether equal layers run in a loop.
        form: As for `run_layers`; None for the one that takes the least memory.
    """

    schedule: Schedule
    scan: bool = True
    form: str | None = None

    def now(self) -> How:
        """Return it with what the innermost `use` replaces."""
        active = _active.value
        if active is None:
            return self
        schedule, form = active
        return How(schedule, self.scan, self.form if form is None else form)


@contextlib.contextmanager
def use(schedule: Any, *, form: str | None = None) -> Iterator[Schedule]:
    """Give a schedule to every `Stack` that is called inside, in place of its own.

    Args:
        schedule: Whatever `jaxckpt.schedule.as_schedule` takes; None for no remat.
        form: The form to run it in (see `run_layers`); None for the Stack's own.

    Raises:
        ScheduleError: The schedule or the form is none.

    Example:
        >>> with use("every(4)") as schedule:
        ...     str(schedule)
        'every(4)'
    """
    rule = as_schedule(schedule)
    check_form(form)
    with _active((rule, form)):
        yield rule


def check_depth_of(variables: Any, num_layers: int, label: str) -> None:
    """Raise `WorkloadError` for a variable that is not one of so many layers."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables):
        layers = leaf.shape[0] if leaf.ndim else None
        if layers != num_layers:
            name = jax.tree_util.keystr(path)
            raise WorkloadError(
                f"A Stack of {num_layers} layers of {label} was given the variable "
                f"`{name}` of shape {tuple(leaf.shape)}. The leading axis of each "
                f"variable is that of the layers: {num_layers}."
            )


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
