"""A chain as text: one line for each run of equal stages."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxckpt.graph.stages import Chain, Stage


def chain_text(chain: Chain) -> str:
    """Return the chain as a table."""
    rows = [("stage", "layers", "FLOPs a layer", "bytes across its start")]
    of = {id(s): stack.name for stack in chain.stacks for s in stack.stages}
    for _, group in groupby(chain.stages, key=lambda s: (of.get(id(s)), s.kind)):
        rows.append(_row(list(group)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0])]
        cells += [c.rjust(w) for c, w in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def _row(group: list[Stage]) -> tuple[str, str, str, str]:
    first, last = group[0], group[-1]
    name = first.name
    if len(group) > 1:
        name = f"{first.name} .. {last.name}"
    layers = sum(stage.layers for stage in group)
    most = max(stage.carry_bytes for stage in group)
    return name, f"x {layers}", f"{first.flops:.3g}", _amount(most)


def _amount(bytes_: int) -> str:
    """Return bytes as people read them.

    Example:
        >>> _amount(1000), _amount(3 * 2**20)
        ('1000 B', '3.00 MiB')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if bytes_ >= 2**power:
            return f"{bytes_ / 2**power:.2f} {unit}"
    return f"{bytes_} B"
