"""Add up the steps of a schedule, with transfers that run beside the arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxckpt.xla.traffic import Traffic

PRODUCT, ATTENTION, ELEMENTWISE = "products", "attention", "elementwise"
COPY, HOST_COPY, COLLECTIVE, UNKNOWN = "copies", "host_copies", "collectives", "unknown"

KINDS = (PRODUCT, ATTENTION, ELEMENTWISE, COPY, HOST_COPY, COLLECTIVE, UNKNOWN)

_LINK_OF_KIND = {
    ELEMENTWISE: "memory",
    COPY: "memory",
    HOST_COPY: "host",
    COLLECTIVE: "chips",
}


def no_seconds() -> dict[str, float]:
    """Return a table of no time for each kind of work."""
    return dict.fromkeys(KINDS, 0.0)


@dataclass
class Tally:
    """What some steps add up to.

    Attributes:
        seconds: By kind of work.
        memory_seconds: How long the device memory alone would need.
        unknown: What was priced without knowing its work, in order of appearance.
        flops: Of products and fused attention.
        traffic: Bytes moved.
    """

    seconds: dict[str, float] = field(default_factory=no_seconds)
    memory_seconds: float = 0.0
    unknown: dict[str, None] = field(default_factory=dict)
    flops: int = 0
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def total(self) -> float:
        """Seconds of all kinds."""
        return sum(self.seconds.values())

    def add(self, other: Tally, times: int = 1) -> None:
        """Add what `other` does, `times` times."""
        for kind, seconds in other.seconds.items():
            self.seconds[kind] += times * seconds
        self.memory_seconds += times * other.memory_seconds
        self.unknown |= other.unknown
        self.flops += times * other.flops
        moved = other.traffic
        self.traffic += Traffic(times * moved.device_bytes, times * moved.host_bytes)


@dataclass
class Schedule:
    """Steps one after the other, and transfers between a start and a wait.

    A transfer to the host or another chip proceeds with time. One within the device's
    memory proceeds only while the other steps leave the memory idle: behind a product,
    not behind an addition. Transfers of one link queue.
    """

    tally: Tally = field(default_factory=Tally)
    idle_memory_seconds: float = 0.0
    free_at: dict[str, float] = field(default_factory=dict)
    pending: dict[str, tuple[str, float]] = field(default_factory=dict)

    def do(self, step: Tally) -> None:
        """Run `step` to its end."""
        self.tally.add(step)
        self.idle_memory_seconds += max(0.0, step.total - step.memory_seconds)

    def start(self, name: str, step: Tally) -> None:
        """Start the transfer `step`; what cannot run beside others runs at once."""
        kinds = [kind for kind, seconds in step.seconds.items() if seconds > 0]
        if len(kinds) != 1 or kinds[0] not in _LINK_OF_KIND:
            self.do(step)
            return
        kind, link = kinds[0], _LINK_OF_KIND[kinds[0]]
        begin = max(self._clock(kind), self.free_at.get(link, 0.0))
        self.free_at[link] = begin + step.seconds[kind]
        self.pending[name] = kind, self.free_at[link]
        self.tally.add(dataclasses.replace(step, seconds=no_seconds()))

    def wait(self, names: Iterable[str]) -> None:
        """Wait for those of the transfers `names` that have been started."""
        for name in [name for name in names if name in self.pending]:
            kind, finish = self.pending.pop(name)
            waited = max(0.0, finish - self._clock(kind))
            self.tally.seconds[kind] += waited
            self.idle_memory_seconds += waited

    def rename(self, old: Iterable[str], new: str) -> None:
        """Let the started transfer among `old` be known as `new`."""
        for name in [name for name in old if name in self.pending]:
            self.pending[new] = self.pending.pop(name)

    def finish(self) -> Tally:
        """Wait for all that is still under way and return the sum."""
        self.wait(list(self.pending))
        return self.tally

    def _clock(self, kind: str) -> float:
        """Return how far the time has come in which the link of `kind` can work."""
        in_memory = _LINK_OF_KIND[kind] == "memory"
        return self.idle_memory_seconds if in_memory else self.tally.total
