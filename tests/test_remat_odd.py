"""Layers of odd operations: a policy must not break what JAX differentiates."""

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jaxckpt
from jaxckpt import PolicyError

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (4, 8))
W = jax.random.normal(KEY, (8, 8)) * 0.1 + jnp.eye(8)


def solver(w, x):
    hidden = checkpoint_name(jnp.sin(x @ w), "hidden")
    return jnp.sum(jnp.linalg.solve(w, hidden.T) ** 2)


def spectrum(w, x):
    hidden = checkpoint_name(jnp.sin(x @ w), "hidden")
    return jnp.sum(jnp.abs(jnp.fft.fft(hidden)) ** 2)


def noisy(w, x):  # a random draw goes through `nextafter`, which has no derivative
    hidden = checkpoint_name(jnp.tanh(x @ w), "hidden")
    return jnp.sum(jnp.sin(hidden * jax.random.normal(KEY, hidden.shape)) @ w)


def looped(w, x):  # a loop without a gradient, of what is not differentiated
    steps = jax.lax.while_loop(lambda n: n < 3.0, lambda n: n + 1.0, jnp.float32(0))
    return jnp.sum(checkpoint_name(x @ w, "hidden") * steps) ** 2


@pytest.mark.parametrize("layer", [solver, spectrum, noisy, looped])
@pytest.mark.parametrize(
    "policy",
    ["full", "dots", "save(hidden)", "recompute(hidden)", "save_larger_than(1B)"],
)
def test_gradients_of_odd_layers_are_those_without_remat(layer, policy):
    wanted = jax.grad(layer, (0, 1))(W, X)
    got = jax.jit(jax.grad(jaxckpt.remat(layer, policy=policy), (0, 1)))(W, X)
    chex.assert_trees_all_close(got, wanted, rtol=2e-3, atol=2e-3)


def test_a_complex_value_by_name_is_refused():
    def layer(w, x):
        hidden = checkpoint_name(jnp.fft.fft(jnp.sin(x @ w)), "hidden")
        return jnp.sum(jnp.abs(hidden) ** 2)

    with pytest.raises(PolicyError, match="`hidden` of .* is complex"):
        jaxckpt.remat(layer, policy="save(hidden)")(W, X)


def test_a_function_that_closes_over_arrays_reads_them_anew():
    held = [jnp.ones((8, 8))]
    layer = jaxckpt.remat(lambda x: jnp.sin(x @ held[0]), policy="full")
    layer(X)
    held[0] = jnp.zeros((8, 8))
    chex.assert_trees_all_equal(layer(X), jnp.zeros((4, 8)))


def test_dead_code_counts_neither_as_forward_nor_as_recomputed():
    def layer(w, x):
        _ = x @ w
        return jnp.sin(checkpoint_name(x @ w, "hidden") @ w)

    product = 2 * X.shape[0] * W.size
    for policy, again in (("full", 2), ("save(hidden)", 1), ("dots", 0)):
        graph = jaxckpt.trace(jaxckpt.remat(layer, policy=policy), W, X, argnums=None)
        assert graph.forward_flops == 2 * product
        assert graph.recompute_flops == again * product


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(checkpoint_name(jnp.tanh(nn.Dense(4)(x)), "hidden"))


def test_a_name_that_only_the_gradient_by_parameters_reads_passes_init():
    block = jaxckpt.remat(Block, policy="save(hidden)")
    variables = block().init(KEY, X)
    chex.assert_trees_all_equal(variables, Block().init(KEY, X))
    jax.grad(lambda v: jnp.sum(block().apply(v, X)))(variables)


def test_streams_and_variables_outside_modules_are_updated():
    def layer(rngs, count, x):
        count.value = count.value + 1
        return x * jax.random.bernoulli(rngs.dropout(), 0.5, x.shape)

    wrapped = jaxckpt.remat(layer, policy="full")
    results = []
    for fn in (layer, wrapped):
        rngs, count = nnx.Rngs(0), nnx.BatchStat(jnp.zeros(()))
        results.append([fn(rngs, count, X), fn(rngs, count, X), count.value])
    chex.assert_trees_all_equal(*results)


def test_excluding_a_name_behind_a_bias_excludes_the_product():
    def layer(w, x):
        hidden = checkpoint_name(x @ w + jnp.ones(8), "hidden")
        return jnp.sin(hidden @ w)

    remat = jaxckpt.remat(layer, policy="dots - save(hidden)")
    graph = jaxckpt.trace(remat, W, X, argnums=None)
    kept = [r.label for r in graph.residuals if not r.argument]
    assert kept == ["layer/dot_general#2"]
    assert graph.recompute_flops == 2 * X.shape[0] * W.size


def test_a_kept_result_of_tanh_is_not_said_to_run_again():
    def layer(w, x):
        return jnp.sin(checkpoint_name(jnp.tanh(x @ w), "hidden") @ w)

    remat = jaxckpt.remat(layer, policy="save(hidden)")
    (region,) = jaxckpt.trace(remat, W, X, argnums=None).regions
    assert [r.label for r in region.kept] == ["hidden"]
    assert [v.primitive for v in region.recomputed] == ["dot_general"]  # the second
