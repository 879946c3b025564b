"""Schedules as data: what an executor does, one action after another.

A chain of `steps` stages takes the state x0 to x1, ... and `x[steps]`. The executor has
a *working* memory for one state or one tape, and slots in three storages:

    Advance(i, j)   run stages i to j - 1 forward: the working state xi becomes xj
    Keep(i)         put the working state xi in a slot
    Keep(i, policy=p)
                    run stage i forward and put its *tape* in a slot: its input and
                    what the policy keeps of it; the working state becomes x[i + 1]
    Load(i)         make what the slot of i holds the working state (or tape); the slot
                    keeps it
    Drop(i)         free the slot of i
    Reverse(i)      run stage i backward, from its tape, or from the working state xi:
                    then the stage runs forward first and leaves its residuals

Stages are reversed from the last to the first, each once. The cotangent of `x[steps]`
is asked for when the list reverses the last stage: what stands before is the forward
pass.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from jaxckpt.errors import ScheduleError, did_you_mean
from jaxckpt.policy import Policy
from jaxckpt.policy_algebra import Everything
from jaxckpt.schedule_tree import policy_text

STORAGES = ("device", "host", "disk")
"""Where a slot can be. Only the device's are read and written at no cost."""


@dataclass(frozen=True)
class Advance:
    """Run stages forward and keep nothing of them.

    Attributes:
        start: The first stage; the working state is its input.
        stop: The stage behind the last; the working state becomes its input.

    Example:
        >>> str(Advance(0, 4))
        'advance 0-3'
    """

    start: int
    stop: int

    def __str__(self) -> str:
        last = self.stop - 1
        return f"advance {self.start}" + (f"-{last}" if last > self.start else "")


@dataclass(frozen=True)
class Keep:
    """Put the working state, or the tape of a stage that runs now, in a slot.

    Attributes:
        index: The stage whose input, or tape, is kept.
        storage: `"device"`, `"host"` or `"disk"`.
        policy: None for the stage's input alone. With a policy the stage runs forward,
            and the slot holds its input and what the policy keeps: all residuals
            under `save_everything()`.

    Example:
        >>> from jaxckpt.policy import save_everything
        >>> str(Keep(3)), str(Keep(3, "host")), str(Keep(2, policy=save_everything()))
        ('keep 3', 'keep 3 on host', 'keep all of 2')
    """

    index: int
    storage: str = "device"
    policy: Policy | None = None

    def __post_init__(self) -> None:
        if self.policy is not None and not isinstance(self.policy, Policy):
            raise ScheduleError(
                f"`policy={self.policy!r}` of `Keep` is no jaxckpt policy. Build one "
                "by `jaxckpt.save(...)` and the like, or use None for the input alone."
            )

    def __str__(self) -> str:
        what = ""
        if isinstance(self.policy, Everything):
            what = "all of "
        elif self.policy is not None:
            what = f"{policy_text(self.policy)} of "
        return f"keep {what}{self.index}{_on(self.storage)}"


@dataclass(frozen=True)
class Load:
    """Make what a slot holds the working state, or tape.

    Attributes:
        index: The stage whose input, or tape, is kept there.
        storage: Where.

    Example:
        >>> str(Load(3, "disk"))
        'load 3 from disk'
    """

    index: int
    storage: str = "device"

    def __str__(self) -> str:
        return f"load {self.index}{_on(self.storage, 'from')}"


@dataclass(frozen=True)
class Drop:
    """Free a slot.

    Attributes:
        index: The stage whose input, or tape, is kept there.
        storage: Where.

    Example:
        >>> str(Drop(3))
        'drop 3'
    """

    index: int
    storage: str = "device"

    def __str__(self) -> str:
        return f"drop {self.index}{_on(self.storage)}"


@dataclass(frozen=True)
class Reverse:
    """Run one stage backward, and forward before that unless its tape is loaded.

    Attributes:
        index: The stage.

    Example:
        >>> str(Reverse(3))
        'reverse 3'
    """

    index: int

    def __str__(self) -> str:
        return f"reverse {self.index}"


Action = Advance | Keep | Load | Drop | Reverse
KINDS = (Advance, Keep, Load, Drop, Reverse)


@dataclass(frozen=True)
class Costs:
    """What the actions cost, in any one unit.

    Attributes:
        forward: One stage forward.
        backward: One stage backward, after its forward.
        write: One `Keep` on the host or on disk.
        read: One `Load` from there.

    Example:
        >>> Costs(write=2.0, read=2.0).forward
        1.0
    """

    forward: float = 1.0
    backward: float = 1.0
    write: float = 0.0
    read: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "write", "read"):
            check_cost(getattr(self, name), name)


@dataclass(frozen=True)
class ActionList(Sequence[Action]):
    """Actions for a chain, as the generators return them: a frozen sequence.

    Attributes:
        actions: One after another.
        steps: The number of stages.
        slots: Pairs of a storage and how many slots it has; a storage that is not
            there has as many as are used.
        costs: What `simulate` adds up.

    Example:
        >>> actions = ActionList([Keep(0), Advance(0, 1), Reverse(1), Load(0),
        ...     Drop(0), Reverse(0)], steps=2)
        >>> print(actions)
        keep 0, advance 0, reverse 1, load 0, drop 0, reverse 0
    """

    actions: Any  # tuple[Action, ...] once made
    steps: int
    slots: Any = ()  # tuple[tuple[str, int], ...] once made
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        object.__setattr__(self, "actions", tuple(self.actions))
        check_number(self.steps, "steps", least=1)
        slots = self.slots.items() if isinstance(self.slots, Mapping) else self.slots
        object.__setattr__(self, "slots", tuple((s, n) for s, n in slots))
        for storage, count in self.slots:
            check_storage(storage)
            check_number(count, f"slots[{storage!r}]", least=0)
        for number, action in enumerate(self.actions):
            if not isinstance(action, KINDS):
                raise ScheduleError(
                    f"Action {number}, `{action!r}`, is none. Use "
                    f"{', '.join(f'`{kind.__name__}`' for kind in KINDS)}."
                )

    def __len__(self) -> int:
        return len(self.actions)

    def __iter__(self) -> Iterator[Action]:
        return iter(self.actions)

    @overload
    def __getitem__(self, index: int) -> Action: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Action]: ...
    def __getitem__(self, index: Any) -> Any:
        return self.actions[index]

    @property
    def forward_length(self) -> int:
        """How many of the actions are the forward pass.

        It ends where `x[steps]` is there for the first time, or before the reverse of
        the last stage, whose forward run is then the last of the forward pass.
        """
        for number, action in enumerate(self.actions):
            if isinstance(action, Reverse):
                return number
            if _end(action) == self.steps:
                return number + 1
        return len(self.actions)

    def draw(self) -> str:
        """Return the picture: what stays, and what the backward pass runs again."""
        from jaxckpt.executor.picture import draw

        return draw(self)

    def __str__(self) -> str:
        text = ", ".join(map(str, self.actions))
        return "\n".join(textwrap.wrap(text, 80, break_on_hyphens=False))


def _end(action: Action) -> int | None:
    """Return the working state that an action leaves by running forward."""
    if isinstance(action, Advance):
        return action.stop
    if isinstance(action, Keep) and action.policy is not None:
        return action.index + 1
    return None


def _on(storage: str, word: str = "on") -> str:
    return "" if storage == "device" else f" {word} {storage}"


def as_actions(actions: Iterable[Action], steps: int | None = None) -> ActionList:
    """Return any sequence of actions as an `ActionList`.

    Args:
        actions: The sequence.
        steps: The number of stages; None for that of an `ActionList`, else the least
            that the actions can be for.

    Raises:
        ScheduleError: There is none, or something else among them.

    Example:
        >>> as_actions([Reverse(1), Reverse(0)]).steps
        2
    """
    if isinstance(actions, ActionList):
        return actions
    if isinstance(actions, (str, bytes)) or not isinstance(actions, Iterable):
        raise ScheduleError(
            f"`actions={actions!r}` is no list of actions. Make one by "
            "`executor.binomial(steps, slots)` and the like, or of `executor.Keep`, "
            "`Advance`, `Load`, `Drop` and `Reverse`."
        )
    found = tuple(actions)
    if steps is None:
        reversed_ = [a.index + 1 for a in found if isinstance(a, Reverse)]
        ends = [_end(a) or 0 for a in found if isinstance(a, (Advance, Keep))]
        steps = max([1, *reversed_, *ends])
    return ActionList(found, steps)


def check_storage(storage: object) -> None:
    """Raise `ScheduleError` for a storage that there is not."""
    if storage not in STORAGES:
        hint = did_you_mean(str(storage), STORAGES)
        raise ScheduleError(f"`storage={storage!r}` is not known. {hint}")


def check_number(value: object, name: str, *, least: int) -> None:
    """Raise `ScheduleError` unless a value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ScheduleError(
            f"`{name}={value!r}` is not a whole number of at least {least}."
        )


def check_cost(value: Any, name: str) -> None:
    """Raise `ScheduleError` unless a value is a finite number of at least 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value < float("inf"):
        raise ScheduleError(
            f"`{name}={value!r}` is not a cost. Use a finite number of at least 0."
        )
