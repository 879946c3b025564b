"""Benchmarks work in their tiny form, on the CPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import executor, executor_methods, policies
from jaxckpt.report.compare import Comparison
from jaxckpt.xla.footprint import Footprint
from jaxckpt.xla.measure import Measurement

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "on_gpu.sh"


def run_on_gpu(folder, *options):
    command = [SCRIPT, "--tiny", "--out", folder, "--repeats", "2", *options]
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, check=True
    )


@pytest.mark.slow
@pytest.mark.aot
def test_on_gpu_writes_a_row_for_each_phase_and_a_table(tmp_path):
    result = run_on_gpu(tmp_path, "--policy", "full", "--set", "batch=2")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").open()]
    assert [row["phase"] for row in rows] == ["attached", "absent"]
    assert all(row["predicted_peak_bytes"] > 0 for row in rows), rows
    assert rows[0]["real_seconds"] > 0
    assert "full" in (tmp_path / "table.txt").read_text()
    assert result.stderr.count("error") == 0


def test_on_gpu_out_of_time_says_so_and_still_prints_the_table(tmp_path):
    result = run_on_gpu(tmp_path, "--policy", "full", "--limit", "1")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").open()]
    assert [row["error"] for row in rows] == ["not run: no time left"] * 2
    assert "attached, full: not run: no time left" in result.stderr
    assert "│ full" in result.stdout


def test_policies_makes_a_table_for_each_model_and_device(capsys, monkeypatch):
    options = (
        "--device attached --set num_layers=1 --set batch=1 --set seq=8 --markdown"
    )
    rules = "--policy", "none, save(out_proj)", "--policy", "full"
    models = "models/gpt.py:tiny", "models/gpt.py:tiny"
    monkeypatch.setattr(sys, "argv", ["policies", *models, *options.split(), *rules])
    monkeypatch.setattr(policies, "compare_policies", fake_compare)
    policies.main()
    text = capsys.readouterr().out
    assert text.count("models/gpt.py:tiny num_layers=1 batch=1 seq=8 on attached") == 2
    assert text.count("`save(out_proj)`** | 1.00 GiB") == 2
    assert text.count("| **`none`**") == 2


def fake_compare(load_for, rules, device, *, label, progress):
    """Stand for the compiler: each rule is loaded, and all need the same."""
    for rule in rules:
        assert load_for(rule).layers == 1
    rows = [
        Measurement(
            label, device.name, r.policy, r.schedule, Footprint(0, 0, 2**30, 0, 0),
            10, 0, None, 0.0, None, False, (), (),
        )
        for r in rules
    ]  # fmt: skip
    return Comparison(label, device.name, tuple(rows), ())


def test_executor_counts_what_lists_say_and_compiles(capsys, monkeypatch, tmp_path):
    path = tmp_path / "rows.json"
    options = ["--depths", "4", "--slots", "2", "--device", "attached", "--json"]
    only = "--only", "binomial(2), looped"
    monkeypatch.setattr(sys, "argv", ["executor", *options, str(path), *only])
    monkeypatch.setattr(executor, "REPEATS", 1)
    executor.main()
    plain, looped = json.loads(path.read_text())
    assert plain["forwards"] == 4 and plain["time_ratio"] == 1
    assert looped["forwards"] == 4 + 4
    assert 0 < looped["temp_bytes"] < plain["temp_bytes"]
    assert capsys.readouterr().out.count("\n| 4 | ") == 2


def test_executor_samples_what_is_held_when_the_host_has_a_gradient():
    methods = executor_methods.find_methods(4, 2)
    (driven,) = [method for method in methods if not method.compiled]
    params, x = executor_methods.make_arrays(driven, executor.TINY)
    held = driven.live_states(executor_methods.stage, params, x)
    # x1 or x2, and a cotangent; x0 was given.
    assert held == 2 * executor_methods.state_bytes(executor.TINY)


def test_executor_compares_with_equinox_only_where_it_is(monkeypatch):
    names = [method.name for method in executor_methods.find_methods(8, 3)]
    assert any("equinox" in name for name in names)
    monkeypatch.setattr(executor_methods, "EQUINOX", None)
    others = [method.name for method in executor_methods.find_methods(8, 3)]
    assert others == [name for name in names if "equinox" not in name]


def test_executor_draws_methods_of_which_bytes_are_known(tmp_path):
    state = executor.Row.state_bytes
    rows = [
        executor.Row(depth, "m", 2 * depth, temp_bytes=8 * state) for depth in (8, 16)
    ]
    path = tmp_path / "out.png"
    executor.save_plot([*rows, executor.Row(8, "unknown", 8)], "title", path)
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize(
    "options, message",
    [
        ("--depths 8,x", "error: `--depths`: `x` is no whole number from 4 on."),
        ("--slots 1", "error: `--slots`: `1` is no whole number from 2 on."),
        ("--only zzz", "error: `--only zzz` leaves no method of"),
        ("--plot a.png --device none", "error: `--plot` draws bytes."),
    ],
)
def test_executor_refuses_options_in_one_line(options, message):
    with pytest.raises(SystemExit, match=re.escape(message)) as caught:
        executor.parse(options.split())
    assert "\n" not in str(caught.value)
