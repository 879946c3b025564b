"""What all executors share: actions over real values instead of counted ones."""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax

from jaxckpt.executor.actions import (
    Action,
    ActionList,
    Advance,
    Drop,
    Keep,
    Load,
    Reverse,
)
from jaxckpt.policy import Policy, save_everything


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["kept"], meta_fields=["policy"]
)
@dataclass(frozen=True)
class KeptTape:
    """What the backward run of a stage reads.

    Attributes:
        kept: The arrays.
        policy: What was kept besides the stage's input.
    """

    kept: list[Any]
    policy: Policy


@dataclass(frozen=True)
class Held:
    """What a slot holds.

    Attributes:
        value: A state, or a tape, as `put` returned it.
        is_tape: Which of the two.
    """

    value: Any
    is_tape: bool


class Interpreter(abc.ABC):
    """Runs actions that the simulator has accepted.

    Args:
        state: x0.

    Attributes:
        state: The working state, or None.
        tape: The loaded tape, or None.
        slots: What is kept, by storage and index.
    """

    def __init__(self, state: Any) -> None:
        self.state = state
        self.tape: Any = None
        self.slots: dict[tuple[str, int], Held] = {}

    @abc.abstractmethod
    def forward(self, start: int, stop: int, state: Any) -> Any:
        """Run stages `start` to `stop - 1` forward; return the state behind them."""

    @abc.abstractmethod
    def taped(self, index: int, state: Any, policy: Policy) -> tuple[Any, Any]:
        """Run a stage forward; return the state behind it, and its tape."""

    @abc.abstractmethod
    def backward(self, index: int, tape: Any) -> None:
        """Run a stage backward from its tape."""

    def put(self, key: tuple[str, int], value: Any) -> Any:
        """Return what a slot holds for a value: the value moved to a storage."""
        return value

    def get(self, key: tuple[str, int], held: Any) -> Any:
        """Return the value that a slot holds, on the device."""
        return held

    def discard(self, key: tuple[str, int], held: Any) -> None:
        """Free what a slot holds."""
        del key, held

    def run_forward(self, actions: ActionList) -> Any:
        """Run the forward pass of a list; return `x[steps]`.

        Where the last stage runs forward only to be reversed, its tape stays loaded.
        """
        length = actions.forward_length
        self.run(actions[:length])
        if isinstance(actions[length], Reverse):
            state, self.state = self.state, None
            result, self.tape = self.taped(actions.steps - 1, state, save_everything())
            return result
        return self.state

    def run(self, actions: Iterable[Action]) -> None:
        """Run actions one after another."""
        for action in actions:
            self.run_action(action)

    def run_action(self, action: Action) -> None:
        """Run one action."""
        if isinstance(action, Advance):
            self.state = self.forward(action.start, action.stop, self.state)
        elif isinstance(action, Keep):
            self._keep(action)
        elif isinstance(action, Load):
            self._load(action)
        elif isinstance(action, Drop):
            key = action.storage, action.index
            self.discard(key, self.slots.pop(key).value)
        else:
            self._reverse(action.index)

    def _keep(self, action: Keep) -> None:
        key, value = (action.storage, action.index), self.state
        if action.policy is not None:
            self.state, value = self.taped(action.index, self.state, action.policy)
        self.slots[key] = Held(self.put(key, value), action.policy is not None)

    def _load(self, action: Load) -> None:
        self.state = self.tape = None  # frees them before the next one comes
        key = action.storage, action.index
        held = self.slots[key]
        value = self.get(key, held.value)
        self.state, self.tape = (None, value) if held.is_tape else (value, None)

    def _reverse(self, index: int) -> None:
        if self.tape is None:
            state, self.state = self.state, None
            self.tape = self.taped(index, state, save_everything())[1]
            del state
        tape, self.state, self.tape = self.tape, None, None
        self.backward(index, tape)
