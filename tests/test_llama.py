"""Llama: it computes the published formulas, and settings change memory only."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers import (
    check_workload_function,
    count,
    large_params,
    no_optimizations,
    residual_names,
    value_names,
)

import jaxckpt
from jaxckpt._jax import remat3_enabled
from jaxckpt.errors import JaxckptError, PolicyError, WorkloadError
from jaxckpt.schedule import remat_every
from jaxckpt.training import train
from models import llama

SMALL = {"num_layers": 2, "batch": 2, "seq": 16, "dtype": "float32"}
TINY = llama.LlamaConfig(
    num_layers=2,
    width=128,
    num_heads=4,
    kv_heads=2,
    mlp=384,
    vocab_size=256,
    rope_scaling=None,
    tied=True,
    dtype="float32",
)
NAMES = (
    "decoder_layer_input",
    "query_proj",
    "key_proj",
    "value_proj",
    "context",
    "context_lse",
    "out_proj",
    "mlpwi_0",
    "mlpwi_1",
    "mlpwo",
)
# A model that runs in no time, too small to learn.
SCALED = llama.RopeScaling(8.0, positions=64)
MINUTE = dataclasses.replace(TINY, width=16, mlp=24, vocab_size=32, rope_scaling=SCALED)
SIZES = llama.tiny, llama.llama3_1b, llama.llama3_8b, llama.llama3_70b
SCALINGS = None, llama.RopeScaling(8.0), llama.RopeScaling(32.0)
# Compiling is what these tests spend their time on.
_jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


def _batch(workload):
    shape = workload.batch["tokens"].shape
    return {"tokens": jax.random.randint(jax.random.key(7), shape, 0, 256)}


@functools.cache
def _params():
    return _jit(llama.tiny(**SMALL).init)(jax.random.key(0))


@functools.cache
def _apply(config):
    return _jit(llama.Llama(config).apply)


@functools.cache
def _loss_and_gradients(rng=False, **settings):
    workload = llama.tiny(**SMALL | settings)
    rng = jax.random.key(1) if rng else None
    fn = _jit(jax.value_and_grad(workload.loss_fn))
    return jax.tree.map(np.asarray, fn(_params(), _batch(workload), rng=rng))


def _gradient_jaxpr(**settings):
    workload = llama.tiny(**SMALL | settings)
    return jax.make_jaxpr(jax.grad(workload.loss_fn))(workload.params, workload.batch)


def _published_frequencies(config):
    """Llama 3.1's scaled frequencies, case by case, as its authors publish it."""
    found = []
    for i in range(0, config.head_dim, 2):
        frequency = config.rope_theta ** (-i / config.head_dim)
        scaling = config.rope_scaling
        if scaling is not None:
            length = 2 * math.pi / frequency
            if length > scaling.positions / scaling.low:
                frequency /= scaling.factor
            elif length >= scaling.positions / scaling.high:
                smooth = scaling.positions / length - scaling.low
                smooth /= scaling.high - scaling.low
                slow = frequency / scaling.factor
                frequency = (1 - smooth) * slow + smooth * frequency
        found.append(frequency)
    return np.array(found)


def _turned(x, config):
    """Multiply pairs of features, as complex numbers, by `exp(i position f)`."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None, None] * _published_frequencies(config)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _plain_forward(config, params, tokens):
    """Llama in plain numpy and float64, one layer and one head at a time."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def norm(x, scale):
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5) * scale

    x, layers = params["token_embedding"][tokens], params["layers"]
    seq, group = tokens.shape[1], config.num_heads // config.kv_heads
    for i in range(config.num_layers):
        w = {
            name: np.asarray(*leaves.values())[i]
            for name, leaves in layers.items()
            if len(leaves) == 1
        }
        h = norm(x, w["attention_norm"])
        q, k, v = (
            (h @ w[name]).reshape(*h.shape[:2], -1, config.head_dim)
            for name in ("query_proj", "key_proj", "value_proj")
        )
        q, k = _turned(q, config), _turned(k, config)
        context = []
        for head in range(config.num_heads):
            key, value = k[:, :, head // group], v[:, :, head // group]
            scores = q[:, :, head] @ key.swapaxes(1, 2) / config.head_dim**0.5
            weights = np.exp(np.where(np.tri(seq), scores, -np.inf))
            context.append(weights / weights.sum(-1, keepdims=True) @ value)
        x = x + np.concatenate(context, axis=-1) @ w["out_proj"]
        h = norm(x, w["mlp_norm"])
        gate, up = h @ w["mlpwi_0"], h @ w["mlpwi_1"]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["mlpwo"]
    return norm(x, params["final_norm"]["scale"])


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_are_the_published_ones(scaling, head_dim):
    config = llama.LlamaConfig(width=head_dim, num_heads=1, rope_scaling=scaling)
    frequencies = llama.rope_frequencies(config)
    np.testing.assert_allclose(frequencies, _published_frequencies(config), rtol=1e-12)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_rotation_multiplies_by_complex_exponentials(scaling):
    config = dataclasses.replace(TINY, rope_scaling=scaling)
    x = jax.random.normal(jax.random.key(0), (2, 40, 3, config.head_dim))
    got = _jit(lambda x: llama.rotate(x, llama.rope_tables(config, 40)))(x)
    np.testing.assert_allclose(got, _turned(np.asarray(x), config), atol=2e-5)


def test_rotated_products_depend_on_the_distance_alone():
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 1, TINY.head_dim))

    @_jit
    def turned(x):
        same = jnp.broadcast_to(x, (1, 50, 1, TINY.head_dim))
        return llama.rotate(same, llama.rope_tables(TINY, 50))[0, :, 0]

    products = np.asarray(turned(q)) @ np.asarray(turned(k)).T
    for distance in (0, 1, 17):
        of_distance = np.diagonal(products, -distance)
        np.testing.assert_allclose(of_distance, products[distance, 0], atol=1e-4)
    assert abs(products[0, 0] - products[17, 0]) > 0.1


def test_norm_equals_linens_and_its_gradients():
    x, d_out = (jax.random.normal(jax.random.key(i), (2, 3, 8)) for i in (0, 1))
    params = {"params": {"scale": jnp.arange(1.0, 9.0)}}

    @_jit
    def both():
        found = []
        for module in (llama.RMSNorm("float32"), nn.RMSNorm(epsilon=1e-5)):
            out, vjp = jax.vjp(module.apply, params, x)
            found.append((out, vjp(d_out)))
        return found

    got, wanted = both()
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_hidden_states_equal_a_plain_forward(kv_heads):
    config = dataclasses.replace(MINUTE, kv_heads=kv_heads)
    params = large_params(llama.init_params, config)
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 32)
    got = _apply(config)({"params": params}, tokens)
    wanted = _plain_forward(config, params, np.asarray(tokens))
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_hidden_states_read_no_later_token():
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 31)
    before, after = (
        _apply(MINUTE)({"params": large_params(llama.init_params, MINUTE)}, x)
        for x in (tokens, tokens.at[:, 7].add(1))
    )
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert jnp.all(jnp.any(before[:, 7:] != after[:, 7:], axis=-1))


def test_sizes_have_the_published_numbers_of_parameters():
    totals = [sum(x.size for x in jax.tree.leaves(size().params)) for size in SIZES[1:]]
    assert totals == [1_235_814_400, 8_030_261_248, 70_553_706_496]


@pytest.mark.parametrize("tied", [True, False])
def test_untied_tables_are_two_and_the_loss_reads_the_second(tied):
    config = dataclasses.replace(MINUTE, tied=tied)
    params = large_params(llama.init_params, config)
    tables = {"token_embedding"} if tied else {"token_embedding", "output_embedding"}
    assert set(params) == {"layers", "final_norm", *tables}

    batch = {"tokens": jnp.full((1, 9), 3)}  # of the input, one row is read
    gradients = _jit(jax.grad(llama.make_loss(config)))(params, batch)
    rows = {
        name: int(jnp.sum(jnp.any(gradients[name] != 0, axis=1))) for name in tables
    }
    reads = {"token_embedding": 32 if tied else 1, "output_embedding": 32}
    assert rows == {name: reads[name] for name in tables}


@pytest.mark.parametrize("attention", ["xla", "chunked"])
@pytest.mark.parametrize("loss_chunks", [0, 4])
def test_forward_flops_equal_those_of_the_trace(attention, loss_chunks):
    settings = {"attention": attention, "loss_chunks": loss_chunks}
    workload = llama.tiny(**SMALL | {"seq": 256}, **settings)
    graph = jaxckpt.trace(workload.loss_fn, workload.params, workload.batch)
    assert graph.forward_flops == llama.forward_flops(TINY, batch=2, seq=256)


def test_loss_starts_near_that_of_equal_guesses():
    loss, _ = _loss_and_gradients()
    assert abs(loss - math.log(256)) < 0.1


@pytest.mark.parametrize("scan", [True, False])
def test_layer_names_its_standard_values_in_order(scan):
    workload = llama.tiny(**SMALL | {"num_layers": 1}, scan=scan)
    gradient = jax.make_jaxpr(jax.grad(workload.loss_fn))
    jaxpr = gradient(workload.params, workload.batch)
    assert value_names(jaxpr) == NAMES


@pytest.mark.skipif(
    remat3_enabled(), reason="JAX_REMAT3 sees no name inside a custom_vjp rule"
)
@pytest.mark.parametrize("name", NAMES[1:-1])
def test_each_name_but_the_last_keeps_what_the_backward_reads(name):
    """The layer input is kept by the scan anyway; nothing reads the last projection."""
    found = _kept_by(f"save({name})")
    assert found == _kept_by("full") | {(name, "save")}


def test_keeping_the_last_projection_raises():
    with pytest.raises(PolicyError, match="`mlpwo`"):
        _kept_by("save(mlpwo)")


@functools.cache
def _kept_by(policy):
    workload = llama.tiny(**SMALL, policy=policy)
    return set(residual_names(workload.loss_fn, workload.params, workload.batch))


def test_kept_queries_and_keys_are_not_rotated_again():
    def joined_halves(policy):
        return count(_gradient_jaxpr(policy=policy), "concatenate")

    once = joined_halves("none")
    assert joined_halves("save(query_proj, key_proj)") == once
    assert joined_halves("full") == once + 2 * SMALL["num_layers"]


@pytest.mark.parametrize("scan", [True, False])
def test_rotary_tables_are_computed_once(scan):
    jaxpr = _gradient_jaxpr(policy="full", scan=scan)
    assert count(jaxpr, "cos") == count(jaxpr, "sin") == 1


def test_parameters_are_float32_and_layers_compute_in_bfloat16():
    workload = llama.tiny()
    assert {x.dtype for x in jax.tree.leaves(workload.params)} == {jnp.dtype("float32")}
    text = str(jax.make_jaxpr(workload.loss_fn)(workload.params, workload.batch))
    assert "bf16[16,128,384]" in text  # gate and up
    assert "f32[16,128,384]" not in text
    assert "bf16[16,128,2,32]" in text  # keys and values
    assert "f32[16,128,256]" in text  # logits


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "full", "loss_chunks": 4},
        {"policy": "dots", "attention": "xla"},
        {"schedule": "every(2)"},
        {"policy": "save(query_proj, mlpwi_1)", "schedule": "remat_every(2)"},
        {"policy": "save(out_proj)", "scan": False},
    ],
    ids=str,
)
def test_setting_changes_neither_loss_nor_gradients(settings):
    chex.assert_trees_all_close(
        _loss_and_gradients(**settings), _loss_and_gradients(), rtol=2e-5, atol=1e-7
    )


def test_parameters_are_the_same_tree_for_every_schedule_scanned_or_not():
    scanned, unrolled = (
        llama.tiny(**SMALL, scan=scan, schedule=schedule).params
        for scan, schedule in ((True, None), (False, "nested(2)"))
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(scanned, unrolled)
    assert scanned["layers"]["query_proj"]["kernel"].shape == (2, 128, 128)


@pytest.mark.parametrize("scan", [True, False])
def test_layers_are_one_loop_or_stand_one_after_another(scan):
    program = str(_gradient_jaxpr(scan=scan, attention="xla"))
    assert ("scan[" in program) == scan


def test_policy_and_schedule_may_be_given_as_text_or_as_records():
    def program(**settings):
        return str(_gradient_jaxpr(**settings))

    policy, rule = jaxckpt.save("out_proj"), remat_every(2)
    text = program(policy="save(out_proj)", schedule="remat_every(2)")
    assert text == program(policy=policy, schedule=rule)
    assert text == program(schedule=remat_every(2, policy))
    assert text != program(policy=policy) != program(schedule=rule)


def test_dropout_acts_with_an_rng_and_is_the_same_under_a_policy():
    with_rng = functools.partial(_loss_and_gradients, rng=True, dropout=0.3)
    without, dropped = _loss_and_gradients(), with_rng()
    assert abs(without[0] - dropped[0]) > 1e-3
    chex.assert_trees_all_close(with_rng(policy="full"), dropped, rtol=2e-5, atol=1e-7)


def test_tiny_learns_more_than_byte_frequencies():
    settings = {"num_layers": 1, "batch": 8, "seq": 64, "attention": "xla"}
    with no_optimizations():
        workload = llama.tiny(**settings, policy="save(out_proj)")
        result = train(workload, steps=50, eval_batches=4)
    assert result.validation_loss < result.unigram_entropy


@pytest.mark.parametrize("size", SIZES, ids=lambda f: f.__name__)
def test_workload_functions_are_typed_keyword_only(size):
    check_workload_function(
        size,
        "batch seq num_layers dtype attention loss_chunks dropout policy schedule "
        "scan data_path seed learning_rate warmup_steps decay_steps",
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, "`batch=0` must be at least 1"),
        ({"seq": 0}, "`seq=0` must be at least 1"),
        ({"num_layers": 0}, "`num_layers=0` must be at least 1"),
        ({"seq": 8193}, "`seq=8193` is longer than the 8192 positions"),
        ({"dtype": "bf16"}, "`dtype=bf16` is not known.*Did you mean `bfloat16`"),
        ({"attention": "flsh"}, "`attention=flsh` is not known.*Did you mean `flash`"),
        ({"dropout": 1.0}, "`dropout=1.0` is not a rate"),
        (
            {"seq": 12, "loss_chunks": 5},
            "`loss_chunks=5` does not divide.*1, 2, 3, 4, 6",
        ),
        ({"policy": "full", "schedule": "every(2)"}, "`full` has no place in"),
    ],
    ids=str,
)
def test_bad_settings_raise_before_anything_is_traced(settings, message):
    with pytest.raises(JaxckptError, match=message):
        llama.tiny(**settings)


def test_large_sizes_reach_131072_positions():
    llama.llama3_8b(seq=131072)
    with pytest.raises(WorkloadError, match="`seq=131073` is longer than the 131072"):
        llama.llama3_8b(seq=131073)
