"""Optimal lists of actions: for one kind of slot, for tapes in slots, for two storages.

All three cut a chain alike: keep x0, advance k stages, do what is behind, load x0, and
do the first k stages again, with x0 in no slot or still in one. What is best to do, and
with which k, is a minimum over smaller chains; none depends on where a chain starts.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from jaxckpt.errors import ScheduleError
from jaxckpt.executor.actions import (
    ActionList,
    Advance,
    Costs,
    Drop,
    Keep,
    Load,
    Reverse,
)
from jaxckpt.executor.build import Parts, cut, solved
from jaxckpt.executor.checks import check_number
from jaxckpt.policy import save_everything
from jaxckpt.schedule_rules import first_part


def binomial(steps: int, slots: int) -> ActionList:
    """Return the actions with the fewest forwards when a slot holds a state.

    It runs `steps + t(steps, slots)` stages forward, t as `advances` gives it (Griewank
    and Walther, "Algorithm 799: Revolve", 2000).

    Args:
        steps: The number of stages.
        slots: How many states are kept at once, x0 included.

    Raises:
        ScheduleError: One of the two is no whole number of at least 1.

    Example:
        >>> print(binomial(4, 2))
        keep 0, advance 0, keep 1, advance 1-2, reverse 3, load 1, advance 1, reverse 2,
        load 1, drop 1, reverse 1, load 0, drop 0, reverse 0
    """
    check_number(steps, "steps", least=1)
    check_number(slots, "slots", least=1)

    def parts(start: int, length: int, free: int) -> Parts:
        if length == 1:
            return [Reverse(start)]
        first = first_part(length, free)
        behind = (start + first, length - first, free - 1)
        return cut(start, first, behind, (start, first, free))

    actions = solved((0, steps, slots), parts)
    return ActionList(actions, steps, {"device": slots})


def mixed(steps: int, slots: int) -> ActionList:
    """Return the actions with the fewest forwards when a slot holds a state or a tape.

    With M(l, c) forwards for l stages and c slots, M(1, c) = 1 and

        M(l, c) = min(1 + M(l - 1, c - 1), min_k k + M(l - k, c - 1) + M(k, c)):

    the tape of the first stage is kept, or its input, up to its load (Maddison, "On the
    implementation of checkpointing with high-level algorithmic differentiation", 2024).

    Args:
        steps: The number of stages.
        slots: How many states and tapes are kept at once; 0 does for one stage.

    Raises:
        ScheduleError: One of the two is no such number.

    Example:
        >>> print(mixed(3, 1))
        keep 0, advance 0-1, reverse 2, load 0, drop 0, keep all of 0, reverse 1, load
        0, drop 0, reverse 0
    """
    check_number(steps, "steps", least=1)
    check_number(slots, "slots", least=1 if steps > 1 else 0)
    useful = min(slots, steps - 1)
    runs = _mixed_forwards(steps, useful)

    def parts(start: int, length: int, free: int) -> Parts:
        if length == 1:
            return [Reverse(start)]
        ahead = np.arange(1, length)
        by_state = ahead + runs[length - 1 : 0 : -1, free - 1] + runs[1:length, free]
        if by_state.min() > 1 + runs[length - 1, free - 1]:
            tape = Keep(start, policy=save_everything())
            behind = (start + 1, length - 1, free - 1)
            return [tape, behind, Load(start), Drop(start), Reverse(start)]
        first = int(by_state.argmin()) + 1
        behind = (start + first, length - first, free - 1)
        return cut(start, first, behind, (start, first, free))

    actions = solved((0, steps, useful), parts)
    return ActionList(actions, steps, {"device": slots})


def _mixed_forwards(steps: int, slots: int) -> Float[np.ndarray, "lengths slots"]:
    """Return M(l, c) for all l and c up to these."""
    runs = np.full((steps + 1, slots + 1), np.inf)
    runs[1] = 1
    for length in range(2, steps + 1):
        ahead = np.arange(1, length)[:, None]
        by_state = ahead + runs[length - 1 : 0 : -1, :-1] + runs[1:length, 1:]
        runs[length, 1:] = np.minimum(by_state.min(0), 1 + runs[length - 1, :-1])
    return runs


def two_level(
    steps: int,
    device_slots: int,
    host_slots: int | None,
    write: float,
    read: float,
    *,
    forward: float = 1.0,
    backward: float = 1.0,
) -> ActionList:
    """Return the actions of least cost when a state is kept on the device or the host.

    The optimum of Herrmann and Pallez ("H-Revolve", ACM TOMS 46(2), 2020) for a storage
    that costs nothing and one that costs to write and read.

    Args:
        steps: The number of stages.
        device_slots: How many states are kept on the device at once.
        host_slots: The same on the host; None for any number.
        write: Cost of one `Keep` on the host.
        read: Cost of one `Load` from the host.
        forward: Cost of one stage forward.
        backward: Cost of one stage backward, after its forward.

    Raises:
        ScheduleError: A number or a cost is none, or there is no slot at all.

    Example:
        >>> from jaxckpt.executor.simulate import simulate
        >>> simulate(two_level(20, 2, 3, write=2.0, read=2.0)).cost
        90.0
    """
    check_number(steps, "steps", least=1)
    check_number(device_slots, "device_slots", least=0)
    slots = {"device": device_slots}
    if host_slots is not None:
        check_number(host_slots, "host_slots", least=0)
        slots["host"] = host_slots
    if steps > 1 and device_slots == host_slots == 0:
        raise ScheduleError(
            f"`device_slots=0` and `host_slots=0` leave no slot for x0, from which "
            f"{steps} stages are reversed. Give one of the two a slot."
        )
    costs = Costs(forward=forward, backward=backward, write=write, read=read)
    useful = None if host_slots is None else min(host_slots, steps - 1)
    levels = _TwoLevels(steps, min(device_slots, steps - 1), useful, costs)
    actions = solved(levels.chain, levels.parts)
    return ActionList(actions, steps, slots, costs)


class _TwoLevels:
    """Least costs of chains whose x0 is in the working memory.

    With d and h free slots, A(l, d, h) where x0 is in no slot (`alone`), and H(l, d, h)
    where it is in one more slot of the host (`on_host`):

        A(1, d, h) = forward + backward
        A(l, d, h) = min(min_k k forward + A(l - k, d - 1, h) + A(k, d, h),
                         write + H(l, d, h - 1))
        H(l, d, h) = min_k k forward + A(l - k, d, h) + read + B(k, d, h)
        B(l, d, h) = min(A(l, d, h + 1), H(l, d, h))

    Without a limit on the host's slots, h has one column, and a slot takes none.
    """

    def __init__(self, steps: int, device: int, host: int | None, costs: Costs) -> None:
        self.costs = costs
        self.slot = 0 if host is None else 1
        self.chain = (0, steps, device, host or 0, False)
        columns = 1 if host is None else host
        self.alone = np.full((steps + 1, device + 1, columns + self.slot), np.inf)
        self.on_host = np.full((steps + 1, device + 1, columns), np.inf)
        self.alone[1] = costs.forward + costs.backward
        for length in range(2, steps + 1):
            self._fill(length)

    def _fill(self, length: int) -> None:
        alone, on_host = self.alone, self.on_host
        columns, slot = on_host.shape[-1], self.slot
        ahead = np.arange(1, length)[:, None, None] * self.costs.forward
        behind = alone[length - 1 : 0 : -1]
        on_device = ahead + behind[:, :-1] + alone[1:length, 1:]
        alone[length, 1:] = on_device.min(0)
        again = np.minimum(alone[1:length, :, slot:], on_host[1:length])
        kept = ahead + behind[..., :columns] + self.costs.read + again
        on_host[length] = kept.min(0)
        written = self.costs.write + on_host[length]
        alone[length, :, slot:] = np.minimum(alone[length, :, slot:], written)

    def parts(
        self, start: int, length: int, device: int, host: int, kept: bool
    ) -> Parts:
        """Return what a chain is cut in; `kept` is whether the host has its x0."""
        if length == 1:
            return [Reverse(start)]
        if kept:
            return self._from_host(start, length, device, host)
        first, cost = self._best_on_device(length, device, host)
        left = host - self.slot
        if left >= 0 and cost > self.costs.write + self.on_host[length, device, left]:
            return [Keep(start, "host"), (start, length, device, left, True)]
        behind = (start + first, length - first, device - 1, host, False)
        return cut(start, first, behind, (start, first, device, host, False))

    def _best_on_device(self, length: int, device: int, host: int) -> tuple[int, float]:
        """Return the best k, and the cost, where x0 goes to a slot of the device."""
        if not device:
            return 0, np.inf
        ahead = np.arange(1, length) * self.costs.forward
        behind = self.alone[length - 1 : 0 : -1, device - 1, host]
        costs = ahead + behind + self.alone[1:length, device, host]
        return int(costs.argmin()) + 1, float(costs.min())

    def _from_host(self, start: int, length: int, device: int, host: int) -> Parts:
        """Return what a chain is cut in whose x0 is on the host."""
        ahead = np.arange(1, length) * self.costs.forward
        behind = self.alone[length - 1 : 0 : -1, device, host]
        dropped = self.alone[1:length, device, host + self.slot]
        kept = self.on_host[1:length, device, host]
        first = int((ahead + behind + np.minimum(dropped, kept)).argmin()) + 1
        rest: Parts = [(start, first, device, host, True)]
        if dropped[first - 1] < kept[first - 1]:
            again = (start, first, device, host + self.slot, False)
            rest = [Drop(start, "host"), again]
        split = start + first
        behind_it = (split, length - first, device, host, False)
        return [Advance(start, split), behind_it, Load(start, "host"), *rest]
