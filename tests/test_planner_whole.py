"""A whole program as one MILP against the two levels: frontiers, then the chain."""

import random

import numpy as np
import pytest
from helpers_planner import random_stage
from scipy.optimize import Bounds, LinearConstraint, milp

from jaxckpt.planner.chain import ChainSolver, Link, Option
from jaxckpt.planner.frontier import frontier

LAYERS = 3


def random_program(rng):
    """Return layers as (input bytes, forward seconds, stage)."""
    layers = []
    for _ in range(LAYERS):
        stage = random_stage(rng, most=8, fewest_residuals=1)
        output_seconds = rng.choice([0.0, rng.uniform(0, 3)])
        forward = sum(op.seconds for op in stage.operations) + output_seconds
        layers.append((rng.randint(1, 10), forward, stage))
    return layers


def link_of(input_bytes, forward, stage):
    """Return the layer for the chain: each option keeps the input beside a point."""
    points = frontier(stage)
    options = tuple(Option(input_bytes + p.bytes, p.seconds) for p in points)
    return Link(input_bytes, forward, work_bytes=0, options=options)


class Whole:
    """The program as one MILP, for any budget.

    Columns, each with its cost in seconds, by name; "phase" t is the backward pass of
    layer t, the last layer's first:
        ("input", t, l), ("value", t, l, v): held when phase t starts
        ("forward", t, l): layer l runs again in full in phase t
        ("again", t, o): operation o of layer t alone runs again in phase t
    """

    def __init__(self, layers):
        self.columns, self.costs, self.sizes = {}, [], []
        self.rows = []  # of (numbers by column, least)
        for t in range(LAYERS - 1):
            for layer in range(t + 1):
                self._layer(t, layer, *layers[layer])
            stage = layers[t][2]
            for number, operation in enumerate(stage.operations):
                self._column(("again", t, number), operation.seconds)
        for t in range(LAYERS - 1):
            self._rules(t, layers)

    def least_seconds(self, budget):
        """Return the least seconds run again, None where nothing is feasible."""
        held = np.zeros((LAYERS - 1, len(self.costs)))
        for name, column in self.columns.items():
            held[name[1], column] = self.sizes[column]
        rules = np.zeros((len(self.rows), len(self.costs)))
        for row, (numbers, _) in enumerate(self.rows):
            for name, number in numbers.items():
                rules[row, self.columns[name]] += number
        least = np.array([least for _, least in self.rows])
        found = milp(
            np.array(self.costs),
            integrality=np.ones(len(self.costs)),
            bounds=Bounds(0, 1),
            constraints=[
                LinearConstraint(rules, least),
                LinearConstraint(held, -np.inf, budget),
            ],
            options={"mip_rel_gap": 0.0},
        )
        return None if found.x is None else float(found.fun)

    def _column(self, name, seconds=0.0, size=0):
        self.columns[name] = len(self.costs)
        self.costs.append(seconds)
        self.sizes.append(size)

    def _layer(self, t, layer, input_bytes, forward, stage):
        self._column(("input", t, layer), size=input_bytes)
        self._column(("forward", t, layer), forward)
        for value, size in enumerate(stage.sizes):
            self._column(("value", t, layer, value), size=size)

    def _rule(self, some, at_least):
        """Add: at least one of some is 1 if `at_least` is (a name, or always)."""
        numbers = dict.fromkeys(some, 1.0)
        if at_least is not None:
            numbers[at_least] = -1.0
        self.rows.append((numbers, 1.0 if at_least is None else 0.0))

    def _rules(self, t, layers):
        for layer in range(t + 1):
            x, ran = ("input", t, layer), ("forward", t, layer)
            before = [("forward", t, layer - 1)] if layer else []
            # What runs again in full reads its input.
            self._rule([x, *before], ran)
            for value in range(len(layers[layer][2].sizes)):
                held = ("value", t, layer, value)
                self._rule([x], held)  # values are held beside their input only
                self._stays(t, held, ran)
            self._stays(t, x, *before)
        self._reverse(t, layers[t][2])

    def _stays(self, t, held, *makers):
        """Held in a phase is what was in the one before, or was made again in it."""
        if t + 1 < LAYERS - 1:
            later = held[0], t + 1, *held[2:]
            makers = [(name, t + 1, layer) for name, _, layer in makers]
            self._rule([later, *makers], held)

    def _reverse(self, t, stage):
        """Layer t ran just before, or its residuals come from what is held of it."""
        ran = "forward", t, t
        self._rule([ran, ("input", t, t)], None)
        for value in sorted(stage.residuals):
            made = "again", t, stage.maker[value]
            self._rule([ran, ("value", t, t, value), made], None)
        for number, operation in enumerate(stage.operations):
            for value in operation.reads:
                made = "again", t, stage.maker[value]
                some = [("value", t, t, value), made, ran]
                self._rule(some, ("again", t, number))


@pytest.mark.parametrize("part", range(10))
def test_frontiers_and_a_chain_equal_one_milp_of_the_whole_program(part):
    """The two levels lose nothing against one MILP over all values of all layers.

    The MILP decides for each value and each layer input whether it is held when the
    backward pass of a layer starts, one byte budget on all that is held then. Held is
    what was held before, or was made again by a full run of its layer in between; and
    values of a layer only beside its input, as an option of a stage holds them. A layer
    is reversed from what is held of it and the operations that must run again for
    that, which read nothing of other layers but its input; or right after a full run
    from its input, which is held or comes from a full run of the layer before. What
    exists only while a layer is reversed counts for nothing: work bytes of 0.

    Both ways allow the same, but for two things that the MILP alone may do: to hold a
    value for a while and drop it before it is used, which three layers have no use for
    (the last one is reversed at once, and what is dropped after the second one's turn
    is of the first one, whose turn is next); and to run a layer again while another
    one is reversed that does not read it, which may as well wait.
    """
    rng = random.Random(part)
    for _ in range(6):
        layers = random_program(rng)
        whole, links = Whole(layers), [link_of(*layer) for layer in layers]
        everything = sum(size + sum(stage.sizes) for size, _, stage in layers)
        solver = ChainSolver(links, everything)
        inner = rng.sample(range(everything), min(5, everything))
        for budget in {solver.least_bytes - 1, solver.least_bytes, *inner, everything}:
            found, wanted = solver.solve(budget), whole.least_seconds(budget)
            if wanted is None:
                assert found is None
            else:
                assert found.seconds == pytest.approx(wanted)
