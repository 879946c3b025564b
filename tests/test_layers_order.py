"""The order of a layer's backward pass: each weight's gradient in its turn."""

import chex
import jax
import jax.numpy as jnp
import pytest

from jaxckpt import _jax
from jaxckpt.layers_order import gradients_in_turn


def two_products(weights, x):
    hidden = jnp.tanh(x @ weights["in"])
    return hidden @ weights["out"]


def backward_of(fn, weights, x, rematerialised):
    """Return the backward pass of a function as a jaxpr: cotangent -> gradients."""
    fn = jax.checkpoint(fn) if rematerialised else fn
    _, vjp = jax.vjp(fn, weights, x)
    cotangent = jnp.ones((3, 2))
    closed = jax.make_jaxpr(lambda vjp, d: jax.tree.leaves(vjp(d)))(vjp, cotangent)
    return closed, [*jax.tree.leaves(vjp), cotangent]


def count(closed, name):
    own = sum(eqn.primitive.name == name for eqn in _jax.open_jaxpr(closed).eqns)
    inner = [j for e in _jax.open_jaxpr(closed).eqns for j in e.params.values()]
    return own + sum(count(j, name) for j in inner if hasattr(j, "eqns"))


@pytest.mark.parametrize("rematerialised", [False, True])
def test_each_weight_is_tied_to_what_goes_on_from_its_cotangent(rematerialised):
    keys = jax.random.split(jax.random.key(0), 3)
    weights = {
        "in": jax.random.normal(keys[0], (4, 5)),
        "out": jax.random.normal(keys[1], (5, 2)),
    }
    x = jax.random.normal(keys[2], (3, 4))
    closed, values = backward_of(two_products, weights, x, rematerialised)
    inputs = [False] * (len(values) - 1) + [True]
    ordered = gradients_in_turn(closed, [True, True, False], inputs)
    assert count(ordered, "optimization_barrier") == 2
    assert count(ordered, "dot_general") == count(closed, "dot_general")
    expected = _jax.jaxpr_function(closed)(*values)
    chex.assert_trees_all_equal(_jax.jaxpr_function(ordered)(*values), expected)


def test_a_pass_without_weights_stays_as_it_is():
    closed = jax.make_jaxpr(lambda d, w: (d @ w.T, jnp.sum(d)))(
        jnp.ones((3, 2)), jnp.ones((4, 2))
    )
    ordered = gradients_in_turn(closed, [False, True], [True, False])
    assert count(ordered, "optimization_barrier") == 0
