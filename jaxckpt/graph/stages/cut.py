"""Where a program is cut: round its layers, and between where little is alive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jaxckpt import _jax
from jaxckpt.graph.stages.layers import Run, find_runs
from jaxckpt.graph.stages.match import core_image, follow
from jaxckpt.graph.stages.program import Program, variables
from jaxckpt.graph.stages.row import Row
from jaxckpt.graph.stages.scan import is_layer_scan

_SEED_BYTES = 32


@dataclass(frozen=True, eq=False)
class Piece:
    """Equations that become one stage.

    Attributes:
        numbers: Their numbers, in order.
        stack: Number of the run of layers that they are one of, None for none.
        scanned: Whether they are one loop over layers.
        mark: The name that the user gave them.
    """

    numbers: list[int]
    stack: int | None = None
    scanned: bool = False
    mark: str | None = None


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer, or one loop over layers, in the row of a program.

    Attributes:
        first: Its first position in the row.
        stop: The position behind its last.
        numbers: Its equations, those moved to it included.
        stack: Number of the run that it belongs to.
        scanned: Whether it is a loop.
    """

    first: int
    stop: int
    numbers: set[int]
    stack: int
    scanned: bool = False


def cut_layers(program: Program) -> list[Piece]:
    """Return a program's equations as pieces, in order."""
    row = Row(program)
    layers = _find_layers(row)
    taken = {i: index for index, layer in enumerate(layers) for i in layer.numbers}
    _move_in(row, layers, taken)
    pieces: list[Piece] = []
    position = 0
    for index, layer in enumerate(layers):
        if index == 0 or layers[index - 1].stack != layer.stack:
            between = row.numbers[position : layer.first]
            pieces += _between(row, [i for i in between if i not in taken], layers)
        pieces.append(Piece(sorted(layer.numbers), layer.stack, layer.scanned))
        position = layer.stop
    behind = [i for i in row.numbers[position:] if i not in taken]
    pieces += _between(row, behind, layers)
    return with_sources(program, pieces)


def _find_layers(row: Row) -> list[_Layer]:
    """Return the layers of a program, in order."""
    program = row.program
    loops = [i for i in program.products if is_layer_scan(program, i)]
    found = [
        [_Layer(row.position[i], row.position[i] + 1, {i}, 0, scanned=True)]
        for i in loops
    ]
    edges = [-1, *(row.position[i] for i in loops), len(row.numbers)]
    products = [row.position[i] for i in program.products]
    for before, behind in pairwise(edges):
        inside = [p for p in products if before < p < behind]
        found += [_layers_of(row, run) for run in find_runs(row, inside)]
    found.sort(key=lambda layers: layers[0].first)
    return _numbered(found)


def _layers_of(row: Row, run: Run) -> list[_Layer]:
    layers = []
    for first, stop in zip(run.cuts[:-1], run.cuts[1:], strict=True):
        layers.append(_Layer(first, stop, set(row.numbers[first:stop]), 0))
    layers[0].numbers.update(run.prefix)
    return layers


def _numbered(found: list[list[_Layer]]) -> list[_Layer]:
    """Number the runs, without first layers that reach into the run before."""
    layers: list[_Layer] = []
    taken: set[int] = set()
    for stack, run in enumerate(found):
        if run[0].numbers & taken:
            run = run[1:]
        if len(run) == 1 and not run[0].scanned:
            continue
        for layer in run:
            taken |= layer.numbers
            layers.append(
                _Layer(layer.first, layer.stop, layer.numbers, stack, layer.scanned)
            )
    return layers


def _move_in(row: Row, layers: Sequence[_Layer], taken: dict[int, int]) -> None:
    """Give each layer what only it reads: casts of its weights, its dropout masks.

    Products are moved only where each layer has the same: adapters that are merged into
    frozen weights. Of what only the first layer reads, what stands for something of the
    second is moved; the rest comes before the layers: the embedding.
    """
    own = owned(row, taken)
    usual = None
    for index, layer in enumerate(layers):
        if layer.scanned:
            continue
        first = index == 0 or layers[index - 1].stack != layer.stack
        if first:
            peers = [i for i, x in enumerate(layers) if x.stack == layer.stack]
            usual = _usual(row, [own.get(i, []) for i in peers[1:]])
        moved = _without_seeds(row.program, own.get(index, []))
        moved = _as_usual(row, moved, usual)
        if first:
            moved = _of_first(row, layers, index, own, set(moved))
        moved = _read_inside(row.program, moved, layer)
        layer.numbers.update(moved)
        taken.update(dict.fromkeys(moved, index))


def owned(row: Row, taken: dict[int, int]) -> dict[int, list[int]]:
    """Return what only one layer reads, by layer."""
    program = row.program
    owner = dict(taken)
    found: dict[int, list[int]] = {}
    for number in reversed(range(len(program.eqns))):
        if number in owner or program.eqns[number].effects:
            continue
        readers = {owner.get(reader, -1) for reader in program.readers[number]}
        if len(readers) == 1 and -1 not in readers:
            (index,) = readers
            owner[number] = index
            found.setdefault(index, []).append(number)
    return {index: sorted(numbers) for index, numbers in found.items()}


def _without_seeds(program: Program, numbers: Sequence[int]) -> list[int]:
    """Leave out scalars and random keys that a number of the layer is folded into.

    As something that the layer is given, they leave layers equal.
    """
    kept: list[int] = []
    inside: set[int] = set()
    for number in numbers:
        eqn = program.eqns[number]
        size = sum(_jax.nbytes(v.aval) for v in eqn.outvars)
        read = variables(eqn.invars)
        given = read and len(read) < len(eqn.invars) and size <= _SEED_BYTES
        if not given or any(i in inside for i in program.makers(number)):
            kept.append(number)
            inside.add(number)
    return kept


def _usual(row: Row, owned_by: Sequence[Sequence[int]]) -> Counter[int] | None:
    """Return the operations that most layers own, None where no two own the same."""
    items = [tuple(sorted(row.keys[i] for i in numbers)) for numbers in owned_by]
    (usual, times), *_ = Counter(items).most_common(1)
    return Counter(usual) if times > 1 or len(items) == 1 else None


def _as_usual(
    row: Row, numbers: Sequence[int], usual: Counter[int] | None
) -> list[int]:
    """Leave out what other layers do not own.

    Where layers own nothing alike, only products are left out.
    """
    if usual is None:
        return [i for i in numbers if row.program.sources[i]]
    rest = Counter(usual)
    kept = []
    for number in reversed(numbers):
        rest[row.keys[number]] -= 1
        if rest[row.keys[number]] >= 0:
            kept.append(number)
    return kept[::-1]


def _read_inside(program: Program, numbers: Sequence[int], layer: _Layer) -> list[int]:
    """Leave out what something outside of the layer reads."""
    inside = set(layer.numbers)
    for number in sorted(numbers, reverse=True):
        if all(reader in inside for reader in program.readers[number]):
            inside.add(number)
    return [i for i in numbers if i in inside]


def _of_first(
    row: Row,
    layers: Sequence[_Layer],
    index: int,
    own: dict[int, list[int]],
    allowed: set[int],
) -> list[int]:
    """Return what of `allowed` stands for something that the second layer owns."""
    one, two = layers[index], layers[index + 1]
    following = two.stop - (one.stop - one.first)
    image = core_image(row, one.first, one.stop, following)
    before = row.numbers[two.first : following]
    wanted = sorted([*own.get(index + 1, []), *before])
    return [i for i in follow(row, image, wanted).values() if i in allowed]


def _between(row: Row, numbers: list[int], layers: Sequence[_Layer]) -> Iterator[Piece]:
    """Cut what stands between layers, where it is much, where little is alive."""
    program = row.program
    sizes = [sum(program.flops[i] for i in x.numbers) for x in layers]
    products = [row.position[i] for i in numbers if program.flops[i]]
    whole = sum(program.flops[i] for i in numbers)
    if len(products) < 2 or (layers and 2 * whole < min(sizes)):
        yield Piece(numbers)
        return
    start, stop = row.position[numbers[0]], row.position[numbers[-1]] + 1
    cuts = _good_cuts(row, start, products, stop)
    enough = min(sizes, default=0) / 2
    for cut in [*cuts, stop]:
        part = [i for i in numbers if start <= row.position[i] < cut]
        work = sum(program.flops[i] for i in part)
        if work >= enough or cut == stop:
            yield Piece(part)
            start = cut


def _good_cuts(row: Row, start: int, products: Sequence[int], stop: int) -> list[int]:
    """Return where a single value is alive between two products, or few bytes are.

    Args:
        row: The program's row.
        start: Where the part of the row begins that is cut.
        products: Positions of the products in it.
        stop: Where it ends.
    """
    pairs = pairwise(products)
    cuts = [one + row.best_offsets([one], two - one)[0] for one, two in pairs]
    bytes_ = [row.crossing[place] for place in (start, *cuts, stop)]
    least = [i for i in range(1, len(cuts) + 1) if bytes_[i] <= _near(bytes_, i)]
    kept = [bytes_[0], *(bytes_[i] for i in least), bytes_[-1]]
    low = {
        i for k, i in enumerate(least, 1) if bytes_[i] <= max(kept[k - 1], kept[k + 1])
    }
    return [c for i, c in enumerate(cuts, 1) if i in low or row.alive[c] == 1]


def _near(bytes_: Sequence[int], index: int) -> int:
    """Return the fewest bytes beside a place; nothing is alive at a program's ends."""
    beside = (bytes_[index - 1], bytes_[index + 1])
    return min((b for b in beside if b), default=0)


def with_sources(program: Program, pieces: list[Piece]) -> list[Piece]:
    """Put what depends on no product into the piece that reads it first.

    What a layer shares with others comes before all layers of its run.
    """
    home = {i: index for index, piece in enumerate(pieces) for i in piece.numbers}
    before = list(range(len(pieces)))
    for index, piece in enumerate(pieces):
        if piece.stack is not None:
            same = index > 0 and pieces[index - 1].stack == piece.stack
            before[index] = before[index - 1] if same else index - 1
    end = len(program.eqns)
    earliest: list[int] = []
    for number in range(end):
        makers = (max(earliest[i], home.get(i, 0)) for i in program.makers(number))
        earliest.append(max(makers, default=0))
    for number in reversed(range(end)):
        if number not in home:
            readers = (home.get(r, len(pieces) - 1) for r in program.readers[number])
            home[number] = max(before[min(readers)], earliest[number])
    whole: list[list[int]] = [[] for _ in pieces]
    for number in range(end):
        whole[home[number]].append(number)
    return [
        Piece(numbers, piece.stack, piece.scanned, piece.mark)
        for numbers, piece in zip(whole, pieces, strict=True)
    ]
