"""Schedules: nodes for any depth, layer forwards by the papers, text form, picture."""

import functools
import itertools
import math
import random

import pytest

from jaxckpt.errors import JaxckptError, PolicyError, ScheduleError
from jaxckpt.policy import offload, save, save_dots, save_nothing
from jaxckpt.schedule import (
    Keep,
    Remat,
    Segment,
    as_schedule,
    binomial,
    combine,
    every,
    full,
    nested,
    none,
    parse_schedule,
    remat_every,
    sqrt,
    tree,
    uniform,
)
from jaxckpt.schedule_rules import advances
from jaxckpt.schedule_tree import canonical, count_forwards, count_layers

ODD_NAMES = save("a,b", 'say "x"', "it's", "x|y(", "mlp*") | offload("c")
MIXED = tree(
    Segment([Keep(2), Remat(ODD_NAMES, 3)], policy=save("context") - save("x|y")),
    *(Segment([Segment(Keep(2)), Keep(1)]),) * 2,
    Keep(2),
)
SCHEDULES = {
    str(schedule): schedule
    for schedule in (
        none(),
        full(),
        every(2),
        every(5),
        remat_every(2),
        remat_every(3, save("out_proj")),
        sqrt(),
        nested(2, 2),
        nested(3),
        binomial(3),
        uniform(save("query_proj")),
    )
}
TEXTS = [
    *SCHEDULES,
    str(MIXED),
    str(uniform(ODD_NAMES)),
    "remat_every(2, save_dots(batch_dims=False) | save(a))",
    "3 * Segment(Keep(2), policy=dots), Remat(maxtext:minimal, 2), Remat(5)",
]
DEPTHS = range(1, 14)
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
each_depth = pytest.mark.parametrize("depth", DEPTHS)


def spans(nodes, start=0):
    """Return what runs again as one: (first layer, number of layers)."""
    found = []
    for node in nodes:
        if isinstance(node, Segment):
            found.append((start, node.layers))
        elif isinstance(node, Remat):
            found += [(i, 1) for i in range(start, start + node.layers)]
        start += node.layers
    return found


def segments_of(depth, size):
    return [(i, min(size, depth - i)) for i in range(0, depth, size)]


# --- The tree ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([Segment(Keep(1))], [Remat(save_nothing(), 1)]),
        ([Segment(Keep(1), policy=save("a"))], [Remat(save("a"), 1)]),
        ([Keep(1), Keep(2)], [Keep(3)]),
        ([Remat(None, 1), Remat(save_nothing(), 2)], [Remat(save_nothing(), 3)]),
        ([Segment(Keep(1)), Segment(Keep(1))], [Remat(save_nothing(), 2)]),
        ([Segment([Keep(1), Keep(1)])], [Segment(Keep(2))]),
        ([Segment(Segment(Keep(1)))], [Segment(Remat(save_nothing(), 1))]),
        # These do not merge: two segments are not one, nor two policies.
        ([Segment(Keep(2)), Segment(Keep(2))], [Segment(Keep(2)), Segment(Keep(2))]),
        ([Remat(save("a"), 1), Remat(save("b"), 1)], None),
        ([Keep(1), Remat(save("a"), 1), Keep(1)], None),
    ],
    ids=str,
)
def test_canonical_form_is_the_same_for_trees_that_do_the_same(given, expected):
    found = canonical(given)
    assert found == tuple(given if expected is None else expected)
    assert canonical(found) == found
    assert count_layers(found) == count_layers(given)


@each_schedule
@each_depth
def test_nodes_hold_every_layer_in_canonical_form(schedule, depth):
    nodes = schedule.nodes(depth)
    assert count_layers(nodes) == depth
    assert canonical(nodes) == nodes
    assert hash(nodes) == hash(schedule.nodes(depth))
    assert tree(*nodes).nodes(depth) == nodes
    assert schedule.forwards(depth) == tree(*nodes).forwards(depth) >= depth


@pytest.mark.parametrize(
    ("schedule", "depth", "expected"),
    [
        (none(), 4, "Keep(4)"),
        (full(), 4, "Remat(full, 4)"),
        (every(1), 3, "Remat(full, 3)"),
        (every(4), 4, "Segment(Keep(4))"),
        (every(9), 4, "Segment(Keep(4))"),
        (every(4), 9, "2 * Segment(Keep(4)), Remat(full, 1)"),
        (remat_every(1), 3, "Remat(full, 3)"),
        (remat_every(2), 4, "Remat(full, 1), Keep(1), Remat(full, 1), Keep(1)"),
        (remat_every(3, save("a")), 4, "Remat(save(a), 1), Keep(2), Remat(save(a), 1)"),
        (sqrt(), 10, "5 * Segment(Keep(2))"),
        (nested(1), 3, "Segment(Keep(3))"),
        (nested(2, 2), 7, "Segment(2 * Segment(Keep(2))), Segment(Segment(Keep(2)), "
         "Remat(full, 1))"),
        (nested(5), 3, "Remat(full, 3)"),
        (binomial(9), 3, "Remat(full, 2), Keep(1)"),
        (binomial(1), 3, "Segment(Remat(full, 1), Keep(1)), Keep(1)"),
        (binomial(2), 1, "Keep(1)"),
        (uniform(None), 2, "Keep(2)"),
    ],
    ids=str,
)  # fmt: skip
def test_a_rule_makes_the_tree_that_it_says(schedule, depth, expected):
    assert str(tree(*schedule.nodes(depth))) == expected


@each_depth
@pytest.mark.parametrize("size", [1, 2, 3, 5, 13])
def test_every_and_remat_every_differ_in_all_but_the_layers_they_name(depth, size):
    assert spans(every(size).nodes(depth)) == segments_of(depth, size)
    wrapped = [(i, 1) for i in range(depth) if i % size == 0]
    assert spans(remat_every(size).nodes(depth)) == wrapped
    assert (every(size).nodes(depth) == remat_every(size).nodes(depth)) == (
        size == 1 or depth == 1
    )
    assert every(size).forwards(depth) == 2 * depth
    assert remat_every(size).forwards(depth) == depth + len(wrapped)


@pytest.mark.parametrize("depth", [*DEPTHS, 48, 80, 126])
def test_sqrt_holds_the_fewest_inputs_and_layers_of_one_segment(depth):
    found = spans(sqrt().nodes(depth))
    assert found == segments_of(depth, max(size for _, size in found))
    held = len(found) + max(size for _, size in found)
    assert held == min(n + math.ceil(depth / n) for n in range(1, depth + 1))
    assert held <= math.ceil(2 * math.sqrt(depth)) + 1


@each_depth
@pytest.mark.parametrize("parts", [(2,), (3, 2), (2, 2, 2), (4, 1, 3)])
def test_nested_cuts_evenly_at_every_level(parts, depth):
    def check(nodes, depth, parts):
        found = spans(nodes)
        if not parts or depth == 1:
            return
        sizes = [size for _, size in found]
        assert len(sizes) == min(parts[0], depth)
        assert sum(sizes) == depth and max(sizes) - min(sizes) <= 1
        for node in nodes:
            if isinstance(node, Segment):
                check(node.children, node.layers, parts[1:])

    check(nested(*parts).nodes(depth), depth, parts)


# --- Layer forwards ------------------------------------------------------------------


@functools.cache
def fewest_advances(layers, slots):
    """Return t(l, c) by its recursion, tried out over every k."""
    if layers == 1:
        return 0
    if slots == 1:
        return layers * (layers - 1) // 2
    return min(
        k + fewest_advances(layers - k, slots - 1) + fewest_advances(k, slots)
        for k in range(1, layers)
    )


@pytest.mark.parametrize(
    ("layers", "slots", "expected"),
    # Griewank and Walther 2000.
    [(10, 2, 20), (10, 3, 15), (24, 4, 51), (32, 4, 75), (32, 8, 54), (48, 4, 136),
     (50, 7, 105), (100, 5, 316)],
)  # fmt: skip
def test_binomial_takes_the_published_number_of_forwards(layers, slots, expected):
    assert advances(layers, slots) == expected
    assert binomial(slots).forwards(layers) == layers + expected


@pytest.mark.parametrize("layers", range(1, 13))
@pytest.mark.parametrize("slots", range(1, 6))
def test_binomial_takes_as_few_forwards_as_the_recursion(layers, slots):
    assert advances(layers, slots) == fewest_advances(layers, slots)
    nodes = binomial(slots).nodes(layers)
    assert forwards(nodes) == layers + fewest_advances(layers, slots)
    assert inputs_held(nodes) <= slots


def separate(nodes):
    """Write every rematerialised layer as a segment of its own."""
    for node in nodes:
        if isinstance(node, Remat):
            yield from [Segment(Keep(1))] * node.layers
        else:
            yield node


def forwards(nodes, output_read=True):
    """Count layer forwards: a segment at the end runs only where its output is read."""
    nodes = list(separate(nodes))
    total = 0
    for i, node in enumerate(nodes):
        segment = isinstance(node, Segment)
        last = i == len(nodes) - 1
        total += 0 if segment and last and not output_read else node.layers
        total += forwards(node.children, output_read=False) if segment else 0
    return total


def inputs_held(nodes):
    """Return how many layer inputs are held at once in a gradient."""
    nodes = list(separate(nodes))
    inside = (
        max(1, inputs_held(node.children)) if isinstance(node, Segment) else 0
        for node in nodes
    )
    return max(before + held for before, held in enumerate(inside))


@each_schedule
@each_depth
def test_forwards_are_those_of_a_count_by_hand(schedule, depth):
    nodes = schedule.nodes(depth)
    assert count_forwards(nodes) == forwards(nodes)


@functools.cache
def all_trees(layers):
    """Return every tree of nested segments that holds one layer's residuals at once."""
    if layers == 1:
        return [(Keep(1),)]
    return [
        (Segment(first), *rest)
        for k in range(1, layers)
        for first, rest in itertools.product(all_trees(k), all_trees(layers - k))
    ]


@pytest.mark.parametrize("layers", range(2, 9))
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_no_tree_of_as_few_inputs_takes_fewer_forwards_than_binomial(layers, slots):
    affordable = [t for t in all_trees(layers) if inputs_held(t) <= slots]
    fewest = min(map(forwards, affordable))
    assert binomial(slots).forwards(layers) == fewest
    assert len(affordable) < len(all_trees(layers)) or layers <= slots + 1


# --- Text ----------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_text_and_schedule_go_back_and_forth(text):
    schedule = parse_schedule(text)
    assert parse_schedule(str(schedule)) == schedule
    assert hash(parse_schedule(f"  {text} ")) == hash(schedule)


@each_schedule
@pytest.mark.parametrize("depth", [1, 7, 13])
def test_the_tree_of_a_rule_has_a_text(schedule, depth):
    nodes = schedule.nodes(depth)
    assert parse_schedule(str(tree(*nodes))).nodes(depth) == nodes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", none()),
        ("full", full()),
        ("full()", full()),
        (" every( 4 ) ", every(4)),
        ("every(layers=4)", every(4)),
        ("uniform(none)", none()),
        ("uniform(full)", full()),
        ("uniform(policy=save(a, b))", uniform(save("a", "b"))),
        ("uniform('save(\"a,b\")')", uniform(save("a,b"))),
        ("remat_every(2, save(a) | save_dots())",
         remat_every(2, save("a") | save_dots())),
        ("remat_every(policy=full, layers=2)", remat_every(2, save_nothing())),
        ("nested(4, 2)", nested(4, 2)),
        ("Keep(4)", tree(Keep(4))),
        ("Remat(3)", tree(Remat(None, 3))),
        ("Remat(save(a, b), 3), Keep(2)", tree(Remat(save("a", "b"), 3), Keep(2))),
        ("Remat(policy=full, layers=3)", tree(Remat(save_nothing(), 3))),
        ("2 * Segment(Keep(2))", tree(Segment(Keep(2)), Segment(Keep(2)))),
        ("Segment(Keep(1), Remat(1), policy=save(a))",
         tree(Segment([Keep(1), Remat(None, 1)], save("a")))),
    ],
)  # fmt: skip
def test_a_text_means_its_schedule(text, expected):
    assert parse_schedule(text) == expected


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["empty", "`every(4)`"]),
        ("every(0)", ["`every(layers=0)`", "whole number of at least 1"]),
        ("every(-1)", ["-1", "at least 1"]),
        ("every(True)", ["`True` in `every(...)`", "whole number"]),
        ("every(2.5)", ["`2.5` in `every(...)`", "whole number"]),
        (f"every({'9' * 5000})", ["whole number"]),
        ("every()", ["`every()`", "layers"]),
        ("every(2, 3)", ["`every(2, 3)`"]),
        ("every(size=2)", ["unknown argument `size`", "Valid: layers"]),
        ("remat_every(full)", ["`full` in `remat_every(...)`", "whole number"]),
        ("remat_every(2, polcy=full)", ["Did you mean `policy`"]),
        ("every(layers=2, layers=3)", ["gives `layers` twice"]),
        ("every(", ["`every(`", "does not close a parenthesis"]),
        ("every(2))", ["`every(2))`", "parenthesis too many"]),
        ("every(2) | (x)", ["`every(2) | (x)` is not a schedule"]),
        ("every('2)", ["does not close a quote"]),
        ("every(2,)", ["something is missing beside a `,`"]),
        ("evry(2)", ["`evry` is not a schedule", "Did you mean `every`"]),
        ("every", ["`every(4)`"]),
        ("nested()", ["`nested()` needs a number of parts"]),
        ("nested(2, 0)", ["`nested(parts=0)`"]),
        ("dots", ["`dots` is a policy", "`uniform(dots)`"]),
        ("save(a)", ["`save(a)` is a policy", "`uniform(save(a))`"]),
        ("Keep(0)", ["`Keep(layers=0)`", "at least 1"]),
        ("Keep()", ["`Keep()`", "not a number of layers"]),
        ("Keep(2, 3)", ["`Keep(2, 3)` has an argument too many: `2`"]),
        ("Keep(2, policy=full)", ["unknown argument `policy`", "Valid: layers"]),
        ("Remat(full, 2, size=3)", ["unknown argument `size`", "layers, policy"]),
        ("Remat(none, 2)", ["`none` is no policy", "`Keep(layers)`"]),
        ("Segment()", ["`Segment()` holds no layers"]),
        ("Segment(Keep(2), polcy=full)", ["unknown argument `polcy`", "`policy`?"]),
        ("Segment(4)", ["`4` is not a schedule", "Keep"]),
        ("Keep(2), every(2)", ["`every(2)` is a whole schedule", "`Segment(...)`"]),
        ("full, Keep(2)", ["`full` is a whole schedule", "`Keep(...)`"]),
        ("Segment(every(2))", ["`every(2)` is a whole schedule"]),
        ("0 * Keep(2)", ["`0 * ...`", "from 1 to 10000"]),
        ("2.5 * Keep(2)", ["`2.5 * ...`"]),
        ("Segment(" * 60 + "Keep(1)" + ")" * 60, ["nests segments", "50 levels"]),
        ("99 * Segment(99 * Segment(99 * Keep(1)))", ["over 10000 nodes"]),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_text_that_is_no_schedule_says_what_is_valid(text, parts):
    with pytest.raises(ScheduleError) as caught:
        parse_schedule(text)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("uniform(svae(a))", ["In the schedule", "`svae(...)`", "`save`"]),
        ("Remat(fulll, 2)", ["In the schedule", "`fulll`", "`full`"]),
        ("remat_every(2, 3)", ["`3` is not a policy"]),
        ("uniform(3)", ["`3` is not a policy"]),
        ("remat_every(2, save())", ["`save()` needs a name"]),
        ("uniform('save(a)' | 'save(b)')", ["is not a policy"]),
    ],
)
def test_a_policy_inside_that_is_none_says_so(text, parts):
    with pytest.raises(PolicyError) as caught:
        parse_schedule(text)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
@pytest.mark.filterwarnings('ignore:"')
def test_many_backslashes_take_no_longer_than_others():
    with pytest.raises(PolicyError, match="is not a policy"):
        parse_schedule('uniform("' + "\\" * 4000 + '" | save(a))')


def test_a_mutated_text_gives_a_schedule_or_a_clear_error():
    rng = random.Random(0)
    pieces = list("(),*='\"\\|;- 0129aKS") + ["Keep(", "Segment(", "policy=", "every"]
    parsed = 0
    for _ in range(2000):
        text = rng.choice(TEXTS)
        for _ in range(rng.randint(1, 3)):
            i = rng.randrange(len(text) + 1)
            text = text[:i] + rng.choice(pieces) + text[i + rng.randint(0, 2) :]
        try:
            schedule = parse_schedule(text)
        except JaxckptError as error:
            assert str(error)
            continue
        parsed += 1
        assert parse_schedule(str(schedule)) == schedule
    assert 50 < parsed < 1500


# --- What stands for a schedule ------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, none()),
        ("every(2)", every(2)),
        (every(2), every(2)),
        (save("a"), uniform(save("a"))),
        (save_nothing(), full()),
        (Keep(2), tree(Keep(2))),
        ([Keep(2), Remat(None, 1)], tree(Keep(2), Remat(None, 1))),
    ],
    ids=str,
)
def test_whatever_stands_for_a_schedule_becomes_one(given, expected):
    assert as_schedule(given) == expected


@pytest.mark.parametrize(
    "given", [4, 2.5, True, every, []], ids=["int", "float", "bool", "function", "list"]
)
def test_what_stands_for_no_schedule_is_refused(given):
    with pytest.raises(ScheduleError):
        as_schedule(given)


@pytest.mark.parametrize(
    ("policy", "schedule", "expected"),
    [
        (None, None, "none"),
        ("none", None, "none"),
        ("full", None, "full"),
        ("save(a)", None, "uniform(save(a))"),
        (None, "every(2)", "every(2)"),
        (None, "remat_every(2)", "remat_every(2)"),
        ("save(a)", "remat_every(2)", "remat_every(2, save(a))"),
        ("save(a)", "Remat(2), Keep(1)", "Remat(save(a), 2), Keep(1)"),
        ("save(a)", "Segment(Remat(2)), Keep(1)", "Segment(Remat(save(a), 2)), "
         "Keep(1)"),
        ("save(a)", "Remat(full, 2), Remat(2)", "Remat(full, 2), Remat(save(a), 2)"),
    ],
)  # fmt: skip
def test_a_policy_beside_a_schedule_fills_what_is_open(policy, schedule, expected):
    assert str(combine(policy, schedule)) == expected


@pytest.mark.parametrize(
    "schedule",
    ["every(2)", "full", "remat_every(2, dots)", "binomial(3)", "Remat(full, 2)"],
)
def test_a_policy_without_a_place_in_the_schedule_is_refused(schedule):
    with pytest.raises(ScheduleError, match=r"`save\(a\)` has no place"):
        combine("save(a)", schedule)
    with pytest.raises(ScheduleError, match="contradict each other"):
        combine("none", schedule)


def test_a_tree_of_another_depth_is_refused():
    with pytest.raises(ScheduleError, match="holds 6 layers, and the stack 8"):
        parse_schedule("Keep(4), Remat(full, 2)").nodes(8)


# --- The picture ---------------------------------------------------------------------


def test_the_picture_of_every_shows_segments_from_the_last_to_the_first():
    assert every(4).draw(10) == (
        "every(4) on 10 layers\n"
        "  forward   *...*...*.   * keeps the layer's input, . nothing\n"
        "backward runs again, in order:\n"
        "                    ==   layers 8-9\n"
        "                ====     layers 4-7\n"
        "            ====         layers 0-3\n"
        "3 layer inputs kept; 20 layer forwards: 10 forward, 10 again"
    )


def test_the_picture_of_binomial_shows_what_is_kept_in_second_runs():
    assert binomial(3).draw(8) == (
        "binomial(3) on 8 layers\n"
        "  forward   *.*..*.=   * keeps the layer's input, = everything, . nothing\n"
        "backward runs again, in order:\n"
        "                 *=    layers 5-6\n"
        "                 =     layer 5\n"
        "              **=      layers 2-4\n"
        "               =       layer 3\n"
        "              =        layer 2\n"
        "            *=         layers 0-1\n"
        "            =          layer 0\n"
        "3 layer inputs kept; 19 layer forwards: 8 forward, 11 again"
    )


def test_the_picture_of_remat_every_shows_single_layers():
    assert remat_every(2).draw(5) == (
        "remat_every(2) on 5 layers\n"
        "  forward   *=*=*   * keeps the layer's input, = everything\n"
        "backward runs again, in order:\n"
        "                =   layer 4\n"
        "              =     layer 2\n"
        "            =       layer 0\n"
        "3 layer inputs kept; 8 layer forwards: 5 forward, 3 again"
    )


def test_the_picture_without_remat_and_with_a_policy():
    assert "backward runs nothing again" in none().draw(3)
    text = uniform(save("a")).draw(3)
    assert "+++" in text and "policy: save(a)" in text


@each_schedule
@pytest.mark.parametrize("depth", [1, 13, 80, 126])
def test_the_picture_fits_80_columns_and_agrees_with_the_nodes(schedule, depth):
    lines = schedule.draw(depth).splitlines()
    assert max(map(len, lines)) <= 80
    start = next(i for i, line in enumerate(lines) if line.startswith("  forward"))
    marks = "".join(
        line.split()[1] for line in lines[start:] if line.startswith("  forward")
    )
    nodes = schedule.nodes(depth)
    assert len(marks) == depth
    kept = [i for i, mark in enumerate(marks) if mark in "*+"]
    assert kept == [first for first, _ in spans(nodes)]
    assert lines[-1].startswith(f"{len(kept)} layer inputs kept")
    assert f"{forwards(nodes)} layer forwards: {depth} forward" in lines[-1]
