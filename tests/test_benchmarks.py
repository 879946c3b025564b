"""Benchmarks work in their tiny form, on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import policies
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
