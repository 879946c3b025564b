"""ViT: it computes the published formulas, and settings change memory only."""

import dataclasses
import functools
import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    check_workload_function,
    count,
    interpret,
    large_params,
    no_optimizations,
    residual_names,
    value_names,
)

import jaxckpt
from jaxckpt._jax import remat3_enabled
from jaxckpt.errors import JaxckptError, PolicyError, WorkloadError
from jaxckpt.training import train
from models import vit
from models.images import grating_batches

SMALL = {"num_layers": 2, "batch": 2, "image_size": 16, "dtype": "float32"}
TINY = vit.ViTConfig(
    num_layers=2,
    width=128,
    num_heads=4,
    mlp=512,
    image_size=16,
    patch=8,
    classes=8,
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
    "mlpwi",
    "mlpwo",
)
# A model that runs in no time, too small to learn.
MINUTE = dataclasses.replace(TINY, width=16, mlp=24, patch=4, classes=5)
SIZES = vit.tiny, vit.vit_l16, vit.vit_h14
POOLINGS = "class", "mean"


@pytest.fixture(autouse=True, scope="module")
def _quick_compiles():
    with no_optimizations():
        yield


@functools.cache
def _batch():
    images = jax.random.normal(jax.random.key(7), (2, 16, 16, 3))
    return {"images": images, "labels": jnp.array([1, 3], jnp.int32)}


@functools.cache
def _params():
    return interpret(vit.tiny(**SMALL).init, jax.random.key(0))


@functools.cache
def _loss_and_gradients(rng=False, **settings):
    workload = vit.tiny(**SMALL | settings)
    rng = jax.random.key(1) if rng else None
    fn = jax.value_and_grad(workload.loss_fn)
    return jax.tree.map(np.asarray, interpret(fn, _params(), _batch(), rng))


def _gradient_jaxpr(**settings):
    workload = vit.tiny(**SMALL | settings)
    return jax.make_jaxpr(jax.grad(workload.loss_fn))(workload.params, workload.batch)


def _plain_forward(config, params, images):
    """ViT in plain numpy and float64, one patch and one head at a time."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def norm(x, w):
        centred = x - np.mean(x, axis=-1, keepdims=True)
        root = np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + 1e-6)
        return centred / root * w["scale"] + w["bias"]

    def dense(x, w):
        return x @ w["kernel"] + w["bias"]

    starts = range(0, config.image_size, config.patch)
    pixels = [
        images[:, i : i + config.patch, j : j + config.patch].reshape(len(images), -1)
        for i, j in itertools.product(starts, starts)
    ]
    kernel = params["patch_embedding"]["kernel"].reshape(-1, config.width)
    x = np.stack(pixels, axis=1) @ kernel + params["patch_embedding"]["bias"]
    if config.pooling == "class":
        token = np.broadcast_to(params["class_token"], (len(x), 1, config.width))
        x = np.concatenate([token, x], axis=1)
    x = x + params["position_embedding"]
    layers = params["layers"]
    for w in (jax.tree.map(lambda leaf, i=i: leaf[i], layers) for i in range(2)):
        h = norm(x, w["attention_norm"])
        q, k, v = (
            np.split(dense(h, w[name]), config.num_heads, axis=-1)
            for name in ("query_proj", "key_proj", "value_proj")
        )
        context = []
        for head in range(config.num_heads):
            scores = q[head] @ k[head].swapaxes(1, 2) / config.head_dim**0.5
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            context.append(weights / weights.sum(-1, keepdims=True) @ v[head])
        x = x + dense(np.concatenate(context, axis=-1), w["out_proj"])
        up = dense(norm(x, w["mlp_norm"]), w["mlpwi"])
        tanh = np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3))
        x = x + dense(0.5 * up * (1 + tanh), w["mlpwo"])
    x = norm(x, params["final_norm"])
    x = x[:, 0] if config.pooling == "class" else x.mean(axis=1)
    return dense(x, params["head"])


@pytest.mark.parametrize("attention", ["xla", "chunked"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_logits_equal_a_plain_forward(pooling, attention):
    config = dataclasses.replace(MINUTE, pooling=pooling, attention=attention)
    params, images = large_params(vit.init_params, config), _batch()["images"]
    got = interpret(vit.ViT(config).apply, {"params": params}, images)
    wanted = _plain_forward(config, params, np.asarray(images))
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_loss_is_the_mean_cross_entropy():
    params, batch = large_params(vit.init_params, MINUTE), _batch()
    logits = _plain_forward(MINUTE, params, np.asarray(batch["images"]))
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    wanted = -np.mean(np.log(probabilities[[0, 1], [1, 3]]))
    got = interpret(vit.make_loss(MINUTE), params, batch)
    np.testing.assert_allclose(got, wanted, rtol=1e-4)


def test_sizes_have_the_published_numbers_of_parameters():
    totals = [sum(x.size for x in jax.tree.leaves(size().params)) for size in SIZES[1:]]
    assert totals == [304_326_632, 632_045_800]


@pytest.mark.parametrize("attention", ["xla", "chunked"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_forward_flops_equal_those_of_the_trace(pooling, attention):
    settings = {"attention": attention, "pooling": pooling}
    workload = vit.tiny(**SMALL | {"image_size": 32}, **settings)
    graph = jaxckpt.trace(workload.loss_fn, workload.params, workload.batch)
    config = dataclasses.replace(TINY, image_size=32, pooling=pooling)
    assert graph.forward_flops == vit.forward_flops(config, batch=2)


def test_loss_starts_near_that_of_equal_guesses():
    loss, _ = _loss_and_gradients()
    assert abs(loss - math.log(8)) < 0.2


@pytest.mark.parametrize("scan", [True, False])
def test_layer_names_its_standard_values_in_order(scan):
    workload = vit.tiny(**SMALL | {"num_layers": 1}, scan=scan)
    gradient = jax.make_jaxpr(jax.grad(workload.loss_fn))
    jaxpr = gradient(workload.params, workload.batch)
    assert value_names(jaxpr) == NAMES


@pytest.mark.skipif(
    remat3_enabled(), reason="JAX_REMAT3 sees no name inside a custom_vjp rule"
)
@pytest.mark.parametrize("name", NAMES[1:-1])
def test_each_name_but_the_last_keeps_what_the_backward_reads(name):
    found = _kept_by(f"save({name})")
    assert found == _kept_by("full") | {(name, "save")}


def test_keeping_the_last_projection_raises():
    with pytest.raises(PolicyError, match="`mlpwo`"):
        _kept_by("save(mlpwo)")


@functools.cache
def _kept_by(policy):
    workload = vit.tiny(**SMALL, policy=policy)
    return set(residual_names(workload.loss_fn, workload.params, workload.batch))


def test_parameters_are_float32_and_layers_compute_in_bfloat16():
    workload = vit.tiny()
    assert {x.dtype for x in jax.tree.leaves(workload.params)} == {jnp.dtype("float32")}
    text = str(jax.make_jaxpr(workload.loss_fn)(workload.params, workload.batch))
    assert "bf16[64,17,512]" in text  # mlpwi, over 16 patches and a class token
    assert "f32[64,17,512]" not in text
    assert "bf16[64,4,4,128]" in text  # patches
    assert "f32[64,8]" in text  # logits


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "full"},
        {"policy": "dots", "attention": "xla"},
        {"schedule": "every(2)"},
        {"policy": "save(query_proj, mlpwi)", "schedule": "remat_every(2)"},
        {"policy": "save(out_proj)", "scan": False},
    ],
    ids=str,
)
def test_setting_changes_neither_loss_nor_gradients(settings):
    chex.assert_trees_all_close(
        _loss_and_gradients(**settings), _loss_and_gradients(), rtol=2e-5, atol=1e-6
    )


@pytest.mark.parametrize("scan", [True, False])
def test_layers_are_one_loop_or_stand_one_after_another(scan):
    scans = count(_gradient_jaxpr(scan=scan, attention="xla"), "scan")
    assert scans == (2 if scan else 0)


def test_dropout_acts_with_an_rng_and_is_the_same_under_a_policy():
    with_rng = functools.partial(_loss_and_gradients, rng=True, dropout=0.3)
    without, dropped = _loss_and_gradients(), with_rng()
    assert abs(without[0] - dropped[0]) > 1e-3
    chex.assert_trees_all_close(with_rng(policy="full"), dropped, rtol=2e-5, atol=1e-6)


def test_tiny_learns_the_directions_of_waves():
    workload = vit.tiny(num_layers=1, batch=16, policy="save(out_proj)")
    result = train(workload, steps=40, eval_batches=2)
    assert result.validation_loss < 0.5 * math.log(8)
    assert result.unigram_entropy is None


def test_images_of_a_class_have_its_direction():
    batch = next(
        grating_batches("train", batch=64, size=32, channels=1, classes=4, seed=1)
    )
    power = np.abs(np.fft.fft2(batch["images"][..., 0])) ** 2
    frequency = np.fft.fftfreq(32, 1 / 32)
    of_wave = np.add.outer(1j * frequency, frequency)  # x + i y
    power *= (np.abs(of_wave) > 1) & (np.abs(of_wave) < 6)
    angles = np.angle(np.sum(power * of_wave**2, axis=(1, 2))) / 2  # no sign
    off = angles - np.pi * batch["labels"] / 4
    off = np.abs((off + np.pi / 2) % np.pi - np.pi / 2)
    assert np.mean(off < np.pi / 16) > 0.9


def test_images_depend_on_split_seed_and_number_alone():
    settings = {"batch": 2, "size": 8, "channels": 3, "classes": 4}

    def images(split="train", skip=0, **more):
        batches = grating_batches(split, **settings, **more)
        return next(itertools.islice(batches, skip, None))["images"]

    np.testing.assert_array_equal(images(skip=3), images(start=3))
    for other in (images("validation"), images(seed=1), images(start=1)):
        assert not np.array_equal(images(), other)
    with pytest.raises(WorkloadError, match="`split=test` is not known"):
        images("test")


@pytest.mark.parametrize("size", SIZES, ids=lambda f: f.__name__)
def test_workload_functions_are_typed_keyword_only(size):
    check_workload_function(
        size,
        "batch image_size num_layers dtype attention pooling dropout policy schedule "
        "scan seed learning_rate warmup_steps decay_steps",
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, "`batch=0` must be at least 1"),
        ({"image_size": 0}, "`image_size=0` must be at least 1"),
        ({"image_size": 30}, "`image_size=30` is not cut in patches of 8.*multiple"),
        ({"num_layers": 0}, "`num_layers=0` must be at least 1"),
        ({"pooling": "max"}, "`pooling=max` is not known"),
        ({"dtype": "bf16"}, "`dtype=bf16` is not known.*Did you mean `bfloat16`"),
        ({"attention": "flsh"}, "`attention=flsh` is not known.*Did you mean `flash`"),
        ({"dropout": 1.0}, "`dropout=1.0` is not a rate"),
        ({"policy": "full", "schedule": "every(2)"}, "`full` has no place in"),
    ],
    ids=str,
)
def test_bad_settings_raise_before_anything_is_traced(settings, message):
    with pytest.raises(JaxckptError, match=message):
        vit.tiny(**settings)
