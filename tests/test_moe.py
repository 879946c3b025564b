"""Mixture of experts: it computes the published formulas, and routes a token once."""

import dataclasses
import functools
import math
from collections import Counter

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers import (
    check_workload_function,
    count,
    interpret,
    jax_option,
    large_params,
    no_optimizations,
    residual_names,
    value_names,
)

import jaxckpt
from jaxckpt._jax import bound_name, remat3_enabled
from jaxckpt.errors import WorkloadError
from jaxckpt.graph.flops import equations
from jaxckpt.training import train
from models import llama, moe

SMALL = {"num_layers": 2, "batch": 2, "seq": 16, "dtype": "float32"}
TINY = moe.MoEConfig(
    num_layers=2,
    width=128,
    num_heads=4,
    kv_heads=2,
    mlp=192,
    vocab_size=256,
    tied=True,
    dtype="float32",
    experts=4,
)
NAMES = (
    "decoder_layer_input",
    "query_proj",
    "key_proj",
    "value_proj",
    "context",
    "context_lse",
    "out_proj",
    "router_logits",
    "router_indices",
    "moe_mlpwi_0",
    "moe_mlpwi_1",
    "moe_mlpwo",
)
# A model that runs in no time, too small to learn.
MINUTE = dataclasses.replace(TINY, width=16, mlp=24, vocab_size=32)
SIZES = moe.tiny, moe.moe_1b, moe.mixtral_8x7b
PRODUCTS = "ragged", "dense"


@pytest.fixture(autouse=True, scope="module")
def _quick_compiles():
    with no_optimizations():
        yield


def _batch(batch=2, seq=16, vocab=256):
    tokens = jax.random.randint(jax.random.key(7), (batch, seq + 1), 0, vocab)
    return {"tokens": tokens}


@functools.cache
def _params():
    return interpret(moe.tiny(**SMALL).init, jax.random.key(0))


@functools.cache
def _loss_and_gradients(rng=False, **settings):
    workload = moe.tiny(**SMALL | settings)
    rng = jax.random.key(1) if rng else None
    fn = jax.value_and_grad(workload.loss_fn, has_aux=True)
    return jax.tree.map(np.asarray, interpret(fn, _params(), _batch(), rng))


def _graph(**settings):
    workload = moe.tiny(**SMALL | {"attention": "xla"} | settings)
    return jaxckpt.trace(
        workload.loss_fn, workload.params, workload.batch, has_aux=True
    )


def _gradient_jaxpr(**settings):
    workload = moe.tiny(**SMALL | settings)
    gradient = jax.grad(workload.loss_fn, has_aux=True)
    return jax.make_jaxpr(gradient)(workload.params, workload.batch)


@pytest.mark.parametrize("chosen", [1, 2, 4])
@pytest.mark.parametrize("product", PRODUCTS)
def test_experts_equal_those_of_each_token_by_itself(product, chosen):
    config = dataclasses.replace(MINUTE, chosen=chosen, expert_matmul=product)
    layers = large_params(moe.init_params, config)["layers"]
    params = jax.tree.map(lambda leaf: leaf[0], layers)
    x = jax.random.normal(jax.random.key(0), (2, 5, 16))

    class Experts(moe.Block):
        @nn.compact
        def __call__(self, x):
            return self._experts(x, *self._route(x))

    got = interpret(Experts(config).apply, {"params": params}, x)

    w = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    wanted = np.zeros(x.shape)
    for place in np.ndindex(2, 5):
        token = np.asarray(x[place], np.float64)
        logits = token @ w["router"]["kernel"]
        best = np.argsort(-logits)[:chosen]
        weights = np.exp(logits[best]) / np.exp(logits[best]).sum()
        for expert, weight in zip(best, weights, strict=True):
            gate, up = (
                token @ w["moe_mlpwi_0"][expert],
                token @ w["moe_mlpwi_1"][expert],
            )
            hidden = gate / (1 + np.exp(-gate)) * up
            wanted[place] += weight * (hidden @ w["moe_mlpwo"][expert])
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("product", PRODUCTS)
def test_one_expert_is_a_llama(product):
    one = {"experts": 1, "chosen": 1, "balance_weight": 0.0}
    config = dataclasses.replace(MINUTE, expert_matmul=product, **one)
    params = large_params(moe.init_params, config)
    layers = {name: leaf for name, leaf in params["layers"].items() if name != "router"}
    for name in ("mlpwi_0", "mlpwi_1", "mlpwo"):
        layers[name] = {"kernel": layers.pop(f"moe_{name}")[:, 0]}
    plain = {
        f.name: getattr(config, f.name) for f in dataclasses.fields(llama.LlamaConfig)
    }
    got, aux = interpret(moe.make_loss(config), params, _batch(vocab=32))
    loss_fn = llama.make_loss(llama.LlamaConfig(**plain))
    wanted = interpret(loss_fn, params | {"layers": layers}, _batch(vocab=32))
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    assert aux["balance"] == 1


def test_ragged_and_dense_products_have_equal_gradients():
    ragged, dense = (_loss_and_gradients(expert_matmul=p) for p in PRODUCTS)
    chex.assert_trees_all_close(ragged, dense, rtol=2e-5, atol=1e-6)


def test_loss_is_cross_entropy_and_the_weighted_balance():
    config = dataclasses.replace(MINUTE, balance_weight=0.5)
    params, batch = large_params(moe.init_params, config), _batch(vocab=32)
    fn = jax.value_and_grad(moe.make_loss(config), has_aux=True)
    (loss, aux), gradient = interpret(fn, params, batch)
    np.testing.assert_allclose(loss, aux["cross_entropy"] + 0.5 * aux["balance"])
    assert aux["load"].shape == (2, 4)
    np.testing.assert_allclose(aux["load"].sum(axis=1), 1, rtol=1e-6)

    plain = moe.make_loss(dataclasses.replace(config, balance_weight=0.0))
    without = interpret(jax.grad(plain, has_aux=True), params, batch)[0]
    routers = (g["layers"]["router"]["kernel"] for g in (gradient, without))
    assert jnp.max(jnp.abs(jnp.subtract(*routers))) > 1e-4


def test_descent_on_the_balance_loss_evens_the_load():
    x = jax.random.normal(jax.random.key(0), (1, 64, 8)) + 1
    towards_one = jax.random.normal(jax.random.key(1), (8, 4)).at[:, 0].add(0.3)

    def balance(kernel):
        logits = x @ kernel
        shares = moe._shares(logits, jax.lax.top_k(logits, 2)[1])
        return moe.balance_loss(**shares), shares["load"]

    step = jax.jit(jax.value_and_grad(balance, has_aux=True))
    kernel, loads = towards_one, []
    for _ in range(40):
        (_, load), gradient = step(kernel)
        kernel -= 0.3 * gradient
        loads.append(float(jnp.max(load)))
    assert loads[0] > 0.4 > 0.3 > loads[-1]


def test_sizes_have_the_published_numbers_of_parameters():
    totals = [sum(x.size for x in jax.tree.leaves(size().params)) for size in SIZES[1:]]
    assert totals == [1_121_313_792, 46_702_792_704]


@pytest.mark.parametrize("attention", ["xla", "chunked"])
@pytest.mark.parametrize("product", PRODUCTS)
def test_forward_flops_equal_those_of_the_trace(product, attention):
    graph = _graph(seq=256, attention=attention, expert_matmul=product)
    config = dataclasses.replace(TINY, expert_matmul=product)
    assert graph.forward_flops == moe.forward_flops(config, batch=2, seq=256)


def test_loss_starts_near_that_of_equal_guesses():
    (loss, aux), _ = _loss_and_gradients()
    assert abs(aux["cross_entropy"] - math.log(256)) < 0.1
    assert abs(aux["balance"] - 1) < 0.2
    assert abs(loss - aux["cross_entropy"] - 0.01 * aux["balance"]) < 1e-5


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("scan", [True, False])
def test_layer_names_its_values_in_order(scan, product):
    jaxpr = _gradient_jaxpr(num_layers=1, scan=scan, expert_matmul=product)
    assert value_names(jaxpr) == NAMES


@functools.cache
def _kept_by(policy, product):
    workload = moe.tiny(**SMALL, policy=policy, expert_matmul=product)

    def loss_fn(params, batch):
        return workload.loss_fn(params, batch)[0]

    return set(residual_names(loss_fn, workload.params, workload.batch))


@pytest.mark.skipif(
    remat3_enabled(), reason="JAX_REMAT3 sees no name inside a custom_vjp rule"
)
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", NAMES[1:])
def test_each_name_keeps_what_the_backward_reads(name, product):
    """Also the last products, that are weighed: the router's gradient reads them."""
    found = _kept_by(f"save({name})", product)
    assert found == _kept_by("full", product) | {(name, "save")}


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "full", "loss_chunks": 4},
        {"policy": "dots", "attention": "xla"},
        {"policy": "dots_no_batch", "expert_matmul": "dense"},
        {"schedule": "every(2)"},
        {"policy": "save(router_indices, moe_mlpwo)", "schedule": "remat_every(2)"},
        {"policy": "save('moe_*')", "scan": False},
    ],
    ids=str,
)
def test_setting_changes_neither_loss_nor_gradients(settings):
    chex.assert_trees_all_close(
        _loss_and_gradients(**settings), _loss_and_gradients(), rtol=2e-5, atol=1e-6
    )


def test_dropout_acts_with_an_rng_and_is_the_same_under_a_policy():
    with_rng = functools.partial(_loss_and_gradients, rng=True, dropout=0.3)
    (without, _), _ = _loss_and_gradients()
    dropped = with_rng()
    assert abs(without - dropped[0][0]) > 1e-3
    chex.assert_trees_all_close(with_rng(policy="full"), dropped, rtol=2e-5, atol=1e-6)


# --- Case 6: products of experts under policies about dots ---------------------------

TOKENS = 2 * 16
ATTENTION = 4 * 2 * 16 * 16 * 128  # both products of a layer
EXPERT = 2 * TOKENS * 128 * 192  # one matrix of one expert on all tokens


@pytest.mark.parametrize(
    ("product", "policy", "again"),
    [
        ("ragged", "dots", 0),
        ("dense", "dots", 0),
        ("ragged", "dots_no_batch", ATTENTION),
        # The last products are a batch of matrices, an expert each.
        ("dense", "dots_no_batch", ATTENTION + 4 * EXPERT),
        ("dense", "save('moe_*') | dots_no_batch", ATTENTION),
    ],
)
@pytest.mark.parametrize("scan", [True, False])
def test_products_of_experts_that_a_policy_means_do_not_run_again(
    product, policy, again, scan
):
    graph = _graph(expert_matmul=product, policy=policy, scan=scan)
    assert graph.recompute_flops == 2 * again


def test_plain_jax_runs_the_products_again_that_we_keep():
    plain = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    experts = jnp.ones((4, 8, 8))

    def layer(x):
        sizes = jnp.full(4, 2, jnp.int32)
        return jnp.sum(jnp.sin(jax.lax.ragged_dot(x, experts, sizes)))

    def products(fn):
        jaxpr = jax.make_jaxpr(jax.grad(fn))(jnp.ones((8, 8)))
        return count(jaxpr, "ragged_dot_general")

    assert products(jax.checkpoint(layer, policy=plain)) == 3
    assert products(jaxckpt.remat(layer, policy="dots_no_batch")) == 2


def test_explain_lists_the_products_of_experts_that_run_again():
    graph = _graph(expert_matmul="dense", policy="dots_no_batch")
    explanation = jaxckpt.explain(graph)
    skipped = {
        d["name"]: d["bytes"]
        for d in explanation.as_json()["regions"][0]["skipped_dots"]
    }
    assert skipped["moe_mlpwo"] == 4 * TOKENS * 128 * 4  # experts, tokens, width, bytes
    assert "moe_mlpwi_0" not in skipped
    assert "`save_dots()` keeps them" in str(explanation)


# --- Case 28: the router's choice, made once or made the same ------------------------


def _near_ties():
    """Parameters with which all experts are nearly equal to the router."""
    params = jax.tree.map(jnp.asarray, _params())
    kernel = params["layers"]["router"]["kernel"]
    noise = 1e-4 * jax.random.normal(jax.random.key(5), kernel.shape)
    router = {"kernel": 10 * kernel[..., :1] * (1 + noise)}
    return params | {"layers": params["layers"] | {"router": router}}


@pytest.mark.parametrize(("policy", "runs"), [("none", 1), ("full", 2)])
def test_near_ties_are_the_same_choice_when_computed_again(policy, runs, monkeypatch):
    params, seen, route = _near_ties(), Counter(), moe.Block._route

    def watched(self, x):
        logits, chosen = route(self, x)
        jax.debug.callback(lambda c: seen.update([np.asarray(c).tobytes()]), chosen)
        return logits, chosen

    monkeypatch.setattr(moe.Block, "_route", watched)
    workload = moe.tiny(num_layers=2, batch=4, seq=64, policy=policy, attention="xla")
    gradient = jax.jit(jax.grad(workload.loss_fn, has_aux=True))
    with jax_option("jax_disable_most_optimizations", False):
        jax.block_until_ready(gradient(params, _batch(4, 64)))
        jax.effects_barrier()
    assert len(seen) == 2  # layers
    assert set(seen.values()) == {runs}


def test_the_ties_above_are_nearer_than_bfloat16_tells():
    kernel = _near_ties()["layers"]["router"]["kernel"][0]
    x = jax.random.normal(jax.random.key(3), (256, 128), jnp.bfloat16)
    logits = x.astype(jnp.float32) @ kernel
    _, exact = jax.lax.top_k(logits, 2)
    _, rounded = jax.lax.top_k(logits.astype(jnp.bfloat16), 2)
    assert jnp.mean(jnp.any(exact != rounded, axis=1)) > 0.5


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("scan", [True, False])
def test_saved_choices_are_made_once(scan, product):
    def choices(policy):
        jaxpr = _gradient_jaxpr(policy=policy, scan=scan, expert_matmul=product)
        return count(jaxpr, "top_k")

    assert choices("none") == choices("save(router_indices)") == 2
    assert choices("full") == choices("save(router_logits)") == 4


def test_saved_choices_are_integers_of_four_bytes():
    residuals = _graph(policy="save(router_indices)").residuals
    chosen = [r for r in residuals if r.name == "router_indices"]
    assert [(r.dtype, r.shape) for r in chosen] == [("int32", (2, 2, 16, 2))]


@pytest.mark.parametrize("product", PRODUCTS)
def test_router_computes_in_float32_and_experts_in_bfloat16(product):
    jaxpr = _gradient_jaxpr(dtype="bfloat16", expert_matmul=product)
    named = [eqn for eqn, _ in equations(jaxpr) if bound_name(eqn)]
    types = {bound_name(eqn): str(eqn.outvars[0].aval.dtype) for eqn in named}
    assert types["router_logits"] == "float32"
    assert {types[name] for name in NAMES[-3:]} == {"bfloat16"}


# --- Workloads -----------------------------------------------------------------------


def test_tiny_learns_more_than_byte_frequencies():
    settings = {"num_layers": 1, "batch": 8, "seq": 64, "attention": "xla"}
    policy = "save(router_indices)"
    workload = moe.tiny(**settings, policy=policy)
    result = train(workload, steps=50, eval_batches=4)
    assert result.validation_loss < result.unigram_entropy


@pytest.mark.parametrize("size", SIZES, ids=lambda f: f.__name__)
def test_workload_functions_are_typed_keyword_only(size):
    check_workload_function(
        size,
        "batch seq num_layers dtype attention loss_chunks dropout policy schedule "
        "scan data_path seed learning_rate warmup_steps decay_steps expert_matmul",
    )


def test_sizes_keep_their_defaults_beside_the_choice_of_products():
    for size in SIZES:
        for product in PRODUCTS:
            chex.assert_trees_all_equal(size(expert_matmul=product).batch, size().batch)
    assert moe.moe_1b().batch["tokens"].shape == (8, 2049)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, "`batch=0` must be at least 1"),
        ({"seq": 8193}, "`seq=8193` is longer than the 8192 positions"),
        ({"expert_matmul": "raged"}, "`expert_matmul=raged`.*Did you mean `ragged`"),
        ({"dtype": "bf16"}, "`dtype=bf16` is not known.*Did you mean `bfloat16`"),
    ],
    ids=str,
)
def test_bad_settings_raise_before_anything_is_traced(settings, message):
    with pytest.raises(WorkloadError, match=message):
        moe.tiny(**settings)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sequence'"):
        moe.tiny(sequence=4)
