"""GPT: what it names, that settings change memory and not numbers, that it learns."""

import functools
import inspect
import typing

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxckpt import policy as policies
from jaxckpt._jax import bound_name
from jaxckpt.errors import WorkloadError
from jaxckpt.graph.flops import count_flops, equations
from jaxckpt.training import TrainState, train, train_step_fn
from models import gpt

SMALL = {"num_layers": 2, "batch": 4, "seq": 16, "dtype": "float32"}
VALUE_NAMES = {
    "decoder_layer_input",
    "query_proj",
    "key_proj",
    "value_proj",
    "context",
    "context_lse",
    "out_proj",
    "mlpwi",
    "mlpwo",
}
# Compiling is what these tests spend their time on.
_jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)
SIZES = (gpt.tiny, gpt.gpt2, gpt.gpt2_medium, gpt.gpt2_large, gpt.gpt2_xl)


def _batch(workload):
    shape = workload.batch["tokens"].shape
    return {"tokens": jax.random.randint(jax.random.key(7), shape, 0, 256)}


@functools.cache
def _params(scan=True):
    return _jit(gpt.tiny(**SMALL, scan=scan).init)(jax.random.key(0))


@functools.cache
def _loss_and_gradients(rng=False, **settings):
    workload = gpt.tiny(**SMALL | settings)
    rng = jax.random.key(1) if rng else None
    fn = _jit(jax.value_and_grad(workload.loss_fn))
    return jax.tree.map(np.asarray, fn(_params(), _batch(workload), rng=rng))


@pytest.mark.parametrize("scan", [True, False])
def test_layer_names_its_standard_values(scan):
    workload = gpt.tiny(**SMALL, scan=scan)
    gradient = jax.make_jaxpr(jax.grad(workload.loss_fn))
    jaxpr = gradient(workload.params, workload.batch)
    names = {bound_name(eqn) for eqn, _ in equations(jaxpr)}
    assert names - {None} == VALUE_NAMES


@pytest.mark.parametrize("attention", ["xla", "chunked"])
@pytest.mark.parametrize("loss_chunks", [0, 4])
def test_forward_flops_equal_the_products_of_the_jaxpr(attention, loss_chunks):
    settings = {"attention": attention, "loss_chunks": loss_chunks}
    workload = gpt.tiny(num_layers=3, batch=2, seq=256, **settings)
    config = gpt.GPTConfig(num_layers=3, width=128, num_heads=4, vocab_size=256)
    jaxpr = jax.make_jaxpr(workload.loss_fn)(workload.params, workload.batch)
    assert count_flops(jaxpr).matmul == gpt.forward_flops(config, batch=2, seq=256)


def test_sizes_have_the_published_numbers_of_parameters():
    """GPT-2's 124, 355, 774 and 1558 million, plus 47 rows of padded vocabulary."""
    millions = []
    for workload in (size() for size in SIZES[1:]):
        width = workload.params["token_embedding"]["embedding"].shape[1]
        total = sum(x.size for x in jax.tree.leaves(workload.params))
        millions.append(round((total - 47 * width) / 1e6))
    assert millions == [124, 355, 774, 1558]


def test_parameters_are_float32_and_layers_compute_in_bfloat16():
    workload = gpt.tiny()
    assert {x.dtype for x in jax.tree.leaves(workload.params)} == {jnp.dtype("float32")}
    text = str(jax.make_jaxpr(workload.loss_fn)(workload.params, workload.batch))
    assert "bf16[16,128,512]" in text  # mlpwi
    assert "f32[16,128,512]" not in text
    assert "f32[16,128,256]" in text  # logits


def test_unrolled_layers_equal_scanned_ones():
    scanned, unrolled = (gpt.tiny(**SMALL, scan=scan) for scan in (True, False))
    params = _params()
    chex.assert_trees_all_equal_shapes(params, unrolled.params)
    batch = _batch(scanned)
    chex.assert_trees_all_close(
        _jit(scanned.loss_fn)(params, batch),
        _jit(unrolled.loss_fn)(params, batch),
        rtol=1e-6,
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"attention": "xla"},
        {"loss_chunks": 4},
        {"loss_chunks": 16},
        {"policy": "full"},
        {"policy": "save(out_proj, mlpwi)", "loss_chunks": 2},
        {"policy": "dots", "attention": "xla"},
        {"schedule": "every(2)"},
        {"schedule": "remat_every(2)", "policy": "save(out_proj)", "scan": False},
    ],
    ids=str,
)
def test_setting_changes_neither_loss_nor_gradients(settings):
    chex.assert_trees_all_close(
        _loss_and_gradients(**settings), _loss_and_gradients(), rtol=2e-5, atol=1e-7
    )


RULES = [
    {"policy": "full"},
    {"policy": "dots"},
    {"schedule": "every(2)"},
    {"schedule": "every(5)"},
    {"schedule": "remat_every(2)"},
    {"schedule": "sqrt()"},
    {"schedule": "nested(2, 2)"},
    {"schedule": "binomial(3)"},
]


@functools.cache
def _losses_after_60_steps(scan=True, **rule):
    result = train(gpt.tiny(dtype="float32", scan=scan, **rule), steps=60)
    return result.final_loss, result.validation_loss


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rule_trains_to_the_same_losses(rule, scan):
    plain = _losses_after_60_steps(policy="none")
    chex.assert_trees_all_close(_losses_after_60_steps(scan, **rule), plain, rtol=1e-6)


# Each pair of settings once.
@pytest.mark.parametrize(
    ("dtype", "scan", "accumulate"),
    [
        ("float32", True, 2),
        ("float32", False, 1),
        ("bfloat16", True, 1),
        ("bfloat16", False, 2),
    ],
)
def test_policy_leaves_a_training_step_as_it_is(dtype, scan, accumulate):
    def one_step(policy):
        workload = gpt.tiny(**SMALL | {"dtype": dtype}, scan=scan, policy=policy)
        optimizer = optax.sgd(1.0)
        step = train_step_fn(workload.loss_fn, optimizer, accumulate=accumulate)
        state = TrainState.create(_params(scan), optimizer, jax.random.key(1))
        new, metrics = _jit(step)(state, _batch(workload))
        return new.params, metrics

    tolerance = 1e-5 if dtype == "float32" else 2e-2
    plain, under_policy = one_step(None), one_step("save(out_proj)")
    chex.assert_tree_all_finite(under_policy)
    chex.assert_trees_all_close(under_policy, plain, rtol=tolerance, atol=tolerance)


def test_dropout_acts_with_an_rng_and_is_the_same_under_a_policy():
    with_rng = functools.partial(_loss_and_gradients, rng=True, dropout=0.3)
    without, dropped = _loss_and_gradients(dropout=0.3), with_rng()
    assert abs(without[0] - dropped[0]) > 1e-3
    chex.assert_trees_all_close(with_rng(policy="full"), dropped, rtol=2e-5, atol=1e-7)


def _gradient_jaxpr(**settings):
    workload = gpt.tiny(**SMALL | settings)
    return jax.make_jaxpr(jax.grad(workload.loss_fn))(workload.params, workload.batch)


@pytest.mark.parametrize("loss_chunks", [0, 4])
@pytest.mark.parametrize("scan", [True, False])
def test_without_a_policy_nothing_is_computed_twice(scan, loss_chunks):
    config = gpt.GPTConfig(num_layers=2, width=128, num_heads=4, vocab_size=256)
    forward = gpt.forward_flops(config, batch=4, seq=16)
    jaxpr = _gradient_jaxpr(attention="xla", scan=scan, loss_chunks=loss_chunks)
    assert count_flops(jaxpr).matmul == 3 * forward


def test_chunked_loss_never_has_all_logits():
    whole, chunked = "f32[4,16,256]", "f32[4,4,256]"
    assert whole in str(_gradient_jaxpr())
    text = str(_gradient_jaxpr(loss_chunks=4))
    assert whole not in text and chunked in text


def test_eval_loss_carries_no_remat_cost():
    def lowered(policy):
        workload = gpt.tiny(**SMALL, policy=policy)
        fn = _jit(workload.loss_fn)
        return fn.lower(workload.params, workload.batch).compile().as_text()

    plain, full = (lowered(policy) for policy in (None, "full"))
    assert full.count(" dot(") == plain.count(" dot(")
    assert full.count("opt-barrier") == plain.count("opt-barrier") == 0


def test_tiny_learns_more_than_byte_frequencies():
    workload = gpt.tiny(num_layers=2, batch=8, seq=64, policy="save(out_proj)")
    result = train(workload, steps=50, eval_batches=4)
    assert result.validation_loss < result.unigram_entropy


@pytest.mark.parametrize("size", SIZES, ids=lambda f: f.__name__)
def test_workload_functions_are_typed_keyword_only(size):
    parameters = inspect.signature(size).parameters
    shared = "batch seq num_layers dtype attention loss_chunks dropout policy data_path"
    assert set(shared.split()) <= set(parameters)
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())
    assert set(typing.get_type_hints(size)) == {*parameters, "return"}
    assert size().name == size.__name__


def test_policy_may_be_given_as_text_or_as_a_policy():
    def program(policy):
        return str(_gradient_jaxpr(policy=policy))

    text, record = program("save(out_proj)"), program(policies.save("out_proj"))
    assert text == record != program("full")
    assert program("none") == program(None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, "`batch=0` must be at least 1"),
        ({"seq": 0}, "`seq=0` must be at least 1"),
        ({"num_layers": 0}, "`num_layers=0` must be at least 1"),
        ({"seq": 1025}, "`seq=1025` is longer than the 1024 positions"),
        ({"dtype": "bf16"}, "`dtype=bf16` is not known.*Did you mean `bfloat16`"),
        ({"attention": "flsh"}, "`attention=flsh` is not known.*Did you mean `flash`"),
        ({"dropout": 1.0}, "`dropout=1.0` is not a rate"),
        (
            {"seq": 12, "loss_chunks": 5},
            "`loss_chunks=5` does not divide.*1, 2, 3, 4, 6",
        ),
        ({"loss_chunks": -1}, "`loss_chunks=-1`"),
    ],
    ids=str,
)
def test_bad_settings_raise_before_anything_is_traced(settings, message):
    with pytest.raises(WorkloadError, match=message):
        gpt.tiny(**settings)
