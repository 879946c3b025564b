"""What broke: inputs that are none, and derivative rules out of the ordinary."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jaxckpt
from jaxckpt.errors import did_you_mean
from jaxckpt.memory import predict_step
from jaxckpt.memory.checks import check_kinds
from jaxckpt.plan import check_pairs
from jaxckpt.rewrite_find import check_names


def same(found, expected):
    """Raise unless two trees of arrays are equal up to rounding."""
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


STACK = jnp.full((6, 4, 4), 0.1)
X = jnp.ones((2, 4))


def scanned(weights, x):
    """Return the loss of layers in a scan."""
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)
    return jnp.sum(x)


# Tests check the types of what is handed over, so some go to what looks at it.
FULL = jaxckpt.full()
WRONG_PLANS = {
    "text": ("full", "are no pairs"),
    "names alone": (("layers",), "are no pairs"),
    "mapping": ({"layers": FULL}, "are no pairs"),
}


@pytest.mark.parametrize("name", WRONG_PLANS)
def test_rules_of_another_shape_are_refused(name):
    rules, message = WRONG_PLANS[name]
    with pytest.raises(jaxckpt.PlanError, match=message):
        check_pairs(rules)


def test_name_of_a_stack_that_is_no_text_is_refused():
    chain = jaxckpt.stages(traced())
    with pytest.raises(jaxckpt.PlanError, match="the stack `1`, which is not in"):
        check_names({1: "full"}, chain, "`scanned`")


def returns_product(weights, x):
    return x @ weights[0]


def returns_two(weights, x):
    return scanned(weights, x), x


def returns_three(weights, x):
    return scanned(weights, x), x, x


def of_tree(tree, x):
    return jnp.sum(x) * jnp.sum(tree["w"])


def traced(fn=scanned, weights=STACK, **options):
    return jaxckpt.trace(fn, weights, X, **options)


KEYED = {"w": STACK, "key": jax.random.key(0)}
COUNTED = {"w": STACK, "n": jnp.arange(3)}
NO_PREDICTION = {
    "array": (
        lambda: traced(returns_product),
        {},
        r"return a scalar loss, and not `float32\[2,4\]`",
    ),
    "more": (
        lambda: traced(returns_two),
        {"optimizer": optax.sgd(0.1)},
        "`has_aux=True`",
    ),
    "no more": (lambda: traced(has_aux=True), {}, "one tree, and not `f"),
    "much more": (
        lambda: traced(returns_three, has_aux=True),
        {},
        "a scalar loss and one tree, and not",
    ),
    "keys": (
        lambda: traced(of_tree, KEYED),
        {},
        r"holds key<fry> at `\['key'\]`, which cannot be trained",
    ),
    "counts": (
        lambda: traced(of_tree, COUNTED),
        {"optimizer": optax.adam(0.1)},
        r"holds int32 at `\['n'\]`, which cannot be trained",
    ),
}


@pytest.mark.parametrize("name", NO_PREDICTION)
def test_what_cannot_be_predicted_is_refused(name):
    make, options, message = NO_PREDICTION[name]
    with pytest.raises(jaxckpt.WorkloadError, match=message):
        jaxckpt.predict(make(), **options)


def test_something_else_than_graph_plan_and_optimizer_is_refused():
    graph = traced()
    with pytest.raises(jaxckpt.WorkloadError, match="`graph=None` is no traced funct"):
        check_kinds(None, None, None)
    for plan in ("full", FULL):
        with pytest.raises(jaxckpt.PlanError, match="is no plan. Make one of it"):
            check_kinds(graph, plan, None)
    with pytest.raises(jaxckpt.WorkloadError, match="is no optax transformation"):
        check_kinds(graph, None, optax.adam)
    check_kinds(graph, None, optax.MultiSteps(optax.adam(0.1), 2))


def test_names_that_are_no_text_have_a_hint_too():
    assert did_you_mean(80, ["h200"]) == "Valid: h200."


def test_loss_with_more_outputs_is_predicted():
    graph = traced(returns_two, has_aux=True)
    plan = jaxckpt.plan_from("full", returns_two, STACK, X)
    found = jaxckpt.predict(graph, plan, optimizer=optax.sgd(0.1))
    assert found.recompute_flops == found.forward_flops


def test_donated_arguments_may_be_counted_from_behind():
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    peaks = [
        predict_step(lambda a, b: b + 1, x, x, donate_argnums=n).peak_bytes
        for n in (-1, 1, ())
    ]
    assert peaks[0] == peaks[1] < peaks[2]


@pytest.mark.parametrize("position", [2, -3, (0, 5)])
def test_donated_arguments_that_there_are_not_are_refused(position):
    with pytest.raises(jaxckpt.WorkloadError, match="the step is given 2 arguments"):
        predict_step(jnp.add, X, X, donate_argnums=position)


def test_what_is_no_program_is_refused():
    with pytest.raises(jaxckpt.WorkloadError, match="is no traced program"):
        jaxckpt.stages(scanned)
    with pytest.raises(ValueError, match="has 2, but the function is given 2 argum"):
        traced(argnums=2)


WIDE = jnp.full((6, 4, 6), 0.1)


@jax.custom_vjp
def swish(x):
    """Multiply by the sigmoid; its forward rule calls it, as in JAX's own guide."""
    return x * jax.nn.sigmoid(x)


def _swish_forward(x):
    return swish(x), x


def _swish_backward(x, cotangent):
    s = jax.nn.sigmoid(x)
    return (cotangent * (s + x * s * (1 - s)),)


swish.defvjp(_swish_forward, _swish_backward)


def with_swish(weights, x):
    """Return the loss of layers with a derivative rule of their own."""
    for w in weights:
        x = x + swish(x @ w) @ w.T
    return jnp.sum(x**2)


def scanned_with_swish(weights, x):
    x, _ = lax.scan(lambda x, w: (x + swish(x @ w) @ w.T, None), x, weights)
    return jnp.sum(x**2)


@pytest.mark.parametrize("loss", [with_swish, scanned_with_swish])
@pytest.mark.parametrize("rule", ["every(2)", "dots"])
def test_forward_rules_that_call_the_function_itself_are_opened_once(loss, rule):
    plan = jaxckpt.plan_from(rule, loss, WIDE, X)
    assert plan.depths == (6,)
    found = jax.value_and_grad(plan.apply(loss))(WIDE, X)
    same(found, jax.value_and_grad(loss)(WIDE, X))


def test_values_of_a_forward_rule_that_calls_the_function_are_listed_once():
    values = jaxckpt.trace(lambda w, x: jnp.sum(swish(x @ w)), STACK[0], X).values
    assert len(values) < 12


def test_layers_with_derivative_rules_of_their_own_are_equal():
    chain = jaxckpt.stages(jaxckpt.trace(with_swish, WIDE, X))
    assert len({stage.kind for stage in chain.stacks[0].stages[1:]}) == 1


class NoisyBlock(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(jnp.tanh(self.dense(x)))


def noisy_loss(blocks, x):
    for block in blocks:
        x = block(x)
    return jnp.mean(x**2)


def test_a_model_in_parts_is_put_together_inside_a_planned_function():
    blocks = nnx.List([NoisyBlock(nnx.Rngs(i)) for i in range(4)])
    graphdef, params, rest = nnx.split(blocks, nnx.Param, ...)

    def loss(params, rest, x):
        return noisy_loss(nnx.merge(graphdef, params, rest, copy=True), x)

    planned = jaxckpt.plan_from("every(2)", loss, params, rest, X).apply(loss)
    found = jax.jit(jax.value_and_grad(planned))(params, rest, X)
    same(found, jax.value_and_grad(loss)(params, rest, X))


def test_a_planned_model_advances_its_own_random_numbers():
    one, other = (nnx.List([NoisyBlock(nnx.Rngs(0)) for _ in range(4)]) for _ in "ab")
    planned = jaxckpt.plan_from("full", noisy_loss, one, X).apply(noisy_loss)
    for _ in range(2):
        found = nnx.value_and_grad(planned)(one, X)[0]
        same(found, nnx.value_and_grad(noisy_loss)(other, X)[0])
