"""Attention alone under remat: what it keeps, byte for byte, and how often it runs."""

import functools
from collections import Counter

import chex
import jax
import jax.numpy as jnp
import pytest
from helpers import count, no_optimizations

import jaxckpt
from jaxckpt import _jax, devices
from jaxckpt.errors import WorkloadError
from jaxckpt.graph.flops import equations
from models import attention as module
from models import gpt, llama, moe, vit

LAYERS, BATCH = 2, 2
SEQ = 24
# Causal, causal with fewer key heads, the same beside experts, and not causal.
WORKLOADS = {
    "gpt": functools.partial(gpt.tiny, seq=SEQ),
    "llama": functools.partial(llama.tiny, seq=SEQ),
    "moe": functools.partial(moe.tiny, seq=SEQ),
    "vit": functools.partial(vit.tiny, pooling="mean", image_size=32),
}
POSITIONS = {model: 16 if model == "vit" else SEQ for model in WORKLOADS}
HEADS = 4
SAVE_BOTH = "save(context, context_lse)"


def _workload(model, **settings):
    settings = {"num_layers": LAYERS, "batch": BATCH, "dtype": "float32"} | settings
    return WORKLOADS[model](**settings)


def _loss(workload):
    """Return the loss alone, of a workload that may give figures beside it."""

    def loss(*args, **rng):
        out = workload.loss_fn(*args, **rng)
        return out[0] if isinstance(out, tuple) else out

    return loss


def _gradient_jaxpr(workload):
    gradient = jax.grad(_loss(workload))
    return jax.make_jaxpr(gradient)(workload.params, workload.batch)


def _products_of_attention(jaxpr, positions):
    """Count, per layer, the work of the XLA form on matrices of scores.

    Returns:
        How many softmax exponentials there are, products that make such a matrix, and
        products that read one.
    """

    def is_scores(variable):
        return variable.aval.shape.count(positions) == 2

    counted = Counter()
    for eqn, times in equations(jaxpr):
        name = eqn.primitive.name
        if name in ("exp", "dot_general") and is_scores(eqn.outvars[0]):
            counted[name] += times
        if name == "dot_general" and any(map(is_scores, eqn.invars)):
            counted["reads"] += times
    return tuple(counted[name] / LAYERS for name in ("exp", "dot_general", "reads"))


# The gradient of attention makes one matrix (that of the weights) and reads three times
# (for q, k and v). So one forward is (1, 1, 1), the backward adds (0, 1, 3), scores
# computed again (1, 1, 0), and a whole forward again (1, 1, 1).
@pytest.mark.parametrize(
    ("attention", "policy", "wanted"),
    [
        ("xla", "none", (1, 2, 4)),
        ("xla", "full", (2, 3, 5)),
        ("xla", "save(context)", (2, 3, 4)),
        ("xla_remat", "none", (2, 3, 4)),
        ("xla_remat", "save(context)", (2, 3, 4)),
        ("xla_remat", "recompute(out_proj)", (2, 3, 4)),
    ],
)
@pytest.mark.parametrize("model", WORKLOADS)
def test_xla_form_runs_its_values_product_once_and_its_scores_twice(
    model, attention, policy, wanted
):
    workload = _workload(model, attention=attention, policy=policy)
    found = _products_of_attention(_gradient_jaxpr(workload), POSITIONS[model])
    assert found == wanted


@pytest.mark.parametrize("scan", [True, False])
def test_schedule_of_some_layers_runs_attention_alike_in_all(scan):
    settings = {"schedule": "remat_every(2)", "policy": "save(context)", "scan": scan}
    workload = _workload("gpt", attention="xla_remat", **settings)
    assert _products_of_attention(_gradient_jaxpr(workload), SEQ) == (2, 3, 4)


# Of a chunk the forward takes one logarithm, that of the log-sum-exp, and two
# exponentials, for the sum and for the weights; the backward one, for the weights.
# With `context` alone saved the log-sum-exp runs again, and so do the scores.
@pytest.mark.parametrize(
    ("policy", "logarithms", "exponentials"),
    [("none", 1, 3), (SAVE_BOTH, 1, 3), ("save(context)", 2, 4), ("full", 2, 5)],
)
@pytest.mark.parametrize("model", WORKLOADS)
@pytest.mark.skipif(
    _jax.remat3_enabled(), reason="JAX_REMAT3 sees no name inside a custom_vjp rule"
)
def test_chunked_forward_runs_once_where_both_are_saved(
    model, policy, logarithms, exponentials, monkeypatch
):
    monkeypatch.setattr(module, "CHUNK", 8)
    workload = _workload(model, attention="chunked", policy=policy)
    counted = Counter()
    for eqn, times in equations(_gradient_jaxpr(workload)):
        # Those of the loss and of the router have fewer axes.
        if any(x.aval.ndim in (4, 5) for x in eqn.outvars):
            counted[eqn.primitive.name] += times
    chunks = LAYERS * POSITIONS[model] // 8
    assert counted["log"] == logarithms * chunks
    assert counted["exp"] == exponentials * chunks


@pytest.mark.parametrize(
    ("policy", "forwards"), [("none", 1), (SAVE_BOTH, 1), ("full", 2)]
)
@pytest.mark.parametrize("model", WORKLOADS)
def test_cudnn_forward_runs_once_where_both_are_saved(
    model, policy, forwards, monkeypatch
):
    monkeypatch.setattr(module, "has_cudnn_wheels", lambda: True)
    settings = {"attention": "cudnn", "dtype": "bfloat16", "policy": policy}
    try:
        with devices.use("h100-80gb"):
            jaxpr = _gradient_jaxpr(_workload(model, **settings))
    except RuntimeError as error:
        pytest.skip(f"JAX does not trace it without the cuDNN wheels: {error}")
    assert count(jaxpr, "dot_product_attention_fwd_wrapper") == forwards * LAYERS
    assert count(jaxpr, "dot_product_attention_bwd_wrapper") == LAYERS


def _block_graph(attention, dtype, dropout, *, batch=2, seq=24, width=32):
    """Return the graph of one GPT layer alone."""
    config = gpt.GPTConfig(
        width=width, num_heads=HEADS, dtype=dtype, attention=attention, dropout=dropout
    )
    block = gpt.Block(config)
    x = jax.ShapeDtypeStruct((batch, seq, width), dtype)
    params = jax.eval_shape(block.init, jax.random.key(0), x)

    def layer(params, x, rng):
        return block.apply(params, x, deterministic=not dropout, rngs={"dropout": rng})

    return jaxckpt.trace(layer, params, x, jax.random.key(1), argnums=(0, 1))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("batch", "seq", "width"), [(2, 24, 32), (1, 40, 64)])
def test_gpt_layer_keeps_the_bytes_of_the_formula(dtype, dropout, batch, seq, width):
    """The 34 sbh of Korthikanti et al., with what our layer keeps at each place.

    In units of `sbh`, of `c` bytes a number (2 in the paper's):

                                              paper           here
        two normalisations                    2 * 2           2 * 12: three in float32
        input of the q, k, v products         2               c
        q, k, v                               2 + 2 + 2       3 c
        context                               2               c
        input of the MLP's first product      2               c
        GELU: its input, what its own         8 + 8           4 (c + g c + c), `g` of
        derivative reads, its output                          tanh's form
        two dropouts                          1 + 1           2 * (1 + c): mask, zeros

    `g` is 4, and 3 from jax 0.12 on, whose `tanh` keeps `1 - y^2` alone. Together
    `sbh (24 + (14 + 4 g) c)`, and `2 sbh (1 + c)` more with dropout; the layer's own
    input is no residual of its own. Beside it, `32 sb` of row statistics (four numbers
    a row and normalisation) and, below float32, the kernels cast: `12 h^2 c`. The paper
    has `5 a s^2 b` more where attention is not computed again; ours `(9 + c) a s^2 b`
    (the causal mask, its fill and the exponential in float32, and the weights), without
    dropout of the weights, and `8 a s b` of two sums a row.
    """
    c = jnp.dtype(dtype).itemsize
    sbh, sb, scores = seq * batch * width, seq * batch, HEADS * seq**2 * batch
    normalisations, inputs, heads, context = 2 * 12, 2 * c, 3 * c, c
    gelu_reads = 4 if _jax.version() < (0, 12) else 3
    gelu = 4 * (c + gelu_reads * c + c)
    dropouts = 2 * (1 + c) if dropout else 0
    kernels = 12 * width**2 * c if dtype != "float32" else 0
    layer = sbh * (normalisations + inputs + heads + context + gelu + dropouts)
    layer += 32 * sb + kernels

    def kept(attention):
        shape = {"batch": batch, "seq": seq, "width": width}
        return _block_graph(attention, dtype, dropout, **shape).residual_bytes

    row_sums = HEADS * sb * 4
    assert kept("xla_remat") == layer
    assert kept("chunked") == layer + row_sums  # its log-sum-exp
    assert kept("xla") == layer + scores * (1 + 4 + 4 + c) + 2 * row_sums


@pytest.mark.parametrize("model", WORKLOADS)
def test_model_keeps_no_matrix_of_scores(model):
    # One by one: a loop stacks the chunked form's `context` twice, as attention's own
    # residual by heads and as what `out_proj` reads.
    def graph(attention):
        workload = _workload(model, attention=attention, scan=False)
        return jaxckpt.trace(_loss(workload), workload.params, workload.batch)

    positions = POSITIONS[model]
    remat, flash = graph("xla_remat"), graph("flash")
    assert not any(r.shape.count(positions) == 2 for r in remat.residuals)
    assert any(r.shape.count(positions) == 2 for r in graph("xla").residuals)
    log_sum_exps = LAYERS * 4 * HEADS * positions * BATCH
    assert flash.residual_bytes == remat.residual_bytes + log_sum_exps


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_attention_has_the_same_value_and_gradients(causal, kv_heads):
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (BATCH, 9, heads, 8))
        for key, heads in zip(keys, (HEADS, kv_heads, kv_heads), strict=True)
    )

    def loss(q, k, v, implementation):
        out = module.attention(q, k, v, implementation=implementation, causal=causal)
        return jnp.sum(jnp.sin(out))

    with no_optimizations():
        got, wanted = (
            jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)), static_argnums=3)(
                q, k, v, name
            )
            for name in ("xla_remat", "xla")
        )
    chex.assert_trees_all_close(got, wanted, rtol=1e-6, atol=1e-7)


@functools.cache
def _loss_and_gradients(model, **settings):
    workload = _workload(model, dropout=0.1, **settings)
    params = jax.jit(workload.init)(jax.random.key(0))
    gradient = jax.jit(jax.value_and_grad(_loss(workload)))
    return gradient(params, next(workload.data("train")), rng=jax.random.key(1))


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        *((model, {}) for model in WORKLOADS),
        ("gpt", {"scan": False}),
        ("gpt", {"schedule": "remat_every(2)", "policy": "save(context)"}),
    ],
    ids=str,
)
def test_setting_changes_neither_loss_nor_gradients(model, settings):
    with no_optimizations():
        got = _loss_and_gradients(model, attention="xla_remat", **settings)
        wanted = _loss_and_gradients(model, attention="xla")
    chex.assert_trees_all_close(got, wanted, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("model", ["gpt", "vit"])
@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "full"},
        {"policy": "dots"},
        {"policy": "save(out_proj)"},
        {"policy": "save_everything()"},
        {"policy": "save_everything() - save(context)"},
        {"schedule": "every(2)", "policy": None},
        {"schedule": "remat_every(2)"},
    ],
    ids=str,
)
def test_remat_of_a_layer_that_does_not_keep_context_raises(model, settings):
    message = (
        r"`attention=xla_remat` and the schedule `.*` contradict each other.*"
        r"keep `context`.*Use a policy like `save\(context\)`, or `attention=xla`"
    )
    with pytest.raises(WorkloadError, match=message):
        _workload(model, attention="xla_remat", **settings)
    _workload(model, attention="xla", **settings)


def test_scope_says_that_attention_is_rematerialised():
    workload = _workload("gpt", attention="xla_remat")
    graph = jaxckpt.trace(workload.loss_fn, workload.params, workload.batch)
    assert graph.scopes("attention") == ("xla_remat",)
