"""`measure`: bytes that add up, FLOPs counted by hand, and what an H100 would need."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxckpt
from jaxckpt.devices import ATTACHED, get_device
from jaxckpt.xla import compile_for
from jaxckpt.xla.measure import load_traced, measure_workload, trace_loss, whole_step
from models import gpt

KEYS = {
    *("workload", "device", "mesh", "policy", "schedule", "attention", "scanned"),
    *("peak_bytes", "argument_bytes", "output_bytes", "temp_bytes", "alias_bytes"),
    *("host_bytes", "forward_flops", "recompute_flops", "step_seconds"),
    *("compile_seconds", "xla_flags", "versions"),
}
LAYERS, BATCH, SEQ, WIDTH, VOCABULARY = 3, 2, 128, 128, 256
CONFIG = gpt.GPTConfig(
    num_layers=LAYERS, width=WIDTH, num_heads=4, vocab_size=VOCABULARY
)
small = functools.partial(gpt.tiny, num_layers=LAYERS, batch=BATCH, seq=SEQ)
_compiled = functools.partial(compile_for, device=ATTACHED)
each_attention = pytest.mark.parametrize("attention", ["chunked", "xla"])


@functools.cache
def _measured(policy="full"):
    load = functools.partial(gpt.tiny, num_layers=2, batch=2, seq=16, policy=policy)
    return measure_workload(load, device=get_device("attached"), policy=policy)


def test_measurement_has_every_key_of_the_contract():
    found = _measured().as_json()
    assert set(found) >= KEYS
    assert (found["workload"], found["device"]) == ("tiny", "attached")
    assert (found["policy"], found["attention"], found["scanned"]) == (
        "full",
        "chunked",
        True,
    )


def test_measurement_names_the_schedule_beside_the_policy():
    load = functools.partial(gpt.tiny, num_layers=1, batch=1, seq=8)
    attached = get_device("attached")
    loaded = load_traced(load, device=attached, schedule="every(2)", label="mine")
    assert (loaded.label, loaded.policy, loaded.schedule) == ("mine", None, "every(2)")
    assert load_traced(load, device=attached).label == "tiny"


def test_peak_is_argument_and_output_and_temp_less_alias():
    found = _measured().as_json()
    used = sum(found[f"{part}_bytes"] for part in ("argument", "output", "temp"))
    assert found["peak_bytes"] == used - found["alias_bytes"]
    # Parameters and Adam's two moments go in; they come out in the same memory.
    workload = gpt.tiny(num_layers=2, batch=2, seq=16)
    state = 3 * sum(4 * p.size for p in jax.tree.leaves(workload.params))
    assert state <= found["alias_bytes"] <= found["argument_bytes"] < 1.05 * state
    assert found["temp_bytes"] > 0 and found["step_seconds"] > 0


def test_measure_of_a_function_equals_that_of_its_workload():
    workload = gpt.tiny(num_layers=2, batch=2, seq=16, policy="full")
    found = jaxckpt.measure(
        workload.loss_fn, workload.params, workload.batch, optimizer=workload.optimizer
    )
    assert found.footprint == _measured().footprint
    assert found.recompute_flops == _measured().recompute_flops > 0
    assert found.step_seconds is None  # abstract parameters cannot be run


def test_donation_is_seen_in_the_total_and_not_in_temp_alone():
    workload = gpt.tiny(num_layers=2, batch=2, seq=16)
    step, state = whole_step(workload)
    kept, donated = (
        _compiled(step, state, workload.batch, donate_argnums=d).footprint
        for d in (None, 0)
    )
    state_bytes = 3 * sum(4 * x.size for x in jax.tree.leaves(workload.params))
    assert kept.alias_bytes == 0 and donated.alias_bytes >= state_bytes
    assert kept.argument_bytes == donated.argument_bytes
    # What donation saves is what the state takes, less what it adds to temp.
    saved = kept.peak_bytes - donated.peak_bytes
    assert saved == donated.alias_bytes + kept.temp_bytes - donated.temp_bytes > 0


def test_measure_warns_of_a_remat_that_saves_nothing():
    def model(weights, x):
        for w in weights:
            x = x + jnp.sin(jnp.tanh(x @ w) @ w)
        return jnp.sum(x)

    def warnings(fn):
        found = jaxckpt.measure(
            fn, jnp.ones((3, 8, 8)), jnp.ones((4, 8)), optimizer=optax.sgd(0.1)
        )
        return found.warnings

    assert "saves nothing" in warnings(jaxckpt.remat(model, policy="full"))[0]
    assert warnings(model) == ()


# --- FLOPs by hand -------------------------------------------------------------------


@each_attention
@pytest.mark.parametrize("policy", ["none", "full", "save(out_proj)"])
def test_forward_flops_are_those_of_the_formula(attention, policy):
    graph = trace_loss(small(attention=attention, policy=policy))
    wanted = gpt.forward_flops(CONFIG, batch=BATCH, seq=SEQ)
    assert graph.forward_flops == wanted


TOKENS = BATCH * SEQ
QKV = 2 * TOKENS * WIDTH * 3 * WIDTH
SCORES = CONTEXT = 2 * TOKENS * SEQ * WIDTH  # 2 b h s s (width / h)
OUT = 2 * TOKENS * WIDTH * WIDTH
UP = 2 * TOKENS * WIDTH * 4 * WIDTH
DOWN = 2 * TOKENS * 4 * WIDTH * WIDTH  # mlpwo, whose result nothing reads
LAYER = QKV + SCORES + CONTEXT + OUT + UP + DOWN


FULL = LAYER - DOWN


@pytest.mark.parametrize(
    ("policy", "xla", "chunked"),
    [
        ("none", 0, 0),
        ("full", FULL, FULL),
        ("dots", 0, 0),
        ("dots_no_batch", SCORES + CONTEXT, SCORES + CONTEXT),
        ("save(out_proj)", FULL - OUT, FULL - OUT),
        ("save(query_proj, key_proj, value_proj)", FULL - QKV, FULL - QKV),
        ("save(mlpwi)", FULL - UP, FULL - UP),
        # Without a log-sum-exp to keep, the softmax needs the scores again.
        ("save('context*')", FULL - CONTEXT, FULL - CONTEXT - SCORES),
    ],
)
def test_recompute_flops_are_those_counted_by_hand(policy, xla, chunked):
    for attention, a_layer in (("xla", xla), ("chunked", chunked)):
        graph = trace_loss(small(attention=attention, policy=policy))
        assert graph.recompute_flops == LAYERS * a_layer


def test_hand_count_adds_up_to_the_models_own_formula():
    head = 2 * TOKENS * WIDTH * VOCABULARY
    wanted = gpt.forward_flops(CONFIG, batch=BATCH, seq=SEQ)
    assert LAYERS * LAYER + head == wanted


def test_a_chunked_loss_runs_no_product_again():
    assert trace_loss(small(loss_chunks=4)).recompute_flops == 0


# --- An absent GPU -------------------------------------------------------------------


@pytest.mark.aot
@pytest.mark.parametrize(
    "policies",
    [
        ("none", "full"),
        pytest.param(
            ("none", "full", "dots", "dots_no_batch", "save(out_proj)"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=len,
)
def test_policies_on_an_absent_h100_are_ranked_as_they_should(policies):
    peaks = {}
    for policy in policies:
        load = functools.partial(
            gpt.tiny, num_layers=24, batch=32, seq=128, policy=policy
        )
        found = measure_workload(load, device=get_device("h100-80gb"))
        assert found.peak_bytes == found.footprint.peak_bytes > 0
        assert found.step_seconds > 0
        peaks[policy] = found.peak_bytes
    assert max(peaks, key=peaks.__getitem__) == "none"
    assert peaks["full"] <= 1.02 * min(peaks.values())
    assert peaks["full"] < 0.5 * peaks["none"]
