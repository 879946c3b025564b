"""Stacks in odd programs that once failed."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers import jax_option, no_optimizations
from jax.ad_checkpoint import checkpoint_name

import jaxckpt
from jaxckpt import Stack
from jaxckpt.devices import get_device
from jaxckpt.errors import WorkloadError
from jaxckpt.report.explain import explain_workload
from jaxckpt.xla.measure import trace_loss
from models import gpt

DEPTH = 4
X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
W = jax.random.normal(jax.random.key(0), (DEPTH, 4, 4)) / 2


@pytest.fixture(autouse=True, scope="module")
def _fast():
    with no_optimizations():
        yield


class Plain(nnx.Module):
    """One layer without any state that changes."""

    def __init__(self, *, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x, shared=None):
        x = x + jnp.tanh(self.dense(x))
        return x if shared is None else shared(x)


def plain_stack():
    return Stack(Plain, DEPTH, schedule="every(2)", rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "call",
    [
        lambda m: jax.vmap(m)(X),
        lambda m: jax.jit(lambda x: m(x))(X),
        lambda m: jax.checkpoint(lambda x: m(x))(X),
        lambda m: jax.lax.map(m, X),
    ],
    ids=["vmap", "jit", "checkpoint", "map"],
)
def test_nnx_stack_is_called_inside_what_closes_over_it(call):
    module = plain_stack()
    chex.assert_trees_all_close(call(module), module(X), rtol=1e-6)


def test_nnx_stack_has_gradients_inside_what_closes_over_it():
    module = plain_stack()
    found = jax.grad(lambda x: jnp.sum(module(x)))(X)
    graphdef, state = nnx.split(module)
    wanted = jax.grad(lambda x: jnp.sum(nnx.merge(graphdef, state)(x)))(X)
    chex.assert_trees_all_close(found, wanted, rtol=1e-6)


def test_state_of_a_module_given_as_argument_goes_on_from_layer_to_layer():
    drop = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
    module = plain_stack()
    first, second = module(X, drop), module(X, drop)
    assert int(drop.rngs.count[...]) == 2 * DEPTH
    assert not np.allclose(first, second)


def test_nnx_block_that_takes_a_module_of_the_outside_is_told_so():
    outer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    class Taking(nnx.Module):
        def __init__(self, *, rngs):
            self.outer = outer

    with pytest.raises(WorkloadError, match="`Taking` takes a Module or Variable"):
        Stack(Taking, DEPTH, rngs=nnx.Rngs(0))


def test_linen_block_that_holds_a_module_of_another_is_told_so():
    class Holding(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            return self.inner(x)

    class Model(nn.Module):
        def setup(self):
            self.dense = nn.Dense(4)

        @nn.compact
        def __call__(self, x):
            return Stack(functools.partial(Holding, self.dense), DEPTH)(x)

    with pytest.raises(WorkloadError, match="`Holding` holds a Module that belongs"):
        Model().init(jax.random.key(0), X)


@pytest.mark.parametrize("name", ["fn", "options", "scope_fn", "carry"])
def test_argument_of_a_linen_block_may_have_any_name(name):
    class Named(nn.Module):
        @nn.compact
        def __call__(self, x, **given):
            return x + nn.Dense(4)(given[name])

    module = Stack(Named, DEPTH, schedule="full")
    variables = module.init(jax.random.key(0), X, **{name: 2 * X})
    other = module.apply(variables, X, **{name: 3 * X})
    assert not np.allclose(module.apply(variables, X, **{name: 2 * X}), other)


def test_body_may_name_a_constant():
    def body(x, w):
        return jnp.tanh(x @ w) * checkpoint_name(2.0, "two"), None

    found = jaxckpt.run_layers(body, X, W, "full")[0]
    wanted = jax.lax.scan(body, X, W)[0]
    chex.assert_trees_all_close(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("schedule", ["full", "every(3)"])
def test_collective_over_a_vmapped_axis_has_its_gradient(schedule):
    def gradient(run):
        def loss(w):
            def one(x):
                return run(lambda x, w: (x - jax.lax.pmean(x @ w, "b"), None), x, w)[0]

            return jnp.sum(jax.vmap(one, axis_name="b")(X) ** 2)

        return jax.grad(loss)(W)

    found = gradient(lambda *args: jaxckpt.run_layers(*args, schedule))
    chex.assert_trees_all_close(found, gradient(jax.lax.scan), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", ["full", "every(3)", "binomial(2)"])
def test_gradient_with_64_bit_types_on_is_that_of_a_scan(schedule):
    with jax_option("jax_enable_x64", True):
        x, w = np.asarray(X, np.float64), np.asarray(W, np.float64)
        body = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731

        def gradient(run):
            return jax.grad(lambda w: jnp.sum(run(body, jnp.asarray(x), w)[0]))(w)

        found = gradient(lambda *args: jaxckpt.run_layers(*args, schedule))
        assert found.dtype == jnp.float64
        chex.assert_trees_all_close(found, gradient(jax.lax.scan), rtol=1e-12)


def test_callback_sees_only_values_that_the_layers_have():
    seen = []

    def body(x, w):
        jax.debug.callback(lambda total: seen.append(float(total)), jnp.sum(x))
        return jnp.tanh(x @ w.astype(jnp.bfloat16)), None

    def loss(w):
        x = jnp.ones((2, 4), jnp.bfloat16)
        return jnp.sum(jaxckpt.run_layers(body, x, w, "every(2)")[0])

    jax.block_until_ready(jax.grad(loss)(W))
    jax.effects_barrier()
    x, totals = jnp.ones((2, 4), jnp.bfloat16), []
    for w in W:
        totals.append(float(jnp.sum(x)))
        x = jnp.tanh(x @ w.astype(jnp.bfloat16))
    nearest = [min(abs(s - t) for t in totals) for s in seen]
    assert min(totals) > 0.5 and len(seen) >= DEPTH
    assert max(nearest) < 0.1


@pytest.mark.parametrize(
    ("settings", "loops"),
    [
        ({"schedule": "every(2)"}, True),
        ({"schedule": "nested(2, 2)"}, True),
        ({"schedule": "remat_every(2)"}, True),
        ({"schedule": "full"}, True),
        ({}, True),
        ({"schedule": "full", "scan": False}, False),
    ],
    ids=str,
)
def test_layers_in_loops_are_known_under_each_schedule(settings, loops):
    workload = gpt.tiny(batch=2, seq=8, attention="xla", **settings)
    assert (trace_loss(workload).scanned_layers > 1) == loops


@pytest.mark.parametrize(
    ("options", "said"), [({"policy": "full"}, True), ({}, False)], ids=["full", "none"]
)
def test_rule_that_the_workload_does_not_use_is_said(options, said):
    rules = {k: jaxckpt.parse_policy(v) for k, v in options.items()}
    found = explain_workload(
        lambda: gpt.tiny(batch=2, seq=8), **rules, device=get_device("attached")
    )
    assert any("rematerialises nothing" in note for note in found.notes) == said
