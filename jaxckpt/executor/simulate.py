"""The simulator: steps through a list of actions and says what it takes, or why not.

It is the oracle of every list: generators are tested by it, and executors run nothing
that it has not accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxckpt.errors import ScheduleError
from jaxckpt.executor.actions import (
    Action,
    ActionList,
    Advance,
    Costs,
    Drop,
    Keep,
    Load,
    as_actions,
    check_costs,
    checked_slots,
)
from jaxckpt.executor.checks import STORAGES, check_number
from jaxckpt.policy import Policy
from jaxckpt.policy_algebra import Everything


@dataclass(frozen=True)
class Record:
    """What a legal list takes.

    Attributes:
        steps: The number of stages.
        forwards: How often a stage runs forward, those that leave residuals included.
            A stage that runs again only in part, by a policy, counts whole.
        forwards_of: The same for each stage.
        peak_slots: The most slots of the device in use at once.
        peak_slots_in: The same for each storage.
        slots_left: How many slots are still in use at the end, of all storages: no
            `Drop` has freed them.
        writes: Number of `Keep`s on the host or on disk.
        reads: Number of `Load`s from there.
        cost: The sum of the costs of all actions.
    """

    steps: int
    forwards: int
    forwards_of: tuple[int, ...]
    peak_slots: int
    peak_slots_in: Mapping[str, int]
    slots_left: int
    writes: int
    reads: int
    cost: float


def simulate(
    actions: Iterable[Action],
    *,
    steps: int | None = None,
    slots: int | Mapping[str, int] | None = None,
    costs: Costs | None = None,
) -> Record:
    """Step through actions; return what they take.

    Args:
        actions: An `ActionList`, or any sequence of actions.
        steps: The number of stages; None for the list's own.
        slots: How many slots there are: a number for the device, or one for each
            storage; None for the list's own.
        costs: What each action costs; None for the list's own.

    Raises:
        ScheduleError: An action is illegal (the first is named), or stages are not
            reversed when the list ends.

    Example:
        >>> from jaxckpt.executor import binomial
        >>> record = simulate(binomial(10, 3))
        >>> record.forwards, record.peak_slots, record.cost
        (25, 3, 35.0)
    """
    given = as_actions(actions, steps)
    costs = given.costs if costs is None else costs
    check_costs(costs)
    if steps is not None:
        check_number(steps, "steps", least=1)
        _check_depth(actions, given, steps)
    machine = Machine(given.steps, dict(_slots_of(given, slots)))
    _run_all(machine, given)
    return machine.record(costs)


def _slots_of(given: ActionList, slots: Any) -> tuple[tuple[str, int], ...]:
    return given.slots if slots is None else checked_slots(slots)


def _run_all(machine: Machine, actions: ActionList) -> None:
    for number, action in enumerate(actions):
        try:
            machine.run(action)
        except ScheduleError as error:
            raise ScheduleError(
                f"Action {number} of {len(actions)}, `{action}`, is illegal: {error}"
            ) from None
    machine.finish()


def _check_depth(actions: Iterable[Action], given: ActionList, steps: int) -> None:
    """Raise `ScheduleError` for a list that is made for another number of stages."""
    made_for = given.steps
    if not isinstance(actions, ActionList):
        made_for = as_actions(given.actions).steps
        try:
            _run_all(Machine(made_for), given)
        except ScheduleError:
            return  # it is illegal for any number
    if made_for != steps:
        raise ScheduleError(
            f"The list is made for {made_for} stages, and the chain has {steps}. Make "
            "it for the chain's depth."
        )


@dataclass
class Machine:
    """The state of a run: what is in the working memory and in the slots.

    Attributes:
        steps: The number of stages.
        limits: How many slots a storage has; any number for one that is not there.
        state: The index of the working state, or None.
        tape: The stage whose tape is loaded, or None.
        left: How many stages are not reversed yet: the cotangent is that of `x[left]`.
        held: What is in the slots of each storage: for an index None for a state, or
            the policy of a tape.
    """

    steps: int
    limits: Mapping[str, int] = field(default_factory=dict)
    state: int | None = 0
    tape: int | None = None
    left: int = -1
    held: dict[str, dict[int, Policy | None]] = field(
        default_factory=lambda: {storage: {} for storage in STORAGES}
    )

    def __post_init__(self) -> None:
        self.left = self.steps
        self._forwards = [0] * self.steps
        self._peaks: dict[str, int] = dict.fromkeys(STORAGES, 0)
        self._writes = self._reads = 0
        self._tape_policy: Policy | None = None

    def run(self, action: Action) -> None:
        """Do one action.

        Raises:
            ScheduleError: It is illegal here; the message says why.
        """
        if isinstance(action, Advance):
            self._advance(action.start, action.stop)
        elif isinstance(action, Keep):
            self._keep(action)
        elif isinstance(action, Load):
            self._load(action)
        elif isinstance(action, Drop):
            self._held(action)
            del self.held[action.storage][action.index]
        else:
            self._reverse(action.index)

    def finish(self) -> None:
        """Raise `ScheduleError` unless all stages are reversed."""
        if self.left:
            stages = f"stages 0-{self.left - 1} are" if self.left > 1 else "stage 0 is"
            raise ScheduleError(
                f"The list ends, and {stages} not reversed. Each stage needs its "
                "`Reverse`, from the last to the first."
            )

    def record(self, costs: Costs) -> Record:
        """Return what was run so far."""
        forwards = sum(self._forwards)
        cost = costs.forward * forwards + costs.backward * (self.steps - self.left)
        cost += costs.write * self._writes + costs.read * self._reads
        return Record(
            steps=self.steps,
            forwards=forwards,
            forwards_of=tuple(self._forwards),
            peak_slots=self._peaks["device"],
            peak_slots_in=dict(self._peaks),
            slots_left=sum(map(len, self.held.values())),
            writes=self._writes,
            reads=self._reads,
            cost=cost,
        )

    def _advance(self, start: int, stop: int) -> None:
        self._needs_state(start)
        if not start < stop <= self.steps:
            raise ScheduleError(
                f"it has to end behind stage {start}, at most at {self.steps}."
            )
        for stage in range(start, stop):
            self._forwards[stage] += 1
        self.state = stop

    def _keep(self, action: Keep) -> None:
        self._needs_state(action.index)
        if action.index == self.steps:
            raise ScheduleError("the chain's result is handed out, not kept.")
        slots = self.held[action.storage]
        if action.index in slots:
            raise ScheduleError(f"{_slot(action)} is in use already.")
        limit = self.limits.get(action.storage)
        if limit is not None and len(slots) >= limit:
            raise ScheduleError(
                f"all {limit} slots of the {action.storage} are in use, by "
                f"{sorted(slots)}."
                if limit
                else f"there are no slots of the {action.storage}."
            )
        if action.policy is not None:
            self._advance(action.index, action.index + 1)
        slots[action.index] = action.policy
        self._peaks[action.storage] = max(self._peaks[action.storage], len(slots))
        self._writes += action.storage != "device"

    def _load(self, action: Load) -> None:
        policy = self._held(action)
        is_state = policy is None
        self.state = action.index if is_state else None
        self.tape = None if is_state else action.index
        self._tape_policy = policy
        self._reads += action.storage != "device"

    def _reverse(self, index: int) -> None:
        if index != self.left - 1:
            if not self.left:
                raise ScheduleError("all stages are reversed already.")
            raise ScheduleError(f"stage {self.left - 1} is to be reversed next.")
        if self.tape != index:
            if self.state != index:
                raise ScheduleError(
                    f"it needs the tape of stage {index} or the state x{index}, and "
                    f"the working memory holds {self._working()}."
                )
            self._forwards[index] += 1
        elif not isinstance(self._tape_policy, Everything):
            self._forwards[index] += 1
        self.state = self.tape = None
        self.left -= 1

    def _needs_state(self, index: int) -> None:
        if self.state != index:
            raise ScheduleError(
                f"it needs the state x{index}, and the working memory holds "
                f"{self._working()}."
            )

    def _held(self, action: Load | Drop) -> Policy | None:
        slots = self.held[action.storage]
        if action.index not in slots:
            raise ScheduleError(
                f"{_slot(action)} is empty; the {action.storage} holds "
                f"{sorted(slots) or 'nothing'}."
            )
        return slots[action.index]

    def _working(self) -> str:
        if self.tape is not None:
            return f"the tape of stage {self.tape}"
        return "nothing" if self.state is None else f"x{self.state}"


def _slot(action: Keep | Load | Drop) -> str:
    return f"the {action.storage}'s slot of {action.index}"
