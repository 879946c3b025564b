"""Amounts in words, and tables that fit 80 columns."""

import io

import pytest
from rich.console import Console

from jaxckpt.devices import catalog
from jaxckpt.report import (
    device_table,
    format_bytes,
    format_flops,
    format_seconds,
    measurement_table,
    policy_table,
)

MEASURED = {
    "workload": "models/gpt.py:gpt2_xl",
    "device": "h100-80gb",
    "policy": "save(query_proj, key_proj, value_proj) | offload(context) - save(out*)",
    "peak_bytes": 40 * 2**30,
    "argument_bytes": 18 * 2**30,
    "output_bytes": 18 * 2**30,
    "temp_bytes": 22 * 2**30,
    "alias_bytes": 18 * 2**30,
    "host_bytes": 0,
    "forward_flops": 4 * 10**13,
    "recompute_flops": 10**13,
    "step_seconds": 0.25,
    "compile_seconds": 12.5,
    "attention": "cudnn",
    "scanned": True,
    "xla_flags": "--xla_disable_hlo_passes=rematerialization",
    "versions": {"plugin": "cuda12 0.12.0", "jax": "0.12.0", "nvidia-cudnn-cu12": None},
    "unpriced": ["custom-call a"],
    "warnings": ["`remat` of [layer] saves nothing."],
}


def shown(table):
    file = io.StringIO()
    Console(file=file, width=80).print(table)
    return file.getvalue()


@pytest.mark.parametrize(
    ("function", "amount", "text"),
    [
        (format_bytes, 0, "0.00 GiB"),
        (format_bytes, 85 * 10**9, "79.16 GiB"),
        (format_flops, 999.6e9, "1.00 TFLOP"),
        (format_flops, 123456, "123 kFLOP"),
        (format_flops, None, "-"),
        (format_seconds, 0.9999, "1.00 s"),
        (format_seconds, 0.0, "0.00 us"),
        (format_seconds, 12e-6, "12.0 us"),
        (format_seconds, 754.2, "754 s"),
    ],
)
def test_an_amount_is_written_with_its_unit(function, amount, text):
    assert function(amount) == text


def test_a_measurement_shows_the_sum_that_makes_its_peak():
    text = shown(measurement_table(MEASURED))
    for part in ("40.00 GiB", "+ temp", "- alias", "25.0 % of the forward", "cudnn"):
        assert part in text
    assert "--xla_disable_hlo_passes=rematerialization" in text
    assert "custom-call a" in text
    assert "`remat` of [layer] saves nothing." in text
    assert "plugin cuda12 0.12.0, jax 0.12.0" in text
    assert "None" not in text


def test_a_measurement_with_unknown_parts_is_shown():
    unknown = dict.fromkeys(MEASURED)
    assert "recomputed" in shown(measurement_table(unknown))


def test_policies_are_rows_and_keep_every_figure():
    text = shown(policy_table([MEASURED | {"policy": "none"}, MEASURED]))
    assert text.count("40.00 GiB") == 2
    assert text.count("25.0 %") == 2
    assert text.count("250 ms") == 2


def test_devices_show_every_name_and_figure_in_full():
    text = shown(device_table(catalog().values(), {"h200": "no [1]"}))
    assert "…" not in text
    assert text.count("yes") == len(catalog()) - 1
    assert "no [1]" in text
