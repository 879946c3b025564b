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

from jaxckpt.errors import ScheduleError
from jaxckpt.executor.checks import check_cost, check_number, check_storage
from jaxckpt.policy import Policy
from jaxckpt.policy_algebra import Everything
from jaxckpt.schedule_tree import policy_text


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

    def __post_init__(self) -> None:
        check_number(self.start, "start", least=0)
        check_number(self.stop, "stop", least=0)

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
        _check_slot(self.index, self.storage)
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

    def __post_init__(self) -> None:
        _check_slot(self.index, self.storage)

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

    def __post_init__(self) -> None:
        _check_slot(self.index, self.storage)

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

    def __post_init__(self) -> None:
        check_number(self.index, "index", least=0)

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


@dataclass(frozen=True, repr=False)
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
        object.__setattr__(self, "actions", checked_actions(self.actions))
        check_number(self.steps, "steps", least=1)
        object.__setattr__(self, "slots", checked_slots(self.slots))
        check_costs(self.costs)

    def __repr__(self) -> str:
        slots = f", slots={dict(self.slots)}" if self.slots else ""
        return f"<ActionList of {len(self)} actions, steps={self.steps}{slots}>"

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


def storage_of(action: Action) -> str:
    """Return where an action keeps, loads or drops something: else the device.

    Example:
        >>> storage_of(Keep(0, "host")), storage_of(Advance(0, 2))
        ('host', 'device')
    """
    return getattr(action, "storage", "device")


def _check_slot(index: int, storage: str) -> None:
    check_number(index, "index", least=0)
    check_storage(storage)


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
    found = checked_actions(actions)
    if steps is None:
        reversed_ = [a.index + 1 for a in found if isinstance(a, Reverse)]
        ends = [_end(a) or 0 for a in found if isinstance(a, (Advance, Keep))]
        steps = max([1, *reversed_, *ends])
    return ActionList(found, steps)


def checked_actions(given: Any) -> tuple[Action, ...]:
    """Return any sequence of actions as a tuple; raise `ScheduleError` for others."""
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise ScheduleError(
            f"`actions={given!r}` is no list of actions. Make one by "
            "`executor.binomial(steps, slots)` and the like, or of `executor.Keep`, "
            "`Advance`, `Load`, `Drop` and `Reverse`."
        )
    actions = tuple(given)
    for number, action in enumerate(actions):
        if not isinstance(action, KINDS):
            raise ScheduleError(
                f"Item {number} of the list, `{action!r}`, is no action. Use "
                f"{', '.join(f'`{kind.__name__}`' for kind in KINDS)}."
            )
    return actions


def checked_slots(given: Any) -> tuple[tuple[str, int], ...]:
    """Return slots as pairs of a storage and a number; raise for anything else."""
    pairs: tuple[Any, ...] = (given,)
    if isinstance(given, Mapping):
        pairs = tuple(given.items())
    elif isinstance(given, int):
        pairs = (("device", given),)
    elif isinstance(given, Iterable):
        pairs = tuple(given)
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ScheduleError(
                f"`slots={given!r}` says of no storage how many slots it has. Give the "
                "device's number of slots, or "
                '`{"device": 2, "host": 4}`.'
            )
        check_storage(pair[0])
        check_number(pair[1], f"slots[{pair[0]!r}]", least=0)
    return pairs


def check_costs(given: object) -> None:
    """Raise `ScheduleError` for what are no costs."""
    if not isinstance(given, Costs):
        raise ScheduleError(
            f"`costs={given!r}` is no `Costs`. Use `executor.Costs(write=2.0, "
            "read=2.0)`."
        )
