"""The two tables of `explain`: what is kept, and who holds memory at the peak."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from rich import box
from rich.markup import escape
from rich.table import Table

from jaxckpt.graph.residuals import Residual
from jaxckpt.graph.trace import Graph
from jaxckpt.xla.peak import Holder

_SMALL = 1 / 200  # rows below this share of all are summed up in one
_KEPT_COLUMNS, _HELD_COLUMNS, _LINE_COLUMNS = 21, 28, 20


@dataclass(frozen=True)
class Row:
    """Residuals of one name, decision and line, together.

    Attributes:
        name: Name, or what made them.
        bytes: Bytes of one layer.
        layers: In how many layers.
        total_bytes: `bytes * layers`, exactly.
        decision: `"save"` or `"offload"`.
        source: `file:line (function)`.
    """

    name: str
    bytes: int
    layers: int
    total_bytes: int
    decision: str
    source: str


def kept_rows(graph: Graph) -> tuple[Row, ...]:
    """Return the kept values, the largest first; arguments and views left out."""
    groups: dict[tuple[str, str, str], list[Residual]] = {}
    for residual in graph.residuals:
        if residual.held:
            key = (residual.label, residual.decision, residual.source)
            groups.setdefault(key, []).append(residual)
    rows = [_row(*key, group) for key, group in groups.items()]
    return tuple(sorted(rows, key=lambda row: -row.total_bytes))


def _row(name: str, decision: str, source: str, group: list[Residual]) -> Row:
    layers = sum(r.layers for r in group)
    total = sum(r.bytes for r in group)
    return Row(name, total // layers, layers, total, decision, source)


def kept_table(rows: tuple[Row, ...]) -> Table:
    """Return the table of kept values: bytes in MiB, what is small summed up."""
    table = _table("kept value", _KEPT_COLUMNS, ("MiB", "layers", "total MiB"))
    table.add_column("where", no_wrap=True)
    table.add_column("line", overflow="fold", max_width=_LINE_COLUMNS)
    large, rest = _split(rows, lambda row: row.total_bytes)
    for row in large:
        table.add_row(
            _name(row.name, _KEPT_COLUMNS),
            _mib(row.bytes),
            str(row.layers),
            _mib(row.total_bytes),
            "device" if row.decision == "save" else "host",
            _line(row.source),
        )
    if rest:
        small = sum(row.total_bytes for row in rest)
        table.add_row(f"{len(rest)} small ones", "", "", _mib(small), "", "")
    return table


def holder_table(holders: tuple[Holder, ...]) -> Table:
    """Return the table of what holds memory at the peak.

    Arguments of one tree are a row, and so is what is small.
    """
    table = _table("held by", _HELD_COLUMNS, ("MiB", "share"))
    table.add_column("what", no_wrap=True)
    table.add_column("line", overflow="fold", max_width=_LINE_COLUMNS)
    total = sum(holder.bytes for holder in holders) or 1
    rows = sorted(_joined(holders), key=lambda holder: -holder.bytes)
    large, rest = _split(rows, lambda row: row.bytes)
    for row in large:
        share = f"{100 * row.bytes / total:.1f} %"
        cells = _mib(row.bytes), share, row.kind, _line(row.source)
        table.add_row(_name(row.name, _HELD_COLUMNS), *cells)
    if rest:
        small = sum(row.bytes for row in rest)
        share = f"{100 * small / total:.1f} %"
        table.add_row(f"{len(rest)} small ones", _mib(small), share, "", "")
    return table


def _joined(holders: Iterable[Holder]) -> Iterator[Holder]:
    """Yield the holders, with the leaves of each tree of arguments as one."""
    trees: dict[str, list[Holder]] = {}
    for holder in holders:
        if holder.kind == "argument":
            trees.setdefault(_root(holder.name), []).append(holder)
        else:
            yield holder
    for name, leaves in trees.items():
        size, count = sum(x.bytes for x in leaves), sum(x.count for x in leaves)
        yield Holder(size, "argument", name, count, "")


def _root(path: str) -> str:
    """Return the tree that a leaf belongs to.

    Example:
        >>> _root("state.opt_state[0].mu['layers']"), _root("batch['inputs']")
        ('state.opt_state', 'batch')
    """
    return re.split(r"[\[(]", path)[0]


Entry = TypeVar("Entry", Row, Holder)


def _split(
    rows: Iterable[Entry], size: Callable[[Entry], int]
) -> tuple[list[Entry], list[Entry]]:
    """Return the rows, largest first, in two parts: the large ones, several small."""
    rows = list(rows)
    limit = _SMALL * sum(map(size, rows))
    count = sum(size(row) >= limit for row in rows)
    count += count == len(rows) - 1
    return rows[:count], rows[count:]


def _table(heading: str, width: int, numbers: tuple[str, ...]) -> Table:
    """Return an empty table of a name and numbers."""
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column(heading, overflow="fold", max_width=width)
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table


def _name(name: str, width: int) -> str:
    r"""Return a module path that fits: two parts or more, on two lines if need be.

    Example:
        >>> _name("GPT/layers/Block_0/attention_norm/mul", 26)
        '../attention_norm/mul'
        >>> _name("GPT/layers/Block_0/attention_norm/convert_element_type", 26)
        '../attention_norm/\n convert_element_type'
    """
    parts = name.split("/")
    if len(name) <= width or len(parts) < 2:
        return escape(name)
    kept = "/".join(parts[-2:])
    for part in reversed(parts[:-2]):
        if len(part) + len(kept) + 4 > width:
            break
        kept = f"{part}/{kept}"
    short = kept if len(kept) == len(name) else f"../{kept}"
    if len(short) > width:
        folder, _, operation = short.rpartition("/")
        short = f"{folder}/\n {operation}"
    return escape(short)


def _line(source: str) -> str:
    """Return file and line, without folders and function.

    Example:
        >>> _line("project/models/gpt.py:101 (Block._mlp)")
        'gpt.py:101'
    """
    return escape(source.partition(" (")[0].replace("\\", "/").rpartition("/")[2])


def _mib(amount: int) -> str:
    return f"{amount / 2**20:,.2f}"
