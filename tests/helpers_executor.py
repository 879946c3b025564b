"""For tests of action lists: random legal ones, a symbolic executor, brute force."""

import copy
import heapq

from jaxckpt.errors import ScheduleError
from jaxckpt.executor.actions import ActionList, Advance, Drop, Keep, Load, Reverse
from jaxckpt.executor.interpret import Interpreter
from jaxckpt.executor.simulate import Machine
from jaxckpt.policy import save_everything, save_nothing
from jaxckpt.policy_algebra import Everything


def random_actions(steps, rng, storages=("device",), tapes=True):
    """Return a random legal list, redundant keeps, loads and advances in it.

    `rng` is a `random.Random`; with `tapes`, slots also hold what `save_everything()`
    and `save_nothing()` keep of a stage. There is no limit on slots.
    """
    machine, actions = Machine(steps), []
    while machine.left:
        if rng.random() < 0.4:
            action = _random_action(machine, rng, storages, tapes)
        else:
            action = _next_action(machine, storages)
        if _can_finish_after(machine, action):
            machine.run(action)
            actions.append(action)
    kept = [Drop(i, storage) for storage, i in _slots(machine)]
    return ActionList([*actions, *(d for d in kept if rng.random() < 0.5)], steps)


def _slots(machine):
    return [(s, i) for s, slots in machine.held.items() for i in sorted(slots)]


def _random_action(machine, rng, storages, tapes):
    found = [kind(i, s) for s, i in _slots(machine) for kind in (Load, Drop)]
    x = machine.state
    if x is not None and x < machine.steps:
        policies = [None, save_everything(), save_nothing()] if tapes else [None]
        found += [Keep(x, rng.choice(storages), rng.choice(policies)) for _ in range(3)]
        found += [Advance(x, rng.randint(x + 1, machine.steps))]
    return rng.choice(found or [None])


def _next_action(machine, storages):
    """Return an action of the shortest way to the next reverse that loses nothing."""
    x, due = machine.state, machine.left - 1
    if due in (x, machine.tape):
        return Reverse(due)
    if x is not None and x < due:
        ways = [Advance(x, due), *(Keep(x, s) for s in storages), Advance(x, x + 1)]
        return next(way for way in ways if _can_finish_after(machine, way))
    slots = [(i, s) for s, i in _slots(machine) if _reaches(machine, s, i, due)]
    return Load(*max(slots))


def _reaches(machine, storage, index, stage):
    is_state = machine.held[storage][index] is None
    return index <= stage if is_state else index == stage


def _can_finish_after(machine, action):
    """Return whether an action is legal and leaves each stage what reverses it."""
    if action is None:
        return False
    after = copy.deepcopy(machine)
    try:
        after.run(action)
    except ScheduleError:
        return False
    x = after.steps if after.state is None else after.state
    return all(
        x <= stage
        or after.tape == stage == after.left - 1
        or any(_reaches(after, s, i, stage) for s, i in _slots(after))
        for stage in range(after.left)
    )


class Symbolic(Interpreter):
    """Runs a list with the index of a state in its place; checks what stages get."""

    def __init__(self, actions):
        super().__init__(0)
        self.forwards, self.reversed = 0, []
        assert self.run_forward(actions) == actions.steps
        self.run(actions[actions.forward_length :])
        assert self.reversed == list(reversed(range(actions.steps)))

    def forward(self, start, stop, state):
        assert state == start
        self.forwards += stop - start
        return stop

    def taped(self, index, state, policy):
        return self.forward(index, index + 1, state), (index, policy)

    def backward(self, index, tape):
        stage, policy = tape
        assert stage == index
        self.forwards += not isinstance(policy, Everything)
        self.reversed.append(index)


def least_cost(
    steps, device, host=0, *, write=0.0, read=0.0, backward=1.0, tapes=False
):
    """Return the least cost of any legal list, found by trying all (Dijkstra).

    What a machine is in: its working state (or None), how many stages are left, and
    what the device holds of states and of tapes, and the host of states.
    """
    start = (0, steps, frozenset(), frozenset(), frozenset())
    costs, heap, number = {start: 0.0}, [(0.0, 0, start)], 1
    while heap:
        cost, _, now = heapq.heappop(heap)
        if now[1] == 0:
            return cost
        if cost > costs[now]:
            continue
        for price, after in _moves(now, device, host, write, read, backward, tapes):
            if cost + price < costs.get(after, float("inf")):
                costs[after] = cost + price
                heapq.heappush(heap, (cost + price, number, after))
                number += 1
    return None


def _moves(now, device, host, write, read, backward, tapes):
    """Yield what can be done and its cost; a stage forward costs 1."""
    x, left, states, taped, on_host = now
    if x == left - 1:
        # What is kept of a stage behind is of no use: it is dropped at once.
        rest = [frozenset(i for i in held if i < x) for held in now[2:]]
        yield 1 + backward, (None, x, *rest)
    if left - 1 in taped:
        yield backward, (None, left - 1, states, taped - {left - 1}, on_host)
    if x is not None and x < left:
        room = len(states) + len(taped) < device and x not in states | taped
        yield 1, (x + 1, left, *now[2:])
        if room:
            yield 0, (x, left, states | {x}, taped, on_host)
        if room and tapes:
            yield 1, (x + 1, left, states, taped | {x}, on_host)
        if len(on_host) < host and x not in on_host:
            yield write, (x, left, states, taped, on_host | {x})
    for i in states:
        yield 0, (i, *now[1:])
        yield 0, (x, left, states - {i}, taped, on_host)
    for i in taped:
        yield 0, (x, left, states, taped - {i}, on_host)
    for i in on_host:
        yield read, (i, *now[1:])
        yield 0, (x, left, states, taped, on_host - {i})
