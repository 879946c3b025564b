"""Catalogues of the suite: policies, one small layer in three libraries, and counts."""

import contextlib
import inspect
import os
import pathlib
import subprocess
import sys
import typing
from collections import Counter
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jaxckpt
from jaxckpt import _jax
from jaxckpt.graph.flops import equations

ROOT = pathlib.Path(__file__).parents[1]
BATCH, SEQ, WIDTH, HEADS, MLP = 2, 4, 8, 2, 16
LIBRARIES = "function", "linen", "nnx"
DTYPES = "float32", "bfloat16"

FEATURES = {
    "query_proj": WIDTH,
    "key_proj": WIDTH,
    "value_proj": WIDTH,
    "out_proj": WIDTH,
    "mlpwi_0": MLP,
    "mlpwi_1": MLP,
    "mlpwo": WIDTH,
}
QKV = "query_proj", "key_proj", "value_proj"
ATTENTION_DOTS = "attention_scores", "context"
MLP_IN = "mlpwi_0", "mlpwi_1"
# The layer's products whose results the backward pass or a recomputation reads: all but
# the last projection.
READ_DOTS = (*QKV, *ATTENTION_DOTS, "out_proj", *MLP_IN)


@dataclass(frozen=True)
class Case:
    """A policy, and what it does to the layer below.

    Attributes:
        kept: Names of the values between the passes; None for all that plain JAX keeps.
        products: How many products run again.
        dropped: Names of the values that are not kept although plain JAX keeps them.
    """

    kept: tuple[str, ...] | None
    products: int
    dropped: tuple[str, ...] = ()


# Of the nine products the last is read by nothing, so that full remat runs eight again.
POLICIES = {
    "none": Case(None, 0),
    "save_everything()": Case(None, 0),
    "full": Case((), 8),
    "save(decoder_layer_input) | save(out_proj)": Case(("out_proj",), 7),
    "save(out_proj)": Case(("out_proj",), 7),
    "save('mlpwi_*')": Case(MLP_IN, 6),
    "save(query_proj, key_proj, value_proj)": Case(QKV, 5),
    # The softmax's own gradient reads its numerator, so that the scores run again.
    "save(attention_probs)": Case(("attention_probs",), 8),
    "dots": Case(READ_DOTS, 0),
    "dots_no_batch": Case((*QKV, "out_proj", *MLP_IN), 2),
    "dots - save('mlpwi_*')": Case((*QKV, *ATTENTION_DOTS, "out_proj"), 2),
    "save('mlpwi_*') | save_dots(batch_dims=False)": Case(
        (*QKV, "out_proj", *MLP_IN), 2
    ),
    "recompute('mlpwi_*')": Case(None, 2, MLP_IN),
    "offload(mlpwi_0) | save(mlpwi_1)": Case(MLP_IN, 6),
    "offload_dots(batch_dims=False)": Case((*QKV, "out_proj", *MLP_IN), 2),
    "maxtext:minimal_with_context": Case((*QKV, "context", "out_proj", *MLP_IN), 1),
    # The numerator is kept, so that of attention only the second product runs again.
}

_recorded = None


def named(x, name):
    """Name a value as a model does; `recording` sees it."""
    x = checkpoint_name(x, name)
    if _recorded is not None:
        _recorded[name] = x
    return x


@contextlib.contextmanager
def recording():
    """Collect the named values of the functions that are traced inside."""
    global _recorded
    _recorded = {}
    try:
        yield _recorded
    finally:
        _recorded = None


def attend(q, k, v):
    """Attention in plain operations, over `[batch, seq, heads, head_dim]`."""
    scores = named(jnp.einsum("bqhd,bkhd->bhqk", q, k), "attention_scores")
    probs = named(jax.nn.softmax(scores), "attention_probs")
    return named(jnp.einsum("bhqk,bkhd->bqhd", probs, v), "context")


@jax.custom_vjp
def fused_attend(q, k, v):
    """The same, with a backward rule of its own, that reads context and log-sum-exp."""
    return _fused_forward(q, k, v)[0]


def _fused_forward(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    lse = named(jax.nn.logsumexp(scores, axis=-1), "context_lse")
    probs = jnp.exp(scores - lse[..., None])
    context = named(jnp.einsum("bhqk,bkhd->bqhd", probs, v), "context")
    return context, (q, k, v, context, lse)


def _fused_backward(residuals, d_context):
    q, k, v, context, lse = residuals
    probs = jnp.exp(jnp.einsum("bqhd,bkhd->bhqk", q, k) - lse[..., None])
    d_probs = jnp.einsum("bqhd,bkhd->bhqk", d_context, v)
    row_sums = jnp.einsum("bqhd->bhq", d_context * context)
    d_scores = probs * (d_probs - row_sums[..., None])
    d_q = jnp.einsum("bhqk,bkhd->bqhd", d_scores, k)
    d_k = jnp.einsum("bhqk,bqhd->bkhd", d_scores, q)
    return d_q, d_k, jnp.einsum("bhqk,bqhd->bkhd", probs, d_context)


fused_attend.defvjp(_fused_forward, _fused_backward)


def layer(project, x, attention=attend):
    """A gated transformer layer; `project(name, x)` multiplies by the weight `name`."""
    x = named(x, "decoder_layer_input")
    h = _normalised(x)
    heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
    q, k, v = (named(project(name, h), name).reshape(heads) for name in QKV)
    context = attention(q, k, v).reshape(x.shape)
    x = x + named(project("out_proj", context), "out_proj")
    h = _normalised(x)
    gate, up = (named(project(name, h), name) for name in MLP_IN)
    return x + named(project("mlpwo", jax.nn.silu(gate) * up), "mlpwo")


def _normalised(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def function_block(weights, x, attention=attend):
    """The layer as a function of a dict of weights."""
    return layer(lambda name, h: h @ weights[name].astype(h.dtype), x, attention)


class LinenBlock(nn.Module):
    """The layer as a linen Module."""

    dtype: str = "float32"

    @nn.compact
    def __call__(self, x):
        def project(name, h):
            dense = nn.Dense(
                FEATURES[name], use_bias=False, dtype=self.dtype, name=name
            )
            return dense(h)

        return layer(project, x)


class NNXBlock(nnx.Module):
    """The layer as an nnx Module."""

    def __init__(self, dtype="float32", *, rngs):
        for name, features in FEATURES.items():
            inputs = MLP if name == "mlpwo" else WIDTH
            linear = nnx.Linear(
                inputs, features, use_bias=False, dtype=jnp.dtype(dtype), rngs=rngs
            )
            setattr(self, name, linear)

    def __call__(self, x):
        return layer(lambda name, h: getattr(self, name)(h), x)


def weights(seed=0):
    """Random float32 weights of the layer, by name."""
    keys = jax.random.split(jax.random.key(seed), len(FEATURES))
    return {
        name: jax.random.normal(key, (MLP if name == "mlpwo" else WIDTH, n)) / 3
        for key, (name, n) in zip(keys, FEATURES.items(), strict=True)
    }


def build(library, dtype="float32", policy="none"):
    """Return `fn(params, x)` under a policy, and its arguments."""
    x = jax.random.normal(jax.random.key(9), (BATCH, SEQ, WIDTH), dtype)
    if library == "function":
        return jaxckpt.remat(function_block, policy=policy), (weights(), x)
    if library == "linen":
        module = jaxckpt.remat(LinenBlock, policy=policy)(dtype)
        params = {name: {"kernel": w} for name, w in weights().items()}
        return module.apply, ({"params": params}, x)
    module = jaxckpt.remat(NNXBlock, policy=policy)(dtype, rngs=nnx.Rngs(0))
    for name, w in weights().items():
        getattr(module, name).kernel.set_value(w)
    graphdef, state = nnx.split(module)
    return lambda state, x: nnx.merge(graphdef, state)(x), (state, x)


def value_and_vjp(fn, *args):
    """Return `fn`'s output, its gradients, and the arrays that the closure holds."""
    out, vjp = jax.vjp(fn, *args)
    gradients = vjp(jnp.cos(jnp.arange(out.size)).reshape(out.shape).astype(out.dtype))
    return out, gradients, jax.tree.leaves(vjp)


def gradient_jaxpr(fn, *args):
    """Return the jaxpr of forward and backward pass."""
    return jax.make_jaxpr(lambda *args: value_and_vjp(fn, *args)[:2])(*args)


def count(jaxpr, primitive="dot_general"):
    """Return how often a primitive runs in a program, loops multiplied."""
    return sum(n for eqn, n in equations(jaxpr) if eqn.primitive.name == primitive)


def held(leaves, *args):
    """Return the arrays among a vjp closure's leaves that are not arguments.

    An array in another order (a transposed or reshaped one) is the same array.
    """
    known = [_sorted(x) for x in jax.tree.leaves(args)]
    arrays = [x for x in leaves if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    return [x for x in arrays if not any(_same(_sorted(x), k) for k in known)]


def names_of(arrays, values):
    """Return which of the named `values` the arrays are, sorted; else their types."""
    found = []
    for x in arrays:
        names = [n for n, v in values.items() if _same(_sorted(x), _sorted(v))]
        found.append(names[0] if names else f"{x.dtype}{list(x.shape)}")
    return sorted(found)


def distinct(arrays):
    """Return the arrays without those that are there already."""
    found = []
    for x in arrays:
        if not any(_same(_sorted(x), _sorted(y)) for y in found):
            found.append(x)
    return found


def no_optimizations():
    """Compile quickly, for tests whose time goes into compiling single operations."""
    return jax_option("jax_disable_most_optimizations", True)


@contextlib.contextmanager
def jax_option(name, value):
    """Set an option of JAX inside a `with`."""
    before = jax.config.values[name]
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


def residual_names(fn, *args):
    """Return `(name, decision)` of each kept value that is not an argument, counted."""
    residuals = jaxckpt.trace(fn, *args, argnums=None).residuals
    return Counter((r.name, r.decision) for r in residuals if not r.argument)


def run_python(source, **environment):
    """Run a program in a process of its own and return what it prints."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", source],
        env=os.environ | {"PYTHONPATH": paths} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@dataclass(frozen=True)
class Mixed(jaxckpt.Schedule):
    """All kinds of nodes, for any depth: each part of `parts` as deep as there is room.

    Its text is no schedule's: give it as an object.
    """

    def _nodes(self, num_layers):
        parts = [
            jaxckpt.Remat(jaxckpt.save("up"), 1),
            jaxckpt.Segment(
                [jaxckpt.Remat(jaxckpt.save("down"), 1), jaxckpt.Keep(1)],
                jaxckpt.save("up"),
            ),
            jaxckpt.Keep(1),
            jaxckpt.Segment([jaxckpt.Keep(1), jaxckpt.Remat(jaxckpt.save("up"), 2)]),
            jaxckpt.Remat(jaxckpt.save("up", "down"), 2),
            jaxckpt.Segment(jaxckpt.Segment(jaxckpt.Keep(2))),
        ]
        for part in parts:
            if part.layers <= num_layers:
                num_layers -= part.layers
                yield part
        if num_layers:
            yield jaxckpt.Keep(num_layers)

    def __str__(self):
        return "mixed"


# Schedules for any depth. The plain ones keep layer inputs only, or everything of a
# layer; the policies of the others are for layers that name `up` and `down`.
PLAIN_SCHEDULES = {
    str(schedule): schedule
    for schedule in (
        jaxckpt.none(),
        jaxckpt.full(),
        jaxckpt.every(2),
        jaxckpt.every(5),
        jaxckpt.remat_every(2),
        jaxckpt.sqrt(),
        jaxckpt.nested(2, 2),
        jaxckpt.nested(3),
        jaxckpt.binomial(3),
    )
}
SCHEDULES = PLAIN_SCHEDULES | {
    str(schedule): schedule
    for schedule in (
        jaxckpt.remat_every(3, jaxckpt.save("up")),
        jaxckpt.uniform(jaxckpt.save("up")),
        Mixed(),
    )
}
FORMS = "explicit", "scan", "unrolled"


def counting_layer(x, w):
    """A layer of a stack with one product, one tanh and the names `up` and `down`.

    The gradient reads the result of the tanh, so that it is in the gradient's program
    once for each run of a layer.
    """
    up = named(jnp.tanh(x @ w), "up")
    return x + jnp.sin(named(up * up, "down")), jnp.sum(up)


def layer_forwards(fn, *args):
    """Return how often `counting_layer` runs in the gradient of a scalar function."""
    program = jax.make_jaxpr(jax.grad(fn, argnums=(0, 1)))(*args)
    return count(_jax.without_dead_code(program), "tanh")


def interpret(fn, *args):
    """Return `fn(*args)`, its traced program run by operation: nothing compiles whole.

    The operations are compiled one by one and kept, so that programs of the same small
    arrays run at once.
    """
    return interpret_program(*jax.make_jaxpr(fn, return_shape=True)(*args), args)


def interpret_program(closed, shapes, args):
    """Return what a traced function (`make_jaxpr(fn, return_shape=True)`) returns."""
    results = _interpret(closed, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _interpret(closed, args):
    jaxpr = _jax.open_jaxpr(closed)
    values = dict(zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True))
    values |= zip(jaxpr.invars, args, strict=True)
    for eqn in jaxpr.eqns:
        inputs = [
            v.val if isinstance(v, _jax.Literal) else values[v] for v in eqn.invars
        ]
        values |= zip(eqn.outvars, _operation(eqn, inputs), strict=True)
    outs = jaxpr.outvars
    return [v.val if isinstance(v, _jax.Literal) else values[v] for v in outs]


def _operation(eqn, inputs):
    if eqn.primitive.name == "scan":
        return _loop(eqn, inputs)
    if eqn.primitive.name == "optimization_barrier":
        return inputs
    inner = list(_jax.inner_jaxprs(eqn).values())
    if inner and not eqn.primitive.name.startswith(("cond", "scatter")):
        return _interpret(inner[0], inputs)
    results = eqn.primitive.bind(*inputs, **eqn.params)
    return results if eqn.primitive.multiple_results else [results]


def _loop(eqn, inputs):
    consts, carries = _jax.scan_counts(eqn)
    consts, carry, xs = np.split(np.arange(len(inputs)), [consts, consts + carries])
    fixed, carry, xs = ([inputs[i] for i in part] for part in (consts, carry, xs))
    xs = [_in_numpy(x) for x in xs]
    length, outputs = eqn.params["length"], []
    steps = range(length)
    for i in reversed(steps) if eqn.params["reverse"] else steps:
        body = eqn.params["jaxpr"]
        results = _interpret(body, [*fixed, *carry, *(x[i] for x in xs)])
        carry = results[: len(carry)]
        outputs.append(results[len(carry) :])
    if eqn.params["reverse"]:
        outputs.reverse()
    return [*carry, *(_stacked(ys) for ys in zip(*outputs, strict=True))]


def _in_numpy(x):
    """Return an array in NumPy, where slicing compiles nothing; keys as they are."""
    return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)


def _stacked(xs):
    is_key = jnp.issubdtype(xs[0].dtype, jax.dtypes.prng_key)
    return jnp.stack(xs) if is_key else np.stack(xs)


def _sorted(x):
    return np.sort(np.asarray(x).ravel())


def _same(x, y):
    tolerance = 3e-2 if x.dtype == jnp.bfloat16 else 1e-5
    alike = x.dtype == y.dtype and x.shape == y.shape
    x, y = (np.asarray(v, np.float32) for v in (x, y))
    return alike and np.allclose(x, y, rtol=tolerance, atol=tolerance / 10)


def large_params(init_params, config):
    """Return parameters with which every part of a model's layer adds much."""
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    draw = np.random.default_rng(0).normal
    return jax.tree.map(lambda x: jnp.asarray(draw(size=x.shape), x.dtype), shapes)


def value_names(jaxpr):
    """Return the names that a program gives to values, in order."""
    names = [_jax.bound_name(eqn) for eqn, _ in equations(jaxpr)]
    return tuple(name for name in names if name)


def check_workload_function(size, keywords):
    """Raise unless a workload function takes these keywords, typed, and its name."""
    parameters = inspect.signature(size).parameters
    assert keywords.split() == list(parameters)
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())
    assert set(typing.get_type_hints(size)) == {*parameters, "return"}
    assert size().name == size.__name__
