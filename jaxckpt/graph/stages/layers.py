"""Layers that stand one after another in a program, found by what repeats.

The row of products (with what kind and types each has) repeats from layer to layer. The
cut between two layers lies where the fewest bytes are alive between the last product
of one and the first of the next. What stands before the first product of the first
layer is told from what comes before the layers by following, operand by operand, what
stands there in the second layer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxckpt.graph.stages.match import first_prefix
from jaxckpt.graph.stages.row import Row
from jaxckpt.graph.stages.runs import Repeat, find_repeats


@dataclass(frozen=True)
class Run:
    """A run of layers, as positions in the row of a program.

    Attributes:
        cuts: Where each layer begins, and where the last one ends.
        prefix: Equations of the first layer that stand before its cut.
    """

    cuts: tuple[int, ...]
    prefix: tuple[int, ...]


def find_runs(row: Row, products: Sequence[int]) -> Iterator[Run]:
    """Yield the runs of layers among neighbouring products, in no order.

    Args:
        row: The program's row.
        products: Positions of products in it.
    """
    if len(products) < 2:
        return
    keys = [row.keys[row.numbers[p]] for p in products]
    for repeat in find_repeats(keys):
        runs = _LayersOf(row, products, repeat).runs()
        if not runs:
            continue
        coarser = _coarser(row, products, repeat, runs)
        runs = (coarser and _LayersOf(row, products, coarser).runs()) or runs
        yield from runs
        edges = [(run.cuts[0], run.cuts[-1]) for run in sorted(runs, key=_first)]
        start = 0
        for first, last in [*edges, (len(row.numbers), 0)]:
            yield from find_runs(row, [p for p in products if start <= p < first])
            start = last
        return


def _coarser(
    row: Row, products: Sequence[int], repeat: Repeat, runs: Sequence[Run]
) -> Repeat | None:
    """Return several of what repeats as one, where more is alive inside than between.

    Two equal products of one residual block are one layer, not two.
    """
    alive = [row.crossing[cut] for cut in runs[0].cuts[1:-1]]
    for several in (2, 3, 4):
        for first in range(several):
            between = alive[first::several]
            inside = [b for i, b in enumerate(alive) if (i - first) % several]
            if len(between) < 2 or not inside or min(inside) <= max(between):
                continue
            period = several * repeat.period
            begin = bisect_left(products, runs[0].cuts[1 + first])
            shift = (begin - repeat.start) % period
            return Repeat(repeat.start + shift, period, repeat.length - shift)
    return None


def _first(run: Run) -> int:
    return run.cuts[0]


class _LayersOf:
    """The layers that a repeat in the row of products may be.

    Args:
        row: The program's row.
        products: Positions of products in it.
        repeat: What repeats among them.
    """

    def __init__(self, row: Row, products: Sequence[int], repeat: Repeat) -> None:
        self.row = row
        self.products = products
        self.repeat = repeat
        self._is_product = set(products)

    def runs(self) -> list[Run]:
        """Return the runs of layers, none where no layer reads the one before it."""
        shifts = range(min(self.repeat.length % self.repeat.period + 1, 8))
        tried = [self._shifted(shift) for shift in shifts]
        found = [(least, -n, runs) for least, n, runs in tried if runs]
        return min(found, key=lambda item: item[:2])[2] if found else []

    def _shifted(self, shift: int) -> tuple[int, int, list[Run]]:
        """Return the bytes at the cuts, how many layers, and the runs."""
        period, times = self.repeat.period, (self.repeat.length - shift)
        times //= self.repeat.period
        if times < 2:
            return 0, 0, []
        first = self.repeat.start + shift
        starts = [self.products[first + i * period] for i in range(times)]
        ends = [self.products[first + (i + 1) * period - 1] for i in range(times)]
        runs = []
        for part in self._linked(starts, ends):
            run = self._run(starts[part], ends[part])
            if run is not None:
                runs.append(run)
        least = self.row.crossing[runs[0].cuts[1]] if runs else 0
        return least, sum(len(run.cuts) - 1 for run in runs), runs

    def _linked(self, starts: list[int], ends: list[int]) -> Iterator[slice]:
        """Yield where each layer's products depend on the layer before."""
        begin = 0
        for i in range(1, len(starts) + 1):
            if i == len(starts) or not self._depends(starts, ends, i):
                if i - begin > 1:
                    yield slice(begin, i)
                begin = i

    def _depends(self, starts: list[int], ends: list[int], layer: int) -> bool:
        """Return whether a product of a layer depends on one of the layer before."""
        row, program = self.row, self.row.program
        reached = set(row.numbers[starts[layer - 1] : ends[layer - 1] + 1])
        for position in range(ends[layer - 1] + 1, ends[layer] + 1):
            number = row.numbers[position]
            if any(i in reached for i in program.makers(number)):
                if position in self._is_product:
                    return True
                reached.add(number)
        return False

    def _run(self, starts: list[int], ends: list[int]) -> Run | None:
        """Return the run of linked layers, from their first and last products."""
        gaps = list(zip(ends[:-1], starts[1:], strict=True))
        offsets = self._offsets(gaps)
        best: Run | None = None
        for offset in offsets[self._between(*gaps[0])]:
            chosen = {between: found[0] for between, found in offsets.items()}
            chosen[self._between(*gaps[0])] = offset
            run = self._with_offsets(starts, ends, chosen)
            if run is not None and (best is None or len(run.cuts) > len(best.cuts)):
                best = run
        return best

    def _offsets(
        self, gaps: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, ...], list[int]]:
        """Return how far behind a product fewest bytes cross, for each kind of gap."""
        places: dict[tuple[int, ...], list[int]] = {}
        for last, following in gaps:
            places.setdefault(self._between(last, following), []).append(last)
        return {
            between: self.row.best_offsets(lasts, len(between) + 1)
            for between, lasts in places.items()
        }

    def _with_offsets(
        self, starts: list[int], ends: list[int], offsets: dict[tuple[int, ...], int]
    ) -> Run | None:
        """Return the run whose cuts lie so far behind each layer's last product."""
        row = self.row
        cuts = [
            last + offsets[self._between(last, following)]
            for last, following in zip(ends[:-1], starts[1:], strict=True)
        ]
        stop = self._end(ends[-1], offsets)
        if stop is not None:
            cuts.append(stop)
        prefix = first_prefix(row, starts[0], cuts, starts[1])
        if prefix is not None:
            cuts.insert(0, starts[0])
        return Run(tuple(cuts), tuple(prefix or ())) if len(cuts) > 2 else None

    def _between(self, last: int, following: int) -> tuple[int, ...]:
        row = self.row
        return tuple(row.keys[i] for i in row.numbers[last + 1 : following])

    def _end(self, last: int, known: dict[tuple[int, ...], int]) -> int | None:
        """Return where the last layer ends: as one before it, else None."""
        row = self.row
        for between, offset in known.items():
            behind = row.numbers[last + 1 : last + offset]
            if tuple(row.keys[i] for i in behind) == between[: offset - 1]:
                return last + offset
        return None
