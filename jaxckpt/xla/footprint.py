"""Bytes by category of one compiled program, as XLA's buffer assignment counts them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_CATEGORIES = ("argument", "output", "temp", "alias")


@dataclass(frozen=True)
class Footprint:
    """What one compiled program occupies in memory while it runs.

    Attributes:
        argument_bytes: Arguments, on the device.
        output_bytes: Results, on the device.
        temp_bytes: Everything between, on the device.
        alias_bytes: Results that reuse the memory of donated arguments.
        host_bytes: Host memory that the program uses: its own arguments, results and
            temporaries there, less those that share memory.

    Example:
        >>> Footprint(100, 60, 40, 50).peak_bytes
        150
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    host_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Device bytes of the whole program: `argument + output + temp - alias`."""
        used = self.argument_bytes + self.output_bytes + self.temp_bytes
        return used - self.alias_bytes


def read_stats(stats: Any) -> dict[str, int]:
    """Return the byte counts of a compiled program's `memory_analysis()`, by name."""
    names = [f"{side}{name}" for side in ("", "host_") for name in _CATEGORIES]
    return {name: int(getattr(stats, f"{name}_size_in_bytes", 0)) for name in names}


def footprint_from_stats(stats: Mapping[str, int]) -> Footprint:
    """Return the footprint in `stats`, as `read_stats` names them."""
    host = {name: stats[f"host_{name}"] for name in _CATEGORIES}
    return Footprint(
        **{f"{name}_bytes": stats[name] for name in _CATEGORIES},
        host_bytes=host["argument"] + host["output"] + host["temp"] - host["alias"],
    )
