"""Names of values that the program does not name, and choosing any value by them."""

import collections
import random
import zlib

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from programs import PROGRAMS, WEIGHTS, W, X, flat, of_inexact

import jaxckpt
from jaxckpt import _jax
from jaxckpt.errors import PolicyError
from jaxckpt.graph.choose import choose_values
from jaxckpt.graph.tag import tag_names
from jaxckpt.graph.values import find_values
from jaxckpt.policy_algebra import Decision


def labels(fn, *args):
    return [v.label for v in find_values(jax.make_jaxpr(fn)(*args)).items]


# --- What they say -------------------------------------------------------------------


def mlp(w, x):
    return jnp.tanh(x @ w)


class Model:
    def __call__(self, w, x):
        return jnp.sin(mlp(w, x))

    def method(self, x):
        return jnp.exp(x)


def test_without_a_module_path_a_name_says_the_function():
    def loss(w, x):
        double = lambda y: y * 2  # noqa: E731
        return double(Model().method(Model()(w, x)))

    assert labels(loss, W, X) == [
        "mlp/dot_general",
        "mlp/tanh",
        "Model/sin",
        "Model.method/exp",
        "loss/mul",
    ]


def test_a_module_path_goes_before_the_function():
    def fn(w, x):
        with jax.named_scope("decoder"), jax.named_scope("mlp"):
            return mlp(w, x)

    assert labels(fn, W, X) == ["decoder/mlp/dot_general", "decoder/mlp/tanh"]


def test_calls_loops_and_branches_continue_the_path():
    def fn(w, x):
        with jax.named_scope("outer"):
            x = jax.jit(lambda x: jnp.sin(x))(x)
            x = lax.scan(lambda c, _: (scoped(c), None), x, None, length=2)[0]
            return lax.cond(x.sum() > 0, lambda x: jnp.log(x), lambda x: x, x)

    def scoped(x):
        with jax.named_scope("step"):
            return jnp.exp(x)

    found = labels(fn, W, X)
    assert {"outer/sin", "outer/step/exp", "outer/log"} <= set(found)


def test_what_jax_calls_inside_its_functions_has_the_name_of_the_caller():
    def noisy(x):
        return x + jax.random.uniform(jax.random.key(0), x.shape)

    found = labels(noisy, X)
    assert all(label.startswith("noisy/") for label in found) and len(found) > 5
    values = find_values(jax.make_jaxpr(noisy)(X)).items
    assert all("test_graph_names.py" in v.source for v in values)


def test_formulas_of_einsum_are_no_path():
    assert labels(lambda w, x: jnp.einsum("ij,kj->ik", x, w), W, X) == [
        "test_formulas_of_einsum_are_no_path/dot_general"
    ]


def test_nnx_models_are_named_by_their_classes():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return jnp.tanh(self.linear(x))

    graph, state = nnx.split(Net(nnx.Rngs(0)))
    found = labels(lambda state, x: nnx.merge(graph, state)(x), state, X)
    assert found[0] == "Linear/dot_general" and found[-1] == "Net/tanh"


def test_a_name_of_the_program_is_that_of_its_views():
    def fn(w, x):
        one = checkpoint_name((x @ w).T, "one")
        return jnp.sin(checkpoint_name(one.reshape(12), "two"))

    assert labels(fn, W, X) == ["one", "one", "one", "two", "two", "fn/sin"]


# --- That they stay ------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_labels_are_unique_and_stay_when_traced_again(name):
    fn, args = PROGRAMS[name]
    run, leaves, _ = flat(fn, args)
    values = find_values(jax.make_jaxpr(run)(*leaves))
    unnamed = [v.label for i, v in enumerate(values.items) if not values.name_of(i)]
    assert len(set(unnamed)) == len(unnamed)
    names = tag_names(values, range(len(values)))
    assert len(set(names.values())) == len(values)
    again = find_values(jax.make_jaxpr(lambda *leaves: run(*leaves))(*leaves))
    assert [v.label for v in again.items] == [v.label for v in values.items]
    jitted = find_values(jax.make_jaxpr(jax.jit(run))(*leaves))
    assert [v.label for v in jitted.items] == [v.label for v in values.items]


def test_labels_of_unnamed_values_do_not_depend_on_what_is_chosen():
    def fn(x):
        for _ in range(3):
            x = jnp.tanh(x)
        return x

    values = find_values(jax.make_jaxpr(fn)(X))
    assert tag_names(values, [2]) == {2: "fn/tanh#3"}
    assert tag_names(values, [0, 2]) == {0: "fn/tanh", 2: "fn/tanh#3"}


SOURCE = """
import jax.numpy as jnp

def block(w, x):
    return jnp.tanh(x @ w)

def fn(w, x):
    return block(w, jnp.exp(x))
"""


def test_labels_stay_when_other_parts_of_the_file_change():
    def of(source):
        space = {}
        exec(compile(source, "model.py", "exec"), space)
        return labels(space["fn"], W, X)

    edited = SOURCE.replace("\ndef block", "\ndef other(x):\n    return x\n\ndef block")
    edited = edited.replace("jnp.exp(x)", "jnp.sin(jnp.exp(x))")
    assert of(SOURCE) == ["fn/exp", "block/dot_general", "block/tanh"]
    assert of(edited) == ["fn/exp", "fn/sin", "block/dot_general", "block/tanh"]


def test_a_name_is_never_given_twice():
    def fn(x):
        x = checkpoint_name(jnp.sin(x), "a")
        x = checkpoint_name(jnp.cos(x), "a#2")
        return checkpoint_name(jnp.exp(x), "a") * 2

    values = find_values(jax.make_jaxpr(fn)(X))
    names = tag_names(values, range(len(values)))
    assert len(set(names.values())) == len(values)


# --- Policies ------------------------------------------------------------------------


def body(w, x):
    return jnp.sum(jnp.sin(mlp(w, jnp.exp(x)) @ w))


def kept(policy):
    wrapped = jaxckpt.remat(body, policy=policy)
    residuals = jaxckpt.trace(wrapped, W, X, argnums=None).residuals
    return sorted(r.label for r in residuals if r.held)


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        ("save('mlp/dot_general')", ["mlp/dot_general"]),
        ("save('mlp/*')", ["mlp/tanh"]),  # which spares the product
        ("save('*/exp')", ["body/exp"]),
        ("dots - save('mlp/*')", ["body/dot_general"]),
        ("dots", ["body/dot_general", "mlp/dot_general"]),
    ],
)
@pytest.mark.skipif(_jax.remat3_enabled(), reason="refused: it keeps exponentials")
def test_a_pattern_with_a_slash_chooses_unnamed_values(policy, names):
    assert kept(policy) == names


def test_a_pattern_without_a_slash_is_of_the_programs_names_alone():
    with pytest.raises(PolicyError, match="no named values"):
        kept("save('*')")
    with pytest.raises(PolicyError, match="no named values"):
        kept("save(tanh)")


def test_a_pattern_with_a_slash_that_matches_nothing_is_refused():
    with pytest.raises(PolicyError, match="`mlp/tan`.*named or not.*`mlp/tanh`"):
        kept("save('mlp/tan')")


def test_a_pattern_with_a_slash_on_a_value_that_nothing_reads_is_refused():
    with pytest.raises(PolicyError, match="`body/reduce_sum`.*saves nothing"):
        kept("save('body/reduce_sum')")


# --- Choosing values -----------------------------------------------------------------


def chosen_program(name):
    fn, args = PROGRAMS[name]
    run, leaves, wrt = flat(fn, args)
    return jax.make_jaxpr(run)(*leaves), run, leaves, wrt


def gradients(run, leaves, wrt):
    function, inexact = of_inexact(run, leaves, wrt)

    def loss(*inexact):
        outputs = [jnp.real(o) for o in function(*inexact) if _is_inexact(o)]
        return sum(jnp.sum(jnp.sin(o.astype(jnp.float32))) for o in outputs)

    return jax.grad(loss, tuple(range(len(inexact))))(*inexact)


def _is_inexact(array):
    return jnp.issubdtype(array.dtype, jnp.inexact)


def rematerialised(chosen):
    policy = jax.checkpoint_policies.save_only_these_names(*chosen.saved)
    return jax.checkpoint(_jax.jaxpr_function(chosen.closed), policy=policy)


def held_names(chosen, leaves):
    graph = jaxckpt.trace(rematerialised(chosen), *leaves, argnums=None)
    return [r.name for r in graph.residuals if not r.shared and r.name]


@pytest.mark.skipif(_jax.remat3_enabled(), reason="it does not see names inside rules")
@pytest.mark.parametrize("trial", range(2))
@pytest.mark.parametrize("name", PROGRAMS)
def test_of_any_choice_exactly_what_is_read_is_held(name, trial):
    closed, run, leaves, wrt = chosen_program(name)
    draw = random.Random(zlib.crc32(f"{name} {trial}".encode()))
    share = draw.choice([0.2, 0.5, 1.0])
    count = len(find_values(closed))
    choice = {i: Decision.SAVE for i in range(count) if draw.random() < share}
    chosen = choose_values(closed, choice)
    held = held_names(chosen, leaves)
    # Only what was chosen, each once; what else was chosen, nothing reads.
    assert all(n == 1 for n in collections.Counter(held).values())
    assert set(held) <= set(chosen.saved)
    if trial == 0:
        chex.assert_trees_all_close(
            gradients(rematerialised(chosen), leaves, wrt),
            gradients(run, leaves, wrt),
            rtol=1e-4,
            atol=1e-5,
        )


@pytest.mark.skipif(_jax.remat3_enabled(), reason="it does not see names inside rules")
@pytest.mark.parametrize(
    "name",
    ["attention", "nested_loops", "branches", "half_precision"]
    + ["rule_in_a_loop", "one_call_three_times", "on_a_mesh", "vmapped_loop"],
)
def test_each_value_that_is_read_can_be_held_alone(name):
    closed, _, leaves, _ = chosen_program(name)
    values = find_values(closed)
    found = 0
    for index in range(len(values)):
        chosen = choose_values(closed, {index: Decision.SAVE}, values=values)
        assert len(chosen.saved) <= 1
        floats = values.items[index].dtype.startswith(("float", "bfloat"))
        if chosen.saved and floats and values.items[index].shape:
            assert held_names(chosen, leaves) == list(chosen.saved)
            found += 1
    assert found >= 2


def test_values_that_nothing_reads_are_left_out():
    closed = jax.make_jaxpr(lambda w, x: jnp.sin(x @ w) * 2)(W, X)
    saves = dict.fromkeys(range(3), Decision.SAVE)
    names = choose_values(closed, saves).saved
    assert [n.rpartition("/")[2] for n in names] == ["dot_general"]


def test_of_views_of_the_same_bytes_one_is_named():
    closed = jax.make_jaxpr(lambda w, x: jnp.sin((x @ w).T.reshape(2, 6)))(W, X)
    saves = dict.fromkeys(range(3), Decision.SAVE)
    names = choose_values(closed, saves).saved
    assert [n.rpartition("/")[2] for n in names] == ["dot_general"]


def test_decisions_are_taken_apart():
    def fn(w, x):
        return jnp.sin(jnp.sin(jnp.sin(x @ w) @ w) @ w)

    closed = jax.make_jaxpr(fn)(W, X)
    dots = [i for i, v in enumerate(find_values(closed).items) if v.dot]
    how = Decision.SAVE, Decision.OFFLOAD, Decision.RECOMPUTE
    chosen = choose_values(closed, dict(zip(dots, how, strict=True)))
    assert chosen.saved == ("fn/dot_general",)
    assert chosen.offloaded == ("fn/dot_general#2",)


def test_attentions_residuals_inside_its_rule_are_chosen_by_number():
    closed, _, leaves, _ = chosen_program("attention")
    values = find_values(closed)
    inside = [i for i, v in enumerate(values.items) if v.in_rule]
    chosen = choose_values(closed, dict.fromkeys(inside, Decision.SAVE))
    assert {"context", "context_lse"} <= set(chosen.in_rules)
    assert {"context", "context_lse"} <= set(held_names(chosen, leaves))


def test_layers_of_a_scan_are_chosen_with_all_their_steps():
    def fn(ws, x):
        return lax.scan(lambda x, w: (jnp.sin(mlp(w, x)), None), x, ws)[0]

    closed = jax.make_jaxpr(fn)(WEIGHTS, X)
    (product,) = [i for i, v in enumerate(find_values(closed).items) if v.dot]
    chosen = choose_values(closed, {product: Decision.SAVE})
    policy = jax.checkpoint_policies.save_only_these_names(*chosen.saved)
    run = jax.checkpoint(_jax.jaxpr_function(chosen.closed), policy=policy)
    graph = jaxckpt.trace(run, WEIGHTS, X, argnums=None)
    (held,) = [r for r in graph.residuals if r.held]
    assert (held.name, held.shape) == ("mlp/dot_general", (3, *X.shape))
