"""Every policy on a function, a linen and an nnx Module: equal, exact, and counted."""

import functools

import chex
import helpers
import jax
import jax.numpy as jnp
import pytest
from helpers import DTYPES, LIBRARIES, POLICIES
from jax.ad_checkpoint import checkpoint_name

import jaxckpt
from jaxckpt import _jax


def _product():
    """Yield all triples; one of each pair's two dtypes is left to `slow`."""
    for p, policy in enumerate(POLICIES):
        for i, library in enumerate(LIBRARIES):
            for d, dtype in enumerate(DTYPES):
                marks = [] if (p + i + d) % 2 == 0 else [pytest.mark.slow]
                yield pytest.param(policy, library, dtype, marks=marks)


each_case = pytest.mark.parametrize(("policy", "library", "dtype"), list(_product()))


@pytest.fixture(autouse=True, scope="module")
def _fast():
    with helpers.no_optimizations():
        yield


@functools.cache
def _run(library, dtype, policy):
    """Return output and gradients, the arrays held, and the named values."""
    # Not jitted: single operations compile once for all cases.
    with helpers.recording() as values:
        plain, args = helpers.build(library, dtype)
        plain(*args)
    fn, _ = helpers.build(library, dtype, policy)
    out, gradients, leaves = helpers.value_and_vjp(fn, *args)
    return (out, gradients), helpers.held(leaves, args, out), values


@each_case
def test_gradients_equal_those_without_remat(policy, library, dtype):
    got, _, _ = _run(library, dtype, policy)
    wanted, _, _ = _run(library, dtype, "none")
    # bfloat16 has 8 bits: a value rounded once more or less differs by 2^-8, and sums
    # of such by a few of them.
    tolerance = 2e-6 if dtype == "float32" else 2e-2
    chex.assert_tree_all_finite(wanted)
    chex.assert_trees_all_close(got, wanted, rtol=tolerance, atol=tolerance)


@each_case
def test_closure_holds_exactly_the_chosen_arrays(policy, library, dtype):
    _, held, values = _run(library, dtype, policy)
    case = POLICIES[policy]
    if case.kept is not None:
        assert helpers.names_of(held, values) == sorted(case.kept)
        return
    # A policy by exclusion: of the named arrays, what plain JAX holds but the excluded.
    _, plain, _ = _run(library, dtype, "none")
    wanted = helpers.names_of(helpers.distinct(plain), values)
    found = helpers.names_of(held, values)
    if case.dropped:
        wanted, found = ([n for n in x if n in values] for x in (wanted, found))
    elif policy == "none":
        wanted = helpers.names_of(plain, values)
    assert found == [name for name in wanted if name not in case.dropped]


@each_case
def test_products_run_again_are_those_not_kept(policy, library, dtype):
    fn, args = helpers.build(library, dtype, policy)
    # Nine products, each with one for either gradient.
    products = helpers.count(helpers.gradient_jaxpr(fn, *args))
    assert products == 27 + POLICIES[policy].products


@pytest.mark.skipif(
    _jax.remat3_enabled(), reason="refused there: a derivative reads the named result"
)
@pytest.mark.parametrize("policy", ["save(scale)", "offload(scale)"])
@pytest.mark.parametrize("frozen", ["argument", "stop_gradient"])
def test_a_named_result_without_a_gradient_is_kept(policy, frozen):
    """The derivative of `exp` reads its result, but none is taken here."""

    def layer(w, x):
        x = jax.lax.stop_gradient(x) if frozen == "stop_gradient" else x
        scale = checkpoint_name(jnp.exp(x), "scale")
        return jnp.sin(scale @ w)

    fn, args = jaxckpt.remat(layer, policy=policy), (jnp.ones((4, 4)), jnp.ones((2, 4)))
    argnums = 0 if frozen == "argument" else None
    residuals = jaxckpt.trace(fn, *args, argnums=argnums).residuals
    kept = [(r.name, r.decision) for r in residuals if not r.argument]
    assert kept == [("scale", policy.split("(")[0])]
    gradient = jax.make_jaxpr(jax.grad(lambda *args: fn(*args).sum()))(*args)
    assert helpers.count(gradient, "exp") == 1
