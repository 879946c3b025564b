"""The form that a stack takes by default, by the compiler of a GPU that is not here."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt import layers_runs
from jaxckpt.devices import get_device
from jaxckpt.layers import FORMS
from jaxckpt.xla.compile import compile_for
from jaxckpt.xla.measure import measure_workload
from models import llama

LIGHT = "query_proj, key_proj, value_proj, context, context_lse, out_proj"
SCHEDULES = (
    "every(2)",
    "full",
    f"Remat(save({LIGHT}), 2), Remat(save({LIGHT}, mlpwi_0, mlpwi_1), 2)",
)


@pytest.mark.aot
@pytest.mark.slow
def test_segments_take_less_straight_than_as_loops(monkeypatch):
    straight = _peak("every(2)", None)
    assert straight < _peak("every(2)", "scan")
    monkeypatch.setattr(layers_runs, "_MOST_STRAIGHT", 0)
    assert straight < 0.9 * _peak("every(2)", None)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_default_form_takes_little_more_than_the_best(schedule):
    peaks = {form: _peak(schedule, form) for form in FORMS}
    assert _peak(schedule, None) <= 1.02 * min(peaks.values()), peaks


@pytest.mark.aot
def test_segments_in_segments_hold_one_of_each_level():
    def body(x, weights):
        return x + jnp.sin(x @ weights[0]) @ weights[1], None

    def loss(stacked, x):
        return jnp.sum(jaxckpt.run_layers(body, x, stacked, "nested(4, 4)")[0])

    weights = jax.ShapeDtypeStruct((64, 2, 256, 256), jnp.float32)
    x = jax.ShapeDtypeStruct((32768, 256), jnp.float32)
    found = compile_for(jax.grad(loss), weights, x, device="h100-80gb").footprint
    # 4 + 4 inputs, and a segment of 4 layers that keep up to 3 arrays each.
    assert found.temp_bytes < 21 * 32768 * 256 * 4


def _peak(schedule, form):
    load = functools.partial(llama.tiny, batch=16, seq=256, scan=form != "unrolled")
    with jaxckpt.use(schedule, form=form):
        return measure_workload(load, device=get_device("h100-80gb")).peak_bytes
