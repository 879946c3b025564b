"""A catalogue of odd programs: what tracing, naming and choosing must be right about.

Each is a function and its arguments, small enough to differentiate in a moment.
"""

import functools

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec

import jaxckpt

W = jax.random.normal(jax.random.key(0), (4, 4))
X = jax.random.normal(jax.random.key(1), (3, 4))
WEIGHTS = jnp.stack([W, W.T, W / 2])
CONSTANT = jnp.asarray(np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4))
KEY = jax.random.key(3)

PROGRAMS = {}


def program(*args):
    """Add a function to the catalogue, with its arguments."""

    def add(fn):
        PROGRAMS[fn.__name__] = (fn, args)
        return fn

    return add


@program(W, X, jnp.arange(3))
def integer_arguments(w, x, i):
    return jnp.sum(jnp.sin(x[i] @ w))


@program(W, X, KEY)
def dropout(w, x, key):
    mask, noise = jax.random.split(key)
    kept = jax.random.bernoulli(mask, 0.5, x.shape)
    return jnp.where(kept, jnp.tanh(x @ w), 0.0) + jax.random.normal(noise, x.shape)


@program(W, X)
def complex_values(w, x):
    z = lax.complex(x @ w, jnp.sin(x))
    return jnp.abs(jnp.exp(z * 1j) * z).sum()


@program(W, X)
def fourier(w, x):
    return jnp.abs(jnp.fft.fft(jnp.tanh(x @ w))) ** 2


@program(W, X)
def constants(w, x):
    return jnp.sin(jnp.sin(x @ CONSTANT) @ w)


@program(W, X, {}, ())
def empty_trees(w, x, nothing, empty):
    return {"y": jnp.sin(x @ w), "none": ()}


@program(W, X)
def counted_loop(w, x):
    return lax.fori_loop(0, 3, lambda i, c: jnp.sin(c @ w) + i, x)


@program(W, X)
def loop_of_frozen_values(w, x):
    frozen = lax.stop_gradient(x)
    step = lambda c: (c[0] + 1, c[1] * 2.0)  # noqa: E731
    return jnp.sin(x @ w) * lax.while_loop(lambda c: c[0] < 3, step, (0, frozen))[1]


@program(W, X)
def branches(w, x):
    def one(x):
        return jnp.tanh(x @ w) * jnp.exp(x)

    def two(x):
        return checkpoint_name(jnp.cos(x @ w), "chosen") @ w

    return lax.switch(1, [one, jnp.sin, two], x)


@program(W, X)
def nested_loops(w, x):
    def inner(carry, _):
        return jnp.tanh(carry @ w), jnp.sin(carry)

    def outer(carry, _):
        carry, outputs = lax.scan(inner, carry, None, length=2)
        return carry + outputs.sum(0), None

    return lax.scan(outer, x, None, length=3)[0]


@program(WEIGHTS, X)
def reverse_loop(weights, x):
    step = lambda c, w: (jnp.sin(c @ w), c.sum())  # noqa: E731
    return lax.scan(step, x, weights, reverse=True)


@program(W, X)
def associative(w, x):
    return lax.associative_scan(lambda a, b: a * b + jnp.sin(a), jnp.tanh(x @ w))


@program(W, X)
def cumulative(w, x):
    y = jnp.cumprod(jnp.tanh(x @ w), 0)
    return jnp.cumsum(y, 1) + lax.cumlogsumexp(x @ w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ruled(f, w, x):
    return f(x @ w)


_ruled.defvjp(
    lambda f, w, x: (f(x @ w), (w, x, jnp.exp(x @ w))),
    lambda f, r, g: (r[1].T @ (g * r[2]), g @ r[0].T),
)


@program(W, X)
def rule_with_static_arguments(w, x):
    return jnp.sin(_ruled(jnp.tanh, w, jnp.sin(x)))


@program(W, X)
def rule_in_a_loop(w, x):
    step = lambda c, _: (jnp.sin(_ruled(jnp.tanh, w, c)), None)  # noqa: E731
    return lax.scan(step, x, None, length=2)[0]


@program(W, X)
def vmapped_rule(w, x):
    return jax.vmap(lambda row: _ruled(jnp.tanh, w, row[None])[0])(x)


@program(W, X)
def solved(w, x):
    return jnp.linalg.solve(w @ w.T + jnp.eye(4), jnp.sin(x).T)


@program(W, X)
def factorised(w, x):
    lower = jnp.linalg.cholesky(w @ w.T + jnp.eye(4))
    return jax.scipy.linalg.cho_solve((lower, True), x.T)


@program(W, X)
def sorted_values(w, x):
    return jnp.sort(x @ w, axis=-1) * jnp.arange(4.0)


@program(W, X, jnp.array([0, 2, 1, 1]))
def gathered(w, x, i):
    return (x @ w).at[i].add(jnp.sin(x[i]))[:, i]


@program(W, X)
def sliced(w, x):
    rows = lax.dynamic_slice(jnp.sin(x @ w), (1, 0), (2, 4))
    return rows + lax.dynamic_update_slice(x, x[:1] @ w, (2, 0))[:2]


@program(W, X)
def functions_of_jax(w, x):
    y = jax.nn.relu(x @ w) + jax.nn.gelu(x @ w) + jax.nn.silu(x)
    return jax.nn.softmax(y) + jax.nn.log_softmax(x @ w) + jnp.max(x)


@program(W, X)
def vmapped_loop(w, x):
    step = lambda c, _: (jnp.sin(c @ w), None)  # noqa: E731
    return jax.vmap(lambda row: lax.scan(step, row, None, length=2)[0])(x)


@program(W, X)
def vmapped_branches(w, x):
    one, two = (lambda r: jnp.sin(r @ w)), (lambda r: jnp.exp(r))
    return jax.vmap(lambda row: lax.cond(row[0] > 0, one, two, row))(x)


@program(W, X)
def callback(w, x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    double = lambda a: np.asarray(a) * 2  # noqa: E731
    return jnp.sin(x @ w) * jax.pure_callback(double, shape, lax.stop_gradient(x))


@program(W, X)
def gradient_inside(w, x):
    return jax.grad(lambda x: jnp.sum(jnp.sin(x @ w) ** 2))(x)


@program(W, X)
def hessian_inside(w, x):
    return jax.hessian(lambda v: jnp.sum(jnp.tanh(v @ w)))(x[0])


@program(W, X)
def product_with_the_hessian(w, x):
    layer = jax.checkpoint(lambda x: jnp.sum(jnp.sin(jnp.tanh(x @ w) @ w)))
    return jax.jvp(jax.grad(layer), (x,), (x,))[1]


@program(W, X)
def rematerialised_inside(w, x):
    layer = jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x @ w) @ w))
    return jnp.sin(layer(jnp.exp(x)))


@program(W, X)
def half_precision(w, x):
    y = jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
    return y.astype(jnp.float32)


@program(W, X)
def attention(w, x):
    q = (x @ w)[None, :, None]
    return jnp.sin(helpers.fused_attend(q, q, jnp.tanh(q)))


@program(W, X)
def convolution(w, x):
    image, kernel = x.reshape(1, 1, 3, 4), w[:3, :3].reshape(1, 1, 3, 3)
    return jnp.tanh(lax.conv(image, kernel, (1, 1), "SAME"))


@program(W, X)
def one_call_three_times(w, x):
    layer = jax.jit(lambda x: jnp.tanh(x @ w))
    return layer(layer(x)) + layer(x)


@program(W, X)
def twice_named(w, x):
    y = checkpoint_name(checkpoint_name(x @ w, "one").T, "two")
    return jnp.sin(y) @ jnp.exp(y.T)


@program(W, X)
def on_a_mesh(w, x):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
    local = lambda w, x: jnp.sin(jnp.tanh(x @ w) @ w.T)  # noqa: E731
    whole, rows = PartitionSpec(), PartitionSpec("i")
    return jax.shard_map(local, mesh=mesh, in_specs=(whole, rows), out_specs=rows)(w, x)


class _Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(jax.nn.gelu(self.norm(self.linear(x)))))


class _BatchNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
        self.sow("intermediates", "normed", x)
        return nn.Dropout(0.5, deterministic=False)(nn.tanh(x))


_GRAPH, _STATE, _REST = nnx.split(_Net(nnx.Rngs(0)), nnx.Param, ...)
_BN = _BatchNorm()
_BN_VARIABLES = _BN.init({"params": KEY, "dropout": KEY}, X)
_MLP, _MLP_STATIC = eqx.partition(eqx.nn.MLP(4, 4, 8, 2, key=KEY), eqx.is_array)
_GRU, _GRU_STATIC = eqx.partition(eqx.nn.GRUCell(4, 4, key=KEY), eqx.is_array)


@program(_STATE, _REST, X)
def nnx_model(state, rest, x):
    return nnx.merge(_GRAPH, state, rest)(x)


@program(_BN_VARIABLES, X, KEY)
def linen_model(variables, x, key):
    mutable = ["batch_stats", "intermediates"]
    return _BN.apply(variables, x, mutable=mutable, rngs={"dropout": key})


@program(_MLP, X)
def equinox_model(arrays, x):
    return jax.vmap(eqx.combine(arrays, _MLP_STATIC))(x)


@program(_GRU, X)
def equinox_loop(arrays, x):
    cell = eqx.combine(arrays, _GRU_STATIC)
    return lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(4), x)[0]


def layer(x, w):
    """A layer of a stack, with one name."""
    hidden = checkpoint_name(jnp.tanh(x @ w), "hidden")
    return x + jnp.sin(hidden @ w), x.sum()


for _form in ("explicit", "scan", "unrolled"):
    PROGRAMS[f"stack, {_form}"] = (
        lambda weights, x, form=_form: jaxckpt.run_layers(
            layer, x, weights, "every(2)", form=form
        ),
        (WEIGHTS, X),
    )


def flat(fn, args):
    """Return `fn` over its flat arguments, these, and which have a gradient."""
    leaves, tree = jax.tree.flatten(args)
    wrt = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
    run = lambda *leaves: jax.tree.leaves(fn(*jax.tree.unflatten(tree, leaves)))  # noqa: E731
    return run, leaves, wrt


def of_inexact(run, leaves, wrt):
    """Return a flat function as one of those arguments alone that have a gradient."""

    def fn(*chosen):
        filled = list(leaves)
        for position, value in zip(wrt, chosen, strict=True):
            filled[position] = value
        return run(*filled)

    return fn, [leaves[i] for i in wrt]
