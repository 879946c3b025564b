"""What people wrote that broke: inputs that are none, and models out of the ordinary."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxckpt
from jaxckpt.memory import predict_step


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
        jaxckpt.Plan(rules)


def test_name_of_a_stack_that_is_no_text_is_refused():
    with pytest.raises(jaxckpt.PlanError, match="the stack `1`, which is not in"):
        jaxckpt.plan_from({1: "full"}, scanned, STACK, X)


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
WORKLOAD, PLAN, DEVICE = jaxckpt.WorkloadError, jaxckpt.PlanError, jaxckpt.DeviceError
NO_PREDICTION = {
    "no graph": (lambda: None, {}, WORKLOAD, "`graph=None` is no traced function"),
    "rule": (traced, {"plan": "full"}, PLAN, "`plan='full'` is no plan. Make one"),
    "schedule": (traced, {"plan": FULL}, PLAN, "is no plan. Make one of it"),
    "no call": (traced, {"optimizer": optax.adam}, WORKLOAD, "no optax transform"),
    "number": (traced, {"device": 80}, DEVICE, "`80` is not a known device. Valid: a"),
    "none": (traced, {"device": None}, DEVICE, "`None` is not a known device"),
    "array": (
        lambda: traced(returns_product),
        {},
        WORKLOAD,
        r"return a scalar loss, and not `float32\[2,4\]`",
    ),
    "more": (
        lambda: traced(returns_two),
        {"optimizer": optax.sgd(0.1)},
        WORKLOAD,
        "`has_aux=True`",
    ),
    "no more": (lambda: traced(has_aux=True), {}, WORKLOAD, "one tree, and not `f"),
    "much more": (
        lambda: traced(returns_three, has_aux=True),
        {},
        WORKLOAD,
        "a scalar loss and one tree, and not",
    ),
    "keys": (
        lambda: traced(of_tree, KEYED),
        {},
        WORKLOAD,
        r"holds key<fry> at `\['key'\]`, which cannot be trained",
    ),
    "counts": (
        lambda: traced(of_tree, COUNTED),
        {"optimizer": optax.adam(0.1)},
        WORKLOAD,
        r"holds int32 at `\['n'\]`, which cannot be trained",
    ),
}


@pytest.mark.parametrize("name", NO_PREDICTION)
def test_what_cannot_be_predicted_is_refused(name):
    make, options, error, message = NO_PREDICTION[name]
    with pytest.raises(error, match=message):
        jaxckpt.predict(make(), **options)


def test_loss_with_more_outputs_is_predicted():
    graph = traced(returns_two, has_aux=True)
    plan = jaxckpt.plan_from("full", returns_two, STACK, X)
    found = jaxckpt.predict(graph, plan, optimizer=optax.sgd(0.1))
    assert found.recompute_flops == 5 * found.forward_flops // 6


def test_donated_arguments_may_be_counted_from_behind():
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    peaks = [
        predict_step(lambda a, b: b + 1, x, x, donate_argnums=n).peak_bytes
        for n in (-1, 1, ())
    ]
    assert peaks[0] == peaks[1] < peaks[2]


@pytest.mark.parametrize("position", [2, -3, "x", (0, 5)])
def test_donated_arguments_that_there_are_not_are_refused(position):
    with pytest.raises(jaxckpt.WorkloadError, match="the step is given 2 arguments"):
        predict_step(jnp.add, X, X, donate_argnums=position)


def test_what_is_no_program_is_refused():
    with pytest.raises(jaxckpt.WorkloadError, match="is no traced program"):
        jaxckpt.stages(scanned)
    with pytest.raises(TypeError, match="`fn=None` is no function"):
        jaxckpt.trace(None, X)
    with pytest.raises(ValueError, match="has 'w', but the function is given 2"):
        jaxckpt.trace(scanned, STACK, X, argnums="w")


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
    plan = jaxckpt.plan_from(rule, loss, STACK, X)
    assert plan.depths == (6,)
    found = jax.value_and_grad(plan.apply(loss))(STACK, X)
    same(found, jax.value_and_grad(loss)(STACK, X))


def test_values_of_a_forward_rule_that_calls_the_function_are_listed_once():
    values = jaxckpt.trace(lambda w, x: jnp.sum(swish(x @ w)), STACK[0], X).values
    assert len(values) < 12
