"""The picture of a list of actions, in the form of a schedule's.

A line is a pass: what runs forward between two loads. Its marks say what stays of each
stage, here called layer, when the pass has ended: `*` its input, in a slot of the
device, `+` its input and what its policy keeps; `=` its tape, or it is reversed at
once; `.` nothing. `h` and `d` are inputs on the host and on disk, `H` and `D` tapes
there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxckpt.executor.actions import Action, ActionList, Costs, Keep, Load, Reverse
from jaxckpt.executor.simulate import Machine, simulate
from jaxckpt.policy import Policy
from jaxckpt.policy_algebra import Everything
from jaxckpt.schedule_picture import Pass, draw_passes

_STATES = {"device": "*", "host": "h", "disk": "d"}
_TAPES = {"device": "+", "host": "H", "disk": "D"}


def draw(actions: ActionList) -> str:
    """Return the picture as lines of at most 80 columns.

    Raises:
        ScheduleError: The list is illegal.

    Example:
        >>> from jaxckpt.executor.revolve import mixed
        >>> print(draw(mixed(5, 2)))
        18 actions with 2 device slots on 5 layers
          forward   *..==   * keeps the layer's input, = everything, . nothing
        backward runs again, in order:
                    ===     layers 0-2
        1 layer inputs kept; 8 layer forwards: 5 forward, 3 again
    """
    total = simulate(actions).forwards
    machine = Machine(actions.steps)
    forward, *again = (_run(machine, part) for part in _between_loads(actions))
    passes = [one for one in again if one is not None]
    assert forward is not None
    return draw_passes(
        _title(actions), forward.marks, passes, _policies(actions), total
    )


def _title(actions: ActionList) -> str:
    slots = " and ".join(f"{count} {storage}" for storage, count in actions.slots)
    return f"{len(actions)} actions" + (f" with {slots} slots" if slots else "")


def _policies(actions: Iterable[Action]) -> list[Policy]:
    """Return the policies that the picture does not show by its marks, each once."""
    kept = (a.policy for a in actions if isinstance(a, Keep) and a.policy is not None)
    return [p for p in dict.fromkeys(kept) if not isinstance(p, Everything)]


def _between_loads(actions: ActionList) -> Iterator[list[Action]]:
    """Yield the actions up to each load, those of the forward pass as one."""
    part: list[Action] = []
    end = actions.forward_length
    for number, action in enumerate(actions):
        if isinstance(action, Load) and number >= end:
            yield part
            part = []
        part.append(action)
    yield part


def _run(machine: Machine, part: Iterable[Action]) -> Pass | None:
    """Run actions on a machine; return their pass, if anything runs forward."""
    before = _forwards(machine)
    for action in part:
        machine.run(action)
    after = _forwards(machine)
    ran = [stage for stage, count in enumerate(after) if count > before[stage]]
    if not ran:
        return None
    reversed_ = {action.index for action in part if isinstance(action, Reverse)}
    stages = range(ran[0], ran[-1] + 1)
    marks = ("=" if i in reversed_ else _mark(machine, i) for i in stages)
    return Pass(ran[0], "".join(marks))


def _forwards(machine: Machine) -> tuple[int, ...]:
    return machine.record(Costs()).forwards_of


def _mark(machine: Machine, stage: int) -> str:
    """Return the mark of what is in the slots of a stage."""
    for storage, slots in machine.held.items():
        if stage in slots:
            policy = slots[stage]
            if policy is None:
                return _STATES[storage]
            is_whole = storage == "device" and isinstance(policy, Everything)
            return "=" if is_whole else _TAPES[storage]
    return "."
