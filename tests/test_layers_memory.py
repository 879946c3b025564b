"""The form that a stack takes by default, by the compiler of a GPU that is not here."""

import functools

import pytest

import jaxckpt
from jaxckpt import layers_runs
from jaxckpt.devices import get_device
from jaxckpt.layers import FORMS
from jaxckpt.xla.measure import measure_workload
from models import llama

LIGHT = "query_proj, key_proj, value_proj, context, context_lse, out_proj"
SCHEDULES = (
    "every(2)",
    "full",
    f"Remat(save({LIGHT}), 2), Remat(save({LIGHT}, mlpwi_0, mlpwi_1), 2)",
)


@pytest.mark.aot
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


def _peak(schedule, form):
    load = functools.partial(llama.tiny, batch=16, seq=256, scan=form != "unrolled")
    with jaxckpt.use(schedule, form=form):
        return measure_workload(load, device=get_device("h100-80gb")).peak_bytes
