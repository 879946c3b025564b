"""Runs: equal parts of a schedule that follow one another, so that a loop runs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxckpt.schedule_tree import Keep, Node, Remat, Segment

_LONGEST_PATTERN = 16
_MOST_STRAIGHT = 16


@dataclass(frozen=True)
class Run:
    """The same part, several times.

    Attributes:
        part: One layer (`Keep(1)`, `Remat(policy, 1)`), one segment, or a pattern of
            runs.
        times: How often.
    """

    part: Node | tuple[Run, ...]
    times: int

    @property
    def part_layers(self) -> int:
        """How many layers one part holds."""
        if isinstance(self.part, tuple):
            return sum(run.layers for run in self.part)
        return self.part.layers

    @property
    def layers(self) -> int:
        """How many layers it holds in all."""
        return self.times * self.part_layers


def find_runs(nodes: Iterable[Node], *, patterns: bool = False) -> tuple[Run, ...]:
    """Return the runs of a canonical sequence of nodes.

    Args:
        nodes: What to run, in order.
        patterns: Whether to look for sequences of different nodes that repeat.

    Example:
        >>> runs = find_runs([Segment(Keep(2)), Segment(Keep(2)), Keep(3)])
        >>> [(run.times, run.part_layers) for run in runs]
        [(2, 2), (3, 1)]
    """
    runs: list[Run] = []
    for run in map(_run, nodes):
        if runs and runs[-1].part == run.part:
            runs[-1] = Run(run.part, runs[-1].times + run.times)
        else:
            runs.append(run)
    return _with_patterns(runs) if patterns else tuple(runs)


def _run(node: Node) -> Run:
    match node:
        case Keep(layers):
            return Run(Keep(1), layers)
        case Remat(policy, layers):
            return Run(Remat(policy, 1), layers)
        case Segment():
            return Run(node, 1)


def _with_patterns(runs: Sequence[Run]) -> tuple[Run, ...]:
    found: list[Run] = []
    position = 0
    while position < len(runs):
        period, times = _repetition(runs[position:])
        if times > 1:
            found.append(Run(tuple(runs[position : position + period]), times))
        else:
            period, times = 1, 1
            found.append(runs[position])
        position += period * times
    return tuple(found)


def _repetition(runs: Sequence[Run]) -> tuple[int, int]:
    """Return the period at the start that covers most, and how often it comes."""
    best = (1, 1)
    for period in range(2, min(_LONGEST_PATTERN, len(runs) // 2) + 1):
        times = 1
        while runs[times * period :][:period] == runs[:period]:
            times += 1
        if times > 1 and times * period > best[0] * best[1]:
            best = (period, times)
    return best


def straight(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Return the runs of a segment, part after part if it holds few layers.

    In its backward pass a segment's second run and what reads it then stand in one
    place, where the compiler fuses elementwise work into its readers; between two loops
    it would store every residual. GiB of the step of `layers.py`'s table:

        schedule        as loops    straight
        every(2)           25.73       21.85
        every(4)           30.38       24.16
        every(8)           40.04       29.17
        nested(4, 2)       26.52       22.21

    The price is time to compile (5 s for `every(2)`, 11 s for `every(16)`).

    Example:
        >>> [run.times for run in straight([Run(Keep(1), 3)])]
        [1, 1, 1]
    """
    if sum(run.layers for run in runs) > _MOST_STRAIGHT:
        return tuple(runs)
    return tuple(Run(run.part, 1) for run in runs for _ in range(run.times))
