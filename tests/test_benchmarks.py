"""Benchmarks work in their tiny form, on the CPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import (
    executor,
    executor_methods,
    frontier,
    frontier_cases,
    frontier_plot,
    frontier_summary,
    policies,
)
from benchmarks.frontier_cases import Case, Result, Row, Step
from jaxckpt.planner.target import Compiled, Target
from jaxckpt.report.compare import Comparison, Rule
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


TINY_GPT = Case("gpt", "models/gpt.py:tiny", "num_layers=2 seq=64", "h100-80gb")
LAYERS = """
import jax, jax.numpy as jnp, optax
from jaxckpt import Workload

def layers(*, policy=None, schedule=None):
    def loss(weights, x, rng=None):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)
        return jnp.mean(x**2)

    weights = jax.ShapeDtypeStruct((8, 256, 256), "float32")
    x = jax.ShapeDtypeStruct((65536, 256), "float32")
    return Workload("layers", loss, weights, x, optimizer=optax.sgd(0.1))
"""


def run_frontier(monkeypatch, path, case=TINY_GPT):
    """Run a case at two budgets; return its result as it stands in the file."""
    rules = tuple(Rule(p, optional=True) for p in ("none", "full", "maxtext:minimal"))
    options = "--case", "gpt-h100", "--budgets", "2", "--json", str(path), "--markdown"
    monkeypatch.setattr(sys, "argv", ["frontier", *options])
    monkeypatch.setattr(frontier, "CASES", (case,))
    monkeypatch.setattr(frontier_cases, "default_rules", lambda: rules)
    frontier.main()
    (found,) = json.loads(path.read_text())["cases"]
    return found


def compile_as_predicted(target, plan):
    """Stand for the compiler: the prediction is right, a byte of peak aside."""
    target.compiles += 1
    found = target.predict(plan)
    return Compiled(found.peak_bytes + 1, 0, found.step_seconds)


def compare_half_second(load_for, rules, device, *, progress):
    """Stand for the compiler: each rule takes one GiB, half a second, and ten FLOPs."""
    footprint = Footprint(0, 0, 2**30, 0, 0)
    rows = [
        Measurement("gpt", device.name, r.policy, None, footprint, 10, 0, 0.5, 0.0,
                    None, False, (), ())
        for r in dict.fromkeys(rules)
    ]  # fmt: skip
    return Comparison("gpt", device.name, tuple(rows), ())


def test_frontier_plans_for_each_budget_and_writes_what_it_found(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(Target, "compile", compile_as_predicted)
    monkeypatch.setattr(frontier_cases, "compare_policies", compare_half_second)
    (tmp_path / "layers.py").write_text(LAYERS)
    case = Case("gpt", f"{tmp_path}/layers.py:layers", "", "h100-80gb")
    found = run_frontier(monkeypatch, tmp_path / "out.json", case)
    least, most = found["rows"]
    assert most["budget_bytes"] == found["plain"]["peak_bytes"]
    assert least["ours"]["peak_bytes"] <= least["budget_bytes"] < most["budget_bytes"]
    assert least["ours"]["recompute_flops"] >= most["ours"]["recompute_flops"]
    # All policies take the same, so that a group has one of them.
    assert [step["label"] for step in found["hands"]["lse"]] == ["none"]
    assert re.search(r"\| gpt-h100 +\| +2 of 2 \|", capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.aot
def test_frontier_compiles_plans_and_hand_policies(monkeypatch, tmp_path):
    found = run_frontier(monkeypatch, tmp_path / "out.json")
    for row in found["rows"]:
        assert row["ours"]["peak_bytes"] <= row["budget_bytes"]
    labels = [step["label"] for step in found["hands"]["lse"]]
    assert "maxtext:minimal | save(context_lse)" in labels


def test_frontier_compares_with_no_policy_that_offloads_and_with_none_in_each_group():
    for group, extra in frontier_cases.GROUPS.items():
        texts = [rule.policy for rule in frontier_cases.hand_rules(group)]
        assert texts[0] == "none" and f"maxtext:minimal_flash{extra}" in texts
        assert not any("offload" in text for text in texts)


def frontier_result(*rows, **hands):
    """Return a case whose step takes 100 bytes and 10 seconds without remat."""
    groups = dict.fromkeys(frontier_cases.GROUPS, ())
    return Result(TINY_GPT, Step("none", 100, 0, 10.0), 50, groups | hands, (), rows)


def frontier_row(budget, seconds, flops=0, **figures):
    ours = Step("ours", budget, flops, seconds)
    known = {"first_predicted_bytes": budget, "first_compiled_bytes": budget}
    known |= {"predicted_bytes": budget, "gap": 0.0, "compiles": 1}
    return Row(budget, ours, **known | figures)


HANDS = Step("full", 30, 50, 13.0), Step("dots", 60, 20, 12.0), Step("none", 100, 0, 10)


def test_frontier_counts_where_ours_is_faster_equal_alone_and_beaten():
    rows = (
        frontier_row(20, 14.0),  # alone
        frontier_row(40, 12.0),  # 2 s more than without remat, full 3 s
        frontier_row(60, 12.0),  # as dots
        frontier_row(80, 12.5),  # dots is faster
        frontier_row(100, 10.0),  # both without remat
    )
    found = frontier_summary.summarize(
        [frontier_result(*rows, **{"as they are": HANDS})]
    )
    assert (found.faster, found.equal, found.alone, found.beaten) == (1, 2, 1, 1)
    ratios = found.ratios["as they are"]
    assert (ratios.compared, ratios.both_zero, ratios.alone) == (3, 1, 1)
    assert ratios.median == 1.0  # of 2 / 3, 1 and 1.25
    assert ratios.over_fastest == ratios.median
    assert found.ratios["lse"].alone == 5


def test_frontier_lists_what_is_not_as_it_ought_to_be():
    rows = (
        frontier_row(40, 11.0, first_predicted_bytes=39, predicted_bytes=39),
        frontier_row(50, 11.5, flops=5, gap=0.03, compiles=6),
        Row(60, problem="it is too small"),
        frontier_row(99, 9.9),
    )
    result = frontier_result(*rows, lse=(Step("dots", 45, 1, 11.2),))
    texts = [t.split(": ", 1)[1] for t in frontier_summary.exceptions(result)]
    assert texts == [
        "the last prediction is off by -2.5%",
        "`dots` is faster by 3.000% of the step without remat",
        "the gap is 3.0%",
        "6 compiles",
        "no plan: it is too small",
        "slower by 4.545% than at the budget before",
        "runs 10.00% of the forward pass's FLOPs more again than at the budget before",
        "1 of 4 steps are faster than the one without remat, `ours` by 1.0%; such "
        "overheads count as none",
    ]


def test_frontier_draws_a_panel_for_each_case(tmp_path):
    result = frontier_result(frontier_row(40, 12.0), **{"as they are": HANDS})
    path = tmp_path / "out.png"
    frontier_plot.save_frontiers([result] * 3, path)
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize(
    "options, message",
    [
        ("--case x", "error: `--case x` is not one of llama-h100, "),
        ("--budgets 0", "error: `--budgets 0` is no whole number from 1 on."),
        ("--json /none/a", "error: `--json /none/a`: there is no such folder."),
    ],
)
def test_frontier_refuses_options_in_one_line(options, message):
    with pytest.raises(SystemExit, match=re.escape(message)):
        frontier.parse(options.split())
