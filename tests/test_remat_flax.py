"""Flax Modules under remat: one tree, one set of numbers, with and without the wrap."""

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from helpers import named, no_optimizations

import jaxckpt
from jaxckpt.errors import WorkloadError

X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
POLICIES = "full", "save(up)", "save_everything()"
each_policy = pytest.mark.parametrize("policy", POLICIES)


@pytest.fixture(autouse=True, scope="module")
def _fast():
    with no_optimizations():
        yield


class Busy(nn.Module):
    """All that a linen layer can do besides computing."""

    @nn.compact
    def __call__(self, x, train: bool = False, *, scale: float = 1.0):
        up = named(nn.Dense(6)(x), "up")
        up = nn.BatchNorm(use_running_average=not train)(up)
        up = nn.Dropout(0.5, deterministic=not train)(jnp.tanh(up))
        self.sow("intermediates", "up", up)
        calls = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
        if not self.is_initializing():
            calls.value += 1
        return x + scale * nn.Dense(4)(up)


def busy_model(block):
    """Two unnamed blocks, then one that is shared, in a Module."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool = False):
            for _ in range(2):
                x = block()(x, train)
            shared = block(name="shared")
            return jnp.sum(shared(shared(x, train), train) ** 2)

    return Model()


def _train(model, variables):
    """Return loss, the variables that changed, and gradients of the parameters."""
    rest = {name: v for name, v in variables.items() if name != "params"}

    def loss(params):
        return model.apply(
            {"params": params, **rest},
            X,
            train=True,
            rngs={"dropout": jax.random.key(2)},
            mutable=["batch_stats", "intermediates", "counters"],
        )

    return jax.value_and_grad(loss, has_aux=True)(variables["params"])


@each_policy
def test_tree_and_initial_values_are_those_without_the_wrap(policy):
    plain = busy_model(Busy).init(KEYS, X)
    wrapped = busy_model(jaxckpt.remat(Busy, policy=policy, static_argnames="train"))
    chex.assert_trees_all_equal(wrapped.init(KEYS, X), plain)
    assert set(plain["params"]) == {"Busy_0", "Busy_1", "shared"}


@each_policy
def test_masks_statistics_sown_values_and_counters_are_those_without_the_wrap(policy):
    plain = busy_model(Busy)
    wrapped = busy_model(jaxckpt.remat(Busy, policy=policy, static_argnames="train"))
    variables = plain.init(KEYS, X)
    got, wanted = _train(wrapped, variables), _train(plain, variables)
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-6)
    counters = wanted[0][1]["counters"]
    assert [int(counters[b]["calls"]) for b in ("Busy_0", "shared")] == [1, 2]
    chex.assert_trees_all_equal(got[0][1]["counters"], counters)


def test_wrapped_class_keeps_its_name():
    wrapped = jaxckpt.remat(Busy, policy="full")
    assert (wrapped.__name__, wrapped.__doc__) == ("Busy", Busy.__doc__)
    wrapped = jaxckpt.remat(BusyNNX, policy="full")
    assert (wrapped.__name__, wrapped.__doc__) == ("BusyNNX", BusyNNX.__doc__)


@pytest.mark.parametrize(
    "call",
    [
        lambda layer, x: layer(x, True),
        lambda layer, x: layer(x, train=True),
        lambda layer, x: layer(train=True, x=x),
        lambda layer, x: layer(x, True, scale=1.0),
    ],
    ids=["position", "keyword", "all keywords", "with keyword-only"],
)
def test_static_argument_of_a_linen_module_goes_in_any_way(call):
    wrapped = jaxckpt.remat(Busy, policy="full", static_argnames=("train",))()
    variables = Busy().init(KEYS, X)
    options = {"rngs": {"dropout": jax.random.key(2)}, "mutable": True}
    got = wrapped.apply(variables, X, method=call, **options)
    wanted = Busy().apply(variables, X, train=True, **options)
    chex.assert_trees_all_close(got, wanted, rtol=1e-6)


def test_static_argument_left_out_has_its_default():
    wrapped = jaxckpt.remat(Busy, policy="full", static_argnames=("train", "scale"))()
    variables = Busy().init(KEYS, X)
    got = wrapped.apply(variables, X, mutable=True)
    chex.assert_trees_all_close(got, Busy().apply(variables, X, mutable=True))


@pytest.mark.parametrize("library", ["function", "nnx"])
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((X, "sin"), {}), ((X,), {"mode": "sin"}), ((), {"mode": "sin", "x": X})],
    ids=["position", "keyword", "all keywords"],
)
def test_static_argument_of_other_targets_goes_in_any_way(library, args, kwargs):
    def function(x, mode="cos", *, power=2):
        return getattr(jnp, mode)(x) ** power

    class Module(nnx.Module):
        def __call__(self, x, mode="cos", *, power=2):
            return function(x, mode, power=power)

    target = function if library == "function" else Module
    names = ("mode", "power")
    wrapped = jaxckpt.remat(target, policy="full", static_argnames=names)
    call = wrapped if library == "function" else wrapped()
    chex.assert_trees_all_close(call(*args, **kwargs), jnp.sin(X) ** 2)
    chex.assert_trees_all_close(call(X, power=1), jnp.cos(X))


def test_static_argument_before_a_variable_number_of_others_goes_in():
    def total(negative, x, *more):
        return -sum(more, x) if negative else sum(more, x)

    wrapped = jaxckpt.remat(total, policy="full", static_argnames="negative")
    for negative in (False, True):
        got = wrapped(negative, X, 2 * X, 3 * X)
        chex.assert_trees_all_close(got, total(negative, X, 2 * X, 3 * X))


@pytest.mark.parametrize("target", [Busy, lambda x, train: x])
def test_unknown_static_argument_is_refused_with_the_known_ones(target):
    with pytest.raises(WorkloadError, match="`training`.*arguments: x, train"):
        jaxckpt.remat(target, policy="full", static_argnames="training")


class BusyNNX(nnx.Module):
    """All that an nnx layer can do besides computing."""

    def __init__(self, *, rngs):
        self.up = nnx.Linear(4, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(6, 4, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        up = named(self.up(x), "up")
        return x + self.down(self.drop(jnp.tanh(self.norm(up))))


def _train_nnx(run, block):
    """Return loss, gradients and the state after two calls of `run(block, x)`."""

    def loss(block):
        return jnp.sum(run(block, run(block, X)) ** 2)

    graphdef, params, rest = nnx.split(block, nnx.Param, ...)

    def pure(params, rest):
        merged = nnx.merge(graphdef, params, rest, copy=True)
        value = loss(merged)
        return value, nnx.state(merged, nnx.Not(nnx.RngKey))

    return jax.value_and_grad(pure, has_aux=True)(params, rest)


@each_policy
def test_nnx_module_counts_draws_and_statistics_as_without_the_wrap(policy):
    wrapped = jaxckpt.remat(BusyNNX, policy=policy)
    plain_block, block = BusyNNX(rngs=nnx.Rngs(0)), wrapped(rngs=nnx.Rngs(0))
    chex.assert_trees_all_equal_structs(nnx.state(block), nnx.state(plain_block))
    wanted = _train_nnx(BusyNNX.__call__, plain_block)
    got = _train_nnx(wrapped.__call__, block)
    assert int(wanted[0][1]["calls"][...]) == 2
    assert int(wanted[0][1]["drop"]["rngs"]["count"][...]) == 2
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-6)


@each_policy
def test_nnx_module_as_an_argument_of_a_function_is_updated(policy):
    def run(block, x):
        return block(x)

    wanted = _train_nnx(run, BusyNNX(rngs=nnx.Rngs(0)))
    got = _train_nnx(jaxckpt.remat(run, policy=policy), BusyNNX(rngs=nnx.Rngs(0)))
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_nnx_modules_that_share_a_part_still_share_it():
    class Pair(nnx.Module):
        def __init__(self, shared):
            self.first = self.second = shared

        def __call__(self, x):
            return self.second(self.first(x))

    def gradient(pair_class):
        pair = pair_class(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
        return nnx.grad(lambda pair: jnp.sum(pair(X) ** 2))(pair)

    got, wanted = gradient(jaxckpt.remat(Pair, policy="full")), gradient(Pair)
    chex.assert_trees_all_close(got, wanted, rtol=1e-6)
    assert len(jax.tree.leaves(wanted)) == 2


def test_nnx_module_that_a_function_closes_over_takes_part():
    linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def loss(linear, wrap):
        return jnp.sum(wrap(lambda x: jnp.tanh(linear(x)))(X))

    def wrap(fn):
        return jaxckpt.remat(fn, policy="full")

    got, wanted = (
        nnx.grad(lambda m, w=w: loss(m, w))(linear) for w in (wrap, lambda f: f)
    )
    chex.assert_trees_all_close(got, wanted, rtol=1e-6)


def test_decode_cache_advances_as_without_the_wrap():
    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.MultiHeadDotProductAttention(2, decode=True)(x)

    def two_steps(decoder):
        variables = decoder.init(jax.random.key(0), jnp.ones((1, 3, 4)))
        outputs = []
        for step in range(2):
            token = X[None, step : step + 1]
            out, cache = decoder.apply(variables, token, mutable=["cache"])
            variables = variables | cache
            outputs.append(out)
        return outputs, variables

    wrapped = jaxckpt.remat(Decoder, policy="full")
    got, wanted = two_steps(wrapped()), two_steps(Decoder())
    attention = wanted[1]["cache"]["MultiHeadDotProductAttention_0"]
    assert int(attention["cache_index"]) == 2
    chex.assert_trees_all_close(got, wanted, rtol=1e-6)


class CallsPython(nn.Module):
    """A layer that calls back to Python."""

    @nn.compact
    def __call__(self, x):
        done = jax.experimental.io_callback(lambda: jnp.float32(1), jnp.float32(0))
        return nn.Dense(4)(x) + done


def test_io_callback_is_refused_and_the_block_named():
    wrapped = jaxckpt.remat(CallsPython, policy="full")()
    variables = CallsPython().init(jax.random.key(0), X)
    with pytest.raises(WorkloadError, match="`CallsPython` calls `io_callback`"):
        wrapped.apply(variables, X)


def test_debug_print_is_allowed(capsys):
    def layer(x):
        jax.debug.print("x is {}", x[0, 0])
        return jnp.sum(jnp.sin(jnp.sin(x)))

    wrapped = jaxckpt.remat(layer, policy="full")
    chex.assert_trees_all_close(jax.grad(wrapped)(X), jax.grad(layer)(X), rtol=1e-6)
    jax.effects_barrier()
    assert capsys.readouterr().out.count("x is -1.0") in (2, 3)  # plain: once
