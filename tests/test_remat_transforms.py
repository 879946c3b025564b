"""Transformations inside and outside remat, and what is traced, kept and cached."""

import functools
import json

import chex
import helpers
import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxckpt

W = jax.random.normal(jax.random.key(0), (4, 4))
X = jax.random.normal(jax.random.key(1), (3, 4))
V = jax.random.normal(jax.random.key(2), (3, 4))
POLICIES = "full", "save(hidden)", "dots"
each_policy = pytest.mark.parametrize("policy", POLICIES)


@pytest.fixture(autouse=True, scope="module")
def _fast():
    with helpers.no_optimizations():
        yield


def layer(x, w=W):
    hidden = checkpoint_name(jnp.tanh(x @ w), "hidden")
    return jnp.sum(jnp.sin(hidden @ w) ** 2)


def _hvp(f):
    return lambda x: jax.jvp(jax.grad(f), (x,), (V,))[1]


def _per_row(f):
    return jax.vmap(lambda row: f(row[None]))


OUTSIDE = {
    "value": lambda f: f(X),
    "grad": lambda f: jax.grad(f)(X),
    "jvp": lambda f: jax.jvp(f, (X,), (V,)),
    "linearize": lambda f: jax.linearize(f, X)[1](V),
    "hessian": lambda f: jax.hessian(f)(X),
    "reverse over reverse": lambda f: jax.jacrev(jax.grad(f))(X),
    "hvp": lambda f: _hvp(f)(X),
    "grad of hvp": lambda f: jax.grad(lambda x: jnp.sum(_hvp(f)(x)))(X),
    "vmap": lambda f: _per_row(f)(X),
    "grad of vmap": lambda f: jax.grad(lambda x: jnp.sum(_per_row(f)(x)))(X),
    "vmap of grad": lambda f: _per_row(jax.grad(f))(X),
    "jit of grad": lambda f: jax.jit(jax.grad(f))(X),
    "grad of jit": lambda f: jax.grad(jax.jit(f))(X),
}


@each_policy
@pytest.mark.parametrize("transform", OUTSIDE.values(), ids=OUTSIDE)
def test_transformation_of_a_rematerialised_function_is_that_of_the_plain(
    transform, policy
):
    got = transform(jaxckpt.remat(layer, policy=policy))
    chex.assert_trees_all_close(got, transform(layer), rtol=1e-4, atol=1e-5)


def _scanned(x):
    def body(carry, w):
        return jnp.tanh(checkpoint_name(carry @ w, "hidden")), None

    return jnp.sum(jax.lax.scan(body, x, jnp.stack([W, W.T, W]))[0])


def _branches(x):
    return jax.lax.cond(
        x[0, 0] > 0, lambda x: layer(x), lambda x: layer(2 * x), checkpoint_name(x, "x")
    )


INSIDE = {
    "vmap": (lambda x: jnp.sum(_per_row(layer)(x)), "save(hidden)"),
    "grad": (lambda x: jnp.sum(jnp.sin(jax.grad(layer)(x))), "save(hidden)"),
    "jvp": (lambda x: jax.jvp(layer, (x,), (V,))[1], "save(hidden)"),
    "jit": (lambda x: jax.jit(layer)(x), "save(hidden)"),
    "scan": (_scanned, "save(hidden)"),
    "cond": (_branches, "dots"),
    "jax.checkpoint": (lambda x: jax.checkpoint(layer)(jnp.sin(x)), "full"),
    "jaxckpt.remat": (
        lambda x: jaxckpt.remat(layer, policy="save(hidden)")(jnp.sin(x)),
        "full",
    ),
}


@pytest.mark.parametrize(("fn", "policy"), INSIDE.values(), ids=INSIDE)
def test_gradient_of_a_transformation_inside_remat_is_that_without(fn, policy):
    wrapped = jaxckpt.remat(fn, policy=policy)
    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f)), _hvp):
        got, wanted = transform(wrapped)(X), transform(fn)(X)
        chex.assert_trees_all_close(got, wanted, rtol=1e-4, atol=1e-5)


def _layers(block, x, scan):
    weights = jnp.stack([W, W.T, W / 2])
    if scan:
        return jnp.sum(jax.lax.scan(lambda x, w: (block(w, x), None), x, weights)[0])
    for w in weights:
        x = block(w, x)
    return jnp.sum(x)


def _block(w, x):
    return x + jnp.sin(checkpoint_name(x @ w, "hidden") @ w)


@each_policy
@pytest.mark.parametrize("scan", [True, False])
def test_remat_inside_a_scan_equals_plain_layers(scan, policy):
    block = jaxckpt.remat(_block, policy=policy, prevent_cse=not scan)
    got = jax.value_and_grad(functools.partial(_layers, block, scan=scan))(X)
    wanted = jax.value_and_grad(functools.partial(_layers, _block, scan=False))(X)
    chex.assert_trees_all_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_scanned_layer_keeps_the_chosen_value_once_a_layer():
    block = jaxckpt.remat(_block, policy="save(hidden)", prevent_cse=False)
    names = helpers.residual_names(lambda x: _layers(block, x, True), X)
    assert names == {("hidden", "save"): 1, (None, "save"): 1}  # and the carry


SHARDED = """
import functools, json
import jax, jax.numpy as jnp, numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
import jaxckpt

mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
w, x = (jax.random.normal(jax.random.key(i), (8, 8)) for i in range(2))

def local(w, x):
    hidden = checkpoint_name(jnp.tanh(x @ w), "hidden")
    return jax.lax.psum(jnp.sum(jnp.sin(hidden @ w)), "data")

def sharded(fn):
    return jax.shard_map(fn, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())

def plain(w, x):
    return jnp.sum(jnp.sin(jnp.tanh(x @ w) @ w))

wanted = jax.grad(plain, (0, 1))(w, x)
errors = {}
for policy in ("full", "save(hidden)", "dots"):
    remat = functools.partial(jaxckpt.remat, policy=policy)
    places = {"outside": remat(sharded(local)), "inside": sharded(remat(local))}
    for place, fn in places.items():
        got = jax.jit(jax.grad(fn, (0, 1)))(w, x)
        off = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), got, wanted)
        errors[f"{place} {policy}"] = max(off)
print(json.dumps(errors))
"""


def test_shard_map_inside_and_outside_remat_equals_one_device():
    flags = "--xla_force_host_platform_device_count=4"
    errors = json.loads(helpers.run_python(SHARDED, XLA_FLAGS=flags))
    assert len(errors) == 6
    assert {case: e for case, e in errors.items() if not e < 1e-5} == {}


# --- What is traced, kept and cached -------------------------------------------------


def _counted(calls):
    def block(w, x):
        calls.append(1)
        return _block(w, x)

    return block


def test_shared_block_is_traced_once():
    calls = []
    block = jaxckpt.remat(_counted(calls), policy="save(hidden)")
    jax.make_jaxpr(jax.grad(lambda x: _layers(block, x, scan=False)))(X)
    jax.make_jaxpr(lambda x: _layers(block, x, scan=False))(X)
    assert len(calls) == 1


def test_cache_tells_shapes_dtypes_and_static_values_apart():
    calls = []

    def fn(x, power, *, negative=False):
        calls.append(power)
        return jnp.sum((-x if negative else x) ** power)

    wrapped = jaxckpt.remat(fn, policy="full", static_argnames=("power", "negative"))
    for x in (X, X[:2], X.astype(jnp.bfloat16), X.T):
        for power in (2, 3):
            for negative in (False, True):
                plain = fn(x, power, negative=negative)
                got = wrapped(x, power, negative=negative)
                assert got.dtype == x.dtype
                chex.assert_trees_all_close(got, plain, rtol=1e-2)
    assert len(calls) == 2 * 16


def test_cache_tells_equal_static_values_of_different_types_apart():
    def fn(x, scale):
        return x * scale

    wrapped = jaxckpt.remat(fn, policy="full", static_argnames="scale")
    x = jnp.ones(2, jnp.int32)
    dtypes = [wrapped(x, scale).dtype for scale in (1, 1.0, True)]
    assert dtypes == [(x * scale).dtype for scale in (1, 1.0, True)]


def test_cache_tells_weak_types_and_settings_apart():
    wrapped = jaxckpt.remat(lambda x: x * jnp.ones(1, jnp.bfloat16), policy="full")
    assert wrapped(1.0).dtype == jnp.bfloat16
    assert wrapped(jnp.float32(1.0)).dtype == jnp.float32
    promoted = jaxckpt.remat(lambda x: x + jnp.arange(1), policy="full")
    assert promoted(jnp.int32(1)).dtype == jnp.int32
    with helpers.jax_option("jax_enable_x64", True):
        assert promoted(jnp.int32(1)).dtype == jnp.int64


def test_value_closed_over_is_read_anew_at_each_call():
    def loss(w, x):
        return jaxckpt.remat(
            lambda x: jnp.sum(jnp.sin(jnp.tanh(x @ w))), policy="full"
        )(x)

    for grad in (jax.grad(loss), jax.jit(jax.grad(loss))):
        for w in (W, 2 * W):
            wanted = jax.grad(lambda w: jnp.sum(jnp.sin(jnp.tanh(X @ w))))(w)
            chex.assert_trees_all_close(grad(w, X), wanted, rtol=1e-5)


def test_one_wrapped_closure_under_two_outer_traces_leaks_nothing():
    box = {}

    def fn(x):
        return jnp.sum(jnp.sin(x * box["scale"]))

    wrapped = jaxckpt.remat(fn, policy="full")

    @jax.jit
    def outer(scale, x):
        box["scale"] = scale
        gradient = jax.grad(wrapped)(x)
        del box["scale"]
        return gradient

    with jax.checking_leaks():
        for x in (X, X[:1]):
            wanted = 3 * jnp.cos(3 * x)
            chex.assert_trees_all_close(outer(3.0, x), wanted, rtol=1e-5)


def test_live_arrays_stay_constant_over_twenty_steps():
    fn, (params, x) = helpers.build("linen", policy="save(out_proj)")

    @functools.partial(jax.jit, donate_argnums=0)
    def step(params, x):
        gradients = jax.grad(lambda p: jnp.mean(fn(p, x) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    live = []
    for _ in range(20):
        params = step(params, x)
        live.append(len(jax.live_arrays()))
    assert len(set(live[1:])) == 1


def test_evaluation_carries_no_remat_cost():
    def program(policy):
        fn, args = helpers.build("linen", policy=policy)
        return jax.jit(fn).lower(*args).compile()

    with helpers.jax_option("jax_disable_most_optimizations", False):
        plain, full = program("none"), program("full")
    assert full.as_text().count("opt-barrier") == 0
    assert full.as_text().count(" dot(") == plain.as_text().count(" dot(") > 0
    temp = [p.memory_analysis().temp_size_in_bytes for p in (plain, full)]
    assert temp[0] == temp[1]
