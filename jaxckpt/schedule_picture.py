"""The picture of a schedule: what stays of each layer, and what runs again, in order.

One character is one layer: `*` keeps its input, `+` its input and what its policy
keeps, `=` everything; `.` runs and keeps nothing. Lists of actions have marks for other
storages besides.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxckpt.policy_algebra import Nothing, Policy
from jaxckpt.schedule_tree import (
    Keep,
    Node,
    Remat,
    Segment,
    count_forwards,
    count_layers,
    keeps_input_only,
    policies_in,
    policy_text,
    unread_layers,
)

_MEANINGS = {
    "*": "keeps the layer's input",
    "+": "its input and what a policy keeps",
    "-": "what a policy keeps",
    "h": "the layer's input on the host",
    "d": "the layer's input on disk",
    "=": "everything",
    "H": "a tape on the host",
    "D": "a tape on disk",
    ".": "nothing",
}
_INPUTS = "*+hd"
_NO_BREAK = "\N{NO-BREAK SPACE}"
_WIDTH = 60  # layers in one line
_WIDTH_WITH_LABEL = 53  # and what to call them behind
_FIRST_LINES = 3  # of passes that are alike
_MOST_LINES = 40


@dataclass(frozen=True)
class Pass:
    """Layers that run one after another, in the forward pass or again.

    Attributes:
        start: The first layer.
        marks: What stays of each, a character a layer.
        unread: How many layers at the end do not run: at most the input of the first
            of them is kept.
    """

    start: int
    marks: str
    unread: int = 0

    @property
    def stop(self) -> int:
        """The layer behind the last."""
        return self.start + len(self.marks)

    @property
    def label(self) -> str:
        """The layers that run, as text."""
        last = self.stop - self.unread - 1
        if last < self.start:
            return "no layer"
        return f"layer{f's {self.start}-' if last > self.start else ' '}{last}"


def forward_marks(nodes: Sequence[Node]) -> str:
    """Return what a run through the nodes leaves for the backward pass.

    Example:
        >>> forward_marks([Segment(Keep(3)), Keep(2)])
        '*..=='
    """
    return "".join(map(_marks, nodes))


def kept_inputs(nodes: Sequence[Node]) -> list[int]:
    """Return the layers whose input the forward pass keeps by itself.

    Example:
        >>> kept_inputs([Segment(Keep(3)), Keep(2)])
        [0]
    """
    return [i for i, mark in enumerate(forward_marks(nodes)) if mark in "*+"]


def passes_again(nodes: Sequence[Node], start: int = 0) -> Iterator[Pass]:
    """Yield what the backward pass runs again, in order.

    Example:
        >>> [p.label for p in passes_again([Segment(Keep(2)), Keep(1)])]
        ['layers 0-1']
    """
    end = start + count_layers(nodes)
    for node in reversed(nodes):
        begin = end - node.layers
        if isinstance(node, Segment):
            unread = unread_layers(node.children)
            marks = forward_marks(node.children)
            if unread:
                # The input of what does not run is kept; the rest does nothing.
                marks = marks[: 1 - unread or None].ljust(len(marks))
            yield Pass(begin, marks, unread)
            yield from passes_again(node.children, begin)
        elif isinstance(node, Remat):
            yield from (Pass(i, "=") for i in reversed(range(begin, end)))
        end = begin


def draw(title: str, nodes: Sequence[Node]) -> str:
    """Return the picture as lines of at most 80 columns."""
    again = list(passes_again(nodes))
    policies = _distinct_policies(nodes)
    return draw_passes(
        title, forward_marks(nodes), again, policies, count_forwards(nodes)
    )


def draw_passes(
    title: str,
    forward: str,
    again: Sequence[Pass],
    policies: Sequence[Policy],
    total: int,
) -> str:
    """Return the picture of passes as lines of at most 80 columns.

    Args:
        title: What they are of.
        forward: The marks of all layers after the forward pass.
        again: What the backward pass runs again, in order.
        policies: Those by which values are kept, each once.
        total: How often layers run forward, all counted.
    """
    layers = len(forward)
    lines = [*_wrapped(f"{title} on {layers} layers")]
    lines += _forward_lines(forward, _elsewhere(again))
    if again:
        lines += ["backward runs again, in order:", *_passes(again, layers)]
    else:
        lines += ["backward runs nothing again"]
    for policy in policies:
        lines += _wrapped(f"policy: {policy_text(policy)}")
    kept = sum(mark in _INPUTS for mark in forward)
    lines.append(
        f"{kept} layer inputs kept; {total} layer forwards: "
        f"{layers} forward, {total - layers} again"
    )
    return "\n".join(lines)


def _marks(node: Node) -> str:
    if isinstance(node, Keep):
        return "=" * node.layers
    if isinstance(node, Segment):
        rest = "." if isinstance(node.policy, Nothing) else "-"
        return _input_mark(node) + rest * (node.layers - 1)
    return _input_mark(node) * node.layers


def _input_mark(node: Remat | Segment) -> str:
    return "*" if keeps_input_only(node) else "+"


def _distinct_policies(nodes: Sequence[Node]) -> list[Policy]:
    policies = dict.fromkeys(policies_in(nodes))
    return [p for p in policies if not isinstance(p, Nothing)]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 80, subsequent_indent="  ", break_on_hyphens=False)


def _elsewhere(again: Sequence[Pass]) -> str:
    """Return the marks of what passes keep off the device."""
    return "".join({mark for one in again for mark in one.marks} & set("hdHD"))


def _forward_lines(marks: str, later: str) -> list[str]:
    """Return the forward pass as lines: the marks, and behind them what they mean."""
    shown = marks + later
    meanings = ", ".join(f"{m} {_MEANINGS[m]}" for m in _MEANINGS if m in shown)
    chunks = range(0, len(marks), _WIDTH)
    lines = [f"  forward   {marks[i : i + _WIDTH]}" for i in chunks]
    if len(lines[-1]) + 3 + len(meanings) <= 80:
        return [*lines[:-1], f"{lines[-1]}   {meanings}"]
    unbroken = ", ".join(m.replace(" ", _NO_BREAK) for m in meanings.split(", "))
    wrapped = textwrap.wrap(unbroken, 68)
    return [*lines, *(f"            {w.replace(_NO_BREAK, ' ')}" for w in wrapped)]


def _passes(again: Sequence[Pass], layers: int) -> list[str]:
    """Return a line for each pass; of many alike only the first and the last."""
    lines: list[str] = []
    for group in _alike(again):
        shown = [_line(one, layers) for one in group]
        if len(shown) > _FIRST_LINES + 2:
            left = len(shown) - _FIRST_LINES - 1
            more = f"            ... {left} more like these, each further down"
            shown = [*shown[:_FIRST_LINES], more, shown[-1]]
        lines += shown
    if len(lines) > _MOST_LINES:
        left = len(lines) - _MOST_LINES + 1
        lines = [*lines[: _MOST_LINES - 1], f"            ... {left} more lines"]
    return lines


def _line(one: Pass, layers: int) -> str:
    if layers > _WIDTH_WITH_LABEL:
        return f"            {one.label}"
    marks = f"{' ' * one.start}{one.marks}".ljust(layers)
    return f"            {marks}   {one.label}"


def _alike(passes: Sequence[Pass]) -> list[list[Pass]]:
    """Group neighbours with equal marks that go down in equal steps."""
    groups: list[list[Pass]] = []
    for one in passes:
        if groups and _continues(groups[-1], one):
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _continues(group: list[Pass], one: Pass) -> bool:
    last = group[-1]
    if last.marks != one.marks or last.unread != one.unread:
        return False
    return len(group) == 1 or group[-2].start - last.start == last.start - one.start
