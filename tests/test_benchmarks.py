"""The script for a real GPU works where there is none: in its tiny form, on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
