"""Values of a program: found everywhere, linked where they are the same data, named."""

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxckpt import _jax
from jaxckpt.graph.flops import equations
from jaxckpt.graph.reads import find_reads, find_recomputed
from jaxckpt.graph.tag import mark, tag, tag_names
from jaxckpt.graph.values import find_values

W = jax.random.normal(jax.random.key(0), (4, 4))
X = jax.random.normal(jax.random.key(1), (2, 4))


def called(w, x):
    inner = jax.jit(lambda x: checkpoint_name(x @ w, "inner"))
    return jnp.sin(inner(jnp.exp(x)))


def body(w, x):
    x = checkpoint_name(x, "carry")
    return checkpoint_name(jnp.sin(x @ w), "body_output")


def scanned(w, x):
    return lax.scan(lambda carry, _: (body(w, carry), None), x, length=3)[0]


def nested_scans(w, x):
    return lax.scan(lambda c, _: (scanned(w, c), None), x, length=2)[0]


def branched(w, x):
    yes = lambda x: checkpoint_name(jnp.tanh(x @ w), "yes") @ w  # noqa: E731
    no = lambda x: jnp.sin(checkpoint_name(jnp.cos(x), "no"))  # noqa: E731
    return lax.cond(x.sum() > 0, yes, no, x)


@jax.custom_vjp
def attention(w, x):
    return jnp.tanh(x @ w) @ w


def _attention_fwd(w, x):
    context = checkpoint_name(jnp.tanh(x @ w), "context")
    lse = jnp.sum(context)
    scratch = jnp.sin(checkpoint_name(jnp.cos(context), "extra"))
    return context @ w + scratch, (w, context, lse)


def _attention_bwd(residuals, g):
    w, context, lse = residuals
    return context.T @ g * lse, g @ w.T


attention.defvjp(_attention_fwd, _attention_bwd)


def ruled(w, x):
    return jnp.sin(attention(w, jnp.exp(x)))


def layer(w, x):
    x = checkpoint_name(x, "layer_input")
    hidden = checkpoint_name(x @ w, "hidden")
    x = x + checkpoint_name(jnp.tanh(hidden) @ w, "out_proj")
    y = jnp.cos(x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) @ w)
    y = checkpoint_name(y @ w, "mlpwi")
    return x + checkpoint_name(jnp.tanh(y) @ w, "mlpwo")


PROGRAMS = [called, scanned, nested_scans, branched, ruled, layer]


def trace(fn):
    closed = jax.make_jaxpr(fn)(W, X)
    return closed, find_values(closed)


def named(values):
    return {v.name: v for v in values.items if v.name}


def index_of(values, primitive, number=0):
    found = [i for i, v in enumerate(values.items) if v.primitive == primitive]
    return found[number]


@pytest.mark.parametrize(
    ("fn", "times", "in_rule"),
    [
        (called, {"inner": 1}, False),
        (scanned, {"carry": 3, "body_output": 3}, False),
        (nested_scans, {"carry": 6, "body_output": 6}, False),
        (branched, {"yes": 1, "no": 1}, False),
        (ruled, {"context": 1, "extra": 1}, True),
    ],
)
def test_values_inside_calls_loops_and_rules_are_found(fn, times, in_rule):
    _, values = trace(fn)
    assert {name: v.times for name, v in named(values).items()} == times
    for value in named(values).values():
        assert (value.shape, value.dtype, value.bytes) == ((2, 4), "float32", 32)
        assert value.in_rule == in_rule
        assert "test_graph_values.py" in value.source


def test_of_a_rule_only_outputs_residuals_and_names_are_kept():
    _, values = trace(ruled)
    inside = [(v.primitive, v.name) for v in values.items if v.in_rule]
    naming = named(values)["context"].primitive
    assert inside == [
        ("tanh", None),
        (naming, "context"),
        ("reduce_sum", None),
        (naming, "extra"),
        ("add", None),  # the output
    ]
    # What the backward rule reads counts as a product, as the attention that made it.
    dots = {v.primitive: v.dot for v in values.items if v.in_rule and not v.name}
    assert dots == dict.fromkeys(["tanh", "reduce_sum", "add"], "unbatched")


@pytest.mark.parametrize(
    "fn", [lambda w, x: jax.checkpoint(layer)(w, x), lambda w, x: jax.nn.relu(x @ w)]
)
def test_remat_and_custom_jvp_are_values_as_a_whole(fn):
    _, values = trace(fn)
    assert not named(values)
    assert len([v for v in values.items if v.dot]) <= 1


def test_the_scope_of_a_value_is_its_name_stack():
    def fn(w, x):
        with jax.named_scope("block"), jax.named_scope("attention"):
            return jnp.sin(x @ w)

    _, values = trace(fn)
    assert {v.scope for v in values.items} == {"block/attention"}
    assert set(tag_names(values, [0, 1]).values()) == {
        "block/attention/dot_general",
        "block/attention/sin",
    }


def test_the_same_data_is_found_behind_casts_views_and_names():
    def fn(w, x):
        gathered = jnp.exp(w)
        low = checkpoint_name(gathered.astype(jnp.bfloat16), "gathered")
        stacked = jnp.broadcast_to(low.T.reshape(2, 2, 4), (3, 2, 2, 4))
        return jnp.sin(jax.jit(lambda a: a * 2)(stacked))

    _, values = trace(fn)
    exp = index_of(values, "exp")
    same = {values.items[i].primitive for i in values.same_data(exp)}
    naming = named(values)["gathered"].primitive
    expected = {"exp", "convert_element_type", naming, "transpose", "reshape"}
    assert same == expected | {"broadcast_in_dim"}
    # From whichever end one asks.
    for index in values.same_data(exp):
        assert set(values.same_data(index)) == set(values.same_data(exp))
    assert set(values.same_data(index_of(values, "mul"))) == {index_of(values, "mul")}


def test_the_same_data_goes_through_calls_and_rules():
    def fn(w, x):
        inside = jax.jit(lambda a: a.reshape(4, 2))(jnp.exp(x))
        return attention(w, inside.reshape(2, 4))

    _, values = trace(fn)
    same = [values.items[i].primitive for i in values.same_data(0)]
    assert sorted(same) == ["exp", "reshape", "reshape"]


def test_a_value_named_apart_is_a_value_of_its_own():
    def fn(w, x):
        one = checkpoint_name(jnp.exp(x), "one")
        return jnp.sin(checkpoint_name(one.T, "two")) @ x

    _, values = trace(fn)
    names = {v.name: i for i, v in enumerate(values.items) if v.name}
    assert names["two"] not in set(values.same_data(names["one"]))
    assert names["one"] not in set(values.same_data(names["two"]))
    assert index_of(values, "exp") in set(values.same_data(names["one"]))


def test_the_root_of_views_is_what_made_the_bytes():
    def fn(w, x):
        y = jnp.exp(x).reshape(8).reshape(4, 2).T
        return jnp.sin(y.astype(jnp.bfloat16).reshape(8))

    _, values = trace(fn)
    exp, cast = index_of(values, "exp"), index_of(values, "convert_element_type")
    roots = {i: values.root(i) for i in range(len(values))}
    views = [i for i, v in enumerate(values.items) if v.primitive == "reshape"]
    assert [roots[i] for i in views] == [exp, exp, cast]
    assert roots[index_of(values, "transpose")] == exp
    assert roots[cast] == cast  # other bytes


@pytest.mark.parametrize("fn", PROGRAMS)
def test_tag_names_are_unique_and_stable_across_traces(fn):
    _, values = trace(fn)
    everything = range(len(values))
    names = tag_names(values, everything)
    assert len(set(names.values())) == len(values)
    again = find_values(jax.make_jaxpr(lambda w, x: fn(w, x))(W, X))
    assert [v.place for v in again.items] == [v.place for v in values.items]
    assert tag_names(again, everything) == names


def test_tag_names_use_the_programs_own_and_number_the_rest():
    _, values = trace(layer)
    products = [i for i, v in enumerate(values.items) if v.dot]
    others = [i for i, v in enumerate(values.items) if v.primitive == "tanh"]
    names = tag_names(values, products + others)
    expected = ["hidden", "out_proj", "layer/dot_general", "mlpwi", "mlpwo"]
    assert [names[i] for i in products] == expected
    assert [names[i] for i in others] == ["layer/tanh", "layer/tanh#2"]


def tagged(fn):
    """Return a program with every value named, and the names by index."""
    closed, values = trace(fn)
    names = tag_names(values, range(len(values)))
    return tag(closed, {values.items[i].place: n for i, n in names.items()}), names


@pytest.mark.parametrize("fn", PROGRAMS)
def test_naming_every_value_changes_no_result(fn):
    run = _jax.jaxpr_function(tagged(fn)[0])

    def results(fn):
        loss = lambda w, x: jnp.sum(fn(w, x) ** 2)  # noqa: E731
        return jax.jit(lambda w, x: (fn(w, x), jax.grad(loss, (0, 1))(w, x)))(W, X)

    chex.assert_trees_all_equal(results(lambda w, x: run(w, x)[0]), results(fn))


@pytest.mark.parametrize("fn", PROGRAMS)
def test_every_tag_is_on_the_value_it_was_made_for(fn):
    _, values = trace(fn)
    closed, names = tagged(fn)
    found = named(find_values(closed))
    assert set(found) == set(names.values())
    for index, name in names.items():
        before, after = values.items[index], found[name]
        assert (after.shape, after.times) == (before.shape, before.times)


@pytest.mark.parametrize("fn", PROGRAMS)
def test_marks_are_added_and_nothing_else_is_changed(fn):
    closed, values = trace(fn)
    marked = mark(closed, {v.place: i for i, v in enumerate(values.items)})
    # In a gradient's forward pass, where forward rules stand in the place of calls.
    forward = lambda c: jax.make_jaxpr(  # noqa: E731
        lambda w, x: jax.vjp(_jax.jaxpr_function(c), w, x)[0]
    )(W, X)
    before = [eqn.primitive.name for eqn, _ in equations(forward(closed))]
    after = [eqn for eqn, _ in equations(forward(marked))]
    marks = {_jax.mark_index(eqn) for eqn in after} - {None}
    assert [e.primitive.name for e in after if _jax.mark_index(e) is None] == before
    if fn is branched:  # of which one branch is listed
        assert marks < set(range(len(values)))
    else:
        assert marks == set(range(len(values)))


def test_a_name_in_use_is_taken_from_other_values():
    def fn(w, x):
        return jnp.sin(checkpoint_name(checkpoint_name(x @ w, "a"), "b")) @ w

    closed, values = trace(fn)
    changed = tag(closed, {values.items[0].place: "a"})
    names = [v.name for v in find_values(changed).items if v.name]
    assert sorted(names) == ["a", "a~", "b"]


def read_names(fn):
    closed, values = trace(fn)
    return {values.items[i].name for i in find_reads(values, closed)} - {None}


@pytest.mark.parametrize(
    ("fn", "read"),
    [
        # `out_proj` feeds a sum alone, but the normalisation that reads it runs again;
        # of `mlpwo`, the last projection, nothing reads even the sum.
        (layer, {"layer_input", "hidden", "out_proj", "mlpwi"}),
        # What is named at the top of a scan's body is read, its output is not ...
        (body, {"carry"}),
        # ... but by the next step, where the whole scan runs again.
        (scanned, {"carry", "body_output"}),
        (called, {"inner"}),
        (branched, {"yes", "no"}),
        (lambda w, x: checkpoint_name(jnp.sin(x), "linear") * 2.0 + w[:2], set()),
        (lambda w, x: checkpoint_name(x * 2.0, "scaled") @ w, {"scaled"}),
        (lambda w, x: lax.stop_gradient(checkpoint_name(x @ w, "cut")) + x, set()),
    ],
)
def test_names_are_read_where_the_backward_pass_needs_them(fn, read):
    assert read_names(fn) == read


PRODUCTS = ["hidden", "out_proj", "dot_general", "mlpwi"]


@pytest.mark.parametrize(
    ("kept", "again"),
    [
        ([], PRODUCTS),
        (["mlpwo"], PRODUCTS),
        (["hidden"], ["out_proj", "dot_general", "mlpwi"]),
        (["out_proj"], ["hidden", "dot_general", "mlpwi"]),
        (["hidden", "out_proj"], ["dot_general", "mlpwi"]),
        (["hidden", "out_proj", "mlpwi"], ["dot_general"]),
    ],
)
def test_a_product_runs_again_unless_its_result_is_kept(kept, again):
    closed, values = trace(layer)
    policy = jax.checkpoint_policies.save_only_these_names(*kept)
    indices = sorted(find_recomputed(values, closed, policy))
    products = [i for i in indices if values.items[i].dot]
    assert [values.name_of(i) or "dot_general" for i in products] == again
