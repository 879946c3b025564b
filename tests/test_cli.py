"""The command line: what bad input gets, and what `--json` leaves on stdout."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from helpers_cli import error_of
from typer.testing import CliRunner

from jaxckpt import executor
from jaxckpt.cli import app

GPT = "models/gpt.py:tiny"


def run(*arguments):
    return CliRunner().invoke(app, arguments)


def run_apart(*arguments, without=(), **environment):
    """Run the command in a process of its own, as a user does."""
    inherited = {k: v for k, v in os.environ.items() if k not in without}
    return subprocess.run(
        [sys.executable, "-m", "jaxckpt", *arguments],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("command", ["measure", "explain", "train"])
@pytest.mark.parametrize(
    ("spec", "options", "expected"),
    [
        ("models/nope.py:x", [], ["`models/nope.py` is not a file", "gpt.py"]),
        ("models/gpt.py:tny", [], ["no workload function `tny`", "`tiny`"]),
        ("models/gpt.py", [], ["is not FILE:WORKLOAD"]),
        (GPT, ["--set", "batch=0"], ["batch=0"]),
        (GPT, ["--set", "batch=abc"], ["`batch=abc` is not a whole number"]),
        (GPT, ["--set", "num_layrs=3"], ["`num_layrs`", "Did you mean `num_layers`"]),
        (GPT, ["--set", "batch"], ["not key=value"]),
        (GPT, ["--set", "batch=1", "--set", "batch=2"], ["given twice"]),
        (GPT, ["--policy", "fulll"], ["fulll"]),
        (GPT, ["--policy", "save("], ["save("]),
        (GPT, ["--policy", "save(out_prj)"], ["out_prj", "`out_proj`"]),
        (GPT, ["--schedule", "evry(2)"], ["`evry`", "Did you mean `every`"]),
        (GPT, ["--schedule", "every(0)"], ["every(layers=0)", "at least 1"]),
        (
            "nowhere.py:x",
            ["--policy", "dots", "--schedule", "every(2)"],
            ["has no place in `every(2)`"],
        ),
        (
            "nowhere.py:x",
            ["--policy", "none", "--schedule", "every(2)"],
            ["contradict each other"],
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_message_and_status_2(command, spec, options, expected):
    steps = ["--steps", "1"] if command == "train" else []
    message = error_of(run(command, spec, *options, *steps))
    for part in expected:
        assert part in message


@pytest.mark.parametrize("command", ["measure", "explain"])
def test_an_unknown_device_suggests_the_nearest(command):
    message = error_of(run(command, GPT, "--device", "h1000"))
    assert "`h1000`" in message
    assert "Did you mean `h100-80gb`" in message


def test_training_for_no_steps_is_refused():
    assert "steps" in error_of(run("train", GPT, "--steps", "0"))


def test_training_on_a_file_that_is_not_there_is_refused():
    options = ["--steps", "1", "--set", "num_layers=1", "--data", "nowhere.txt"]
    assert "nowhere.txt" in error_of(run("train", GPT, *options))


@pytest.mark.parametrize(
    "arguments",
    [
        ["mesure", GPT],
        ["measure"],
        ["measure", GPT, "--polici", "full"],
        ["compare", GPT, "--schedule", "every(2)"],
        ["train", GPT],
        ["train", GPT, "--steps", "many"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_status_2(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Error: " in result.stderr
    assert result.stdout == ""


def test_a_policy_for_a_workload_without_one_is_refused(tmp_path):
    file = tmp_path / "plain.py"
    file.write_text("def mine(*, batch: int = 1): ...")
    message = error_of(run("measure", f"{file}:mine", "--policy", "full"))
    assert "takes no keyword `policy`" in message


def test_the_process_itself_ends_with_status_2_and_one_message():
    result = run_apart("measure", GPT, "--device", "h1000")
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.count("error: ") == 1


def test_an_absent_driver_makes_no_traceback():
    settings = "JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    result = run_apart("devices", without=settings)
    assert result.returncode == 0
    assert "Traceback" not in result.stderr


def test_devices_lists_every_chip_within_80_columns():
    result = run_apart("devices", COLUMNS="80")
    assert result.returncode == 0
    assert "h100-80gb" in result.stdout
    assert "rtx4090" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_devices_that_cannot_be_compiled_for_say_why(monkeypatch):
    monkeypatch.setattr(
        "jaxckpt.devices.can_compile",
        lambda device: None if device.is_attached else "the wheels are missing." * 9,
    )
    assert "[1] the wheels are missing." in run("devices").stdout.replace("\n", " ")
    rows = json.loads(run("devices", "--json").stdout)["devices"]
    reasons = {row["name"]: (row["can_compile"], row["reason"]) for row in rows}
    assert reasons["h200"] == (False, "the wheels are missing." * 9)
    assert reasons["attached"] == (True, None)


def test_a_schedule_for_a_workload_without_one_is_refused(tmp_path):
    file = tmp_path / "plain.py"
    file.write_text("def mine(*, batch: int = 1, policy=None): ...")
    message = error_of(run("explain", f"{file}:mine", "--schedule", "every(2)"))
    assert "takes no keyword `schedule`" in message
    assert "`--schedule`" in message


def test_the_version_is_printed():
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("jaxckpt ")
    assert len(result.stdout.splitlines()) == 1


STACK = """
import itertools
import jax, jax.numpy as jnp, optax
from jax.ad_checkpoint import checkpoint_name
from jaxckpt.remat import remat
from jaxckpt.schedule import combine
from jaxckpt.schedule_tree import Keep, Remat, Segment
from jaxckpt.workload import Workload

def layer(x, w):
    x = checkpoint_name(x @ w, "query_proj")
    return jnp.sin(checkpoint_name(jnp.sin(x) @ w, "out_proj"))

def apply(nodes, x, ws):
    for node in nodes:
        here, ws = ws[: node.layers], ws[node.layers :]
        if isinstance(node, Segment):
            run = lambda x, ws, node=node: apply(node.children, x, ws)
            x = remat(run, policy=node.policy)(x, here)
            continue
        one = layer if isinstance(node, Keep) else remat(layer, policy=node.policy)
        for w in here:
            x = one(x, w)
    return x

def mine(*, layers: int = 4, policy=None, schedule=None) -> Workload:
    nodes = combine(policy, schedule).nodes(layers)
    def loss_fn(params, batch, rng=None):
        return (apply(nodes, batch, params) ** 2).sum()
    shape = jax.ShapeDtypeStruct
    return Workload(
        "mine", loss_fn, [shape((16, 16), "float32")] * layers,
        shape((64, 16), "float32"), optax.sgd(0.1), layers=layers,
        init=lambda rng: [jnp.ones((16, 16)) for _ in range(layers)],
        data=lambda split: itertools.repeat(jnp.ones((64, 16))),
    )

def fixed(*, policy=None) -> Workload:
    if policy is None:
        raise ValueError("no policy")
    return mine(policy=policy)
"""
PRODUCT = 2 * 64 * 16 * 16  # FLOPs; two in a layer


@pytest.fixture
def stack(tmp_path):
    file = tmp_path / "stack.py"
    file.write_text(STACK)
    return f"{file}:mine"


@pytest.mark.parametrize(
    ("options", "policy", "schedule", "again"),
    [
        ([], "none", None, 0),
        (["--policy", "full"], "full", None, 8),
        (["--schedule", "every(2)"], None, "every(2)", 8),
        (["--schedule", "remat_every(2)"], None, "remat_every(2)", 4),
        (["--schedule", "Segment(Remat(2)), Keep(2)"], None,
         "Segment(Remat(2)), Keep(2)", 6),
        (["--policy", "save(out_proj)", "--schedule", "remat_every(2)"],
         "save(out_proj)", "remat_every(2)", 2),
    ],
)  # fmt: skip
def test_measure_runs_again_what_policy_and_schedule_say(
    stack, options, policy, schedule, again
):
    result = run("measure", stack, *options, "--json")
    assert result.exit_code == 0, result.output
    measured = json.loads(result.stdout)
    assert (measured["policy"], measured["schedule"]) == (policy, schedule)
    assert measured["recompute_flops"] == again * PRODUCT


def test_measure_names_policy_and_schedule_above_its_table(stack):
    options = "--policy", "save(out_proj)", "--schedule", "remat_every(3)"
    heading = run("measure", stack, *options).stdout.splitlines()[0]
    assert heading.endswith("policy save(out_proj), schedule remat_every(3)")


@pytest.mark.parametrize(
    ("options", "said", "noted"),
    [
        (["--schedule", "every(2)"], "schedule every(2)", False),
        (["--schedule", "remat_every(2)", "--policy", "offload(out_proj)"],
         "policy offload(out_proj), schedule remat_every(2)", True),
        (["--schedule", "Remat(offload(out_proj), 2), Keep(2)"],
         "schedule Remat(offload(out_proj), 2), Keep(2)", True),
    ],
)  # fmt: skip
def test_train_runs_under_a_schedule(stack, options, said, noted):
    result = run("train", stack, "--steps", "1", *options)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0] == f"{stack}, 1 steps, {said}"
    assert ("offload has no effect" in result.stderr) == noted


def compared(*arguments):
    result = run("compare", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), result


def test_compare_sorts_its_rows_and_measures_policies_and_schedules(stack):
    found, _ = compared(
        stack, "--policies", "full, none", "--policies", "save(query_proj, out_proj)",
        "--schedules", "every(2); Remat(full, 2), Keep(2)",
    )  # fmt: skip
    assert list(found) == ["workload", "device", "rows", "left_out"]
    assert (found["workload"], found["device"]) == (stack, "attached")
    assert found["left_out"] == []
    rules = {(row["policy"], row["schedule"]) for row in found["rows"]}
    assert rules == {
        ("full", None),
        ("none", None),
        ("save(query_proj, out_proj)", None),
        (None, "every(2)"),
        (None, "Remat(full, 2), Keep(2)"),
    }
    order = [(-r["peak_bytes"], r["recompute_flops"]) for r in found["rows"]]
    assert order == sorted(order)
    measured = json.loads(run("measure", stack, "--policy", "full", "--json").stdout)
    (row,) = [r for r in found["rows"] if r["policy"] == "full"]
    assert set(row) == set(measured)
    assert row["peak_bytes"] == measured["peak_bytes"]


def test_compare_leaves_out_what_does_not_suit_the_model(tmp_path):
    file = tmp_path / "stack.py"
    file.write_text(STACK.replace("query_proj", "first").replace("out_proj", "second"))
    found, result = compared(f"{file}:mine", "--set", "layers=1")
    kept = [row["policy"] for row in found["rows"]]
    assert set(kept) == {"none", "full", "dots", "dots_no_batch", "maxtext:full"}
    left_out = {one["policy"]: one["reason"] for one in found["left_out"]}
    assert "maxtext:save_qkv_proj" in left_out
    assert not any("offloaded" in name for name in [*left_out, *kept])
    assert "None of the names" in left_out["maxtext:save_qkv_proj"]
    assert "left out: policy maxtext:save_qkv_proj: None of" in result.stderr


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--policies", "full,save(out_prj)"], ["`out_prj`", "`out_proj`"]),
        (["--policies", "full,maxtext:minmal"], ["`maxtext:minimal`"]),
        (["--policies", "full,,none"], ["missing beside a `,`"]),
        (["--policies", "full,save(a"], ["does not close a parenthesis"]),
        (["--schedules", "every(2);every(0)"], ["every(layers=0)"]),
        (["--schedules", "Keep(3)"], ["holds 3 layers, and the stack 4"]),
        (["--plot", "out.txt"], ["`.txt`", "`.png`"]),
        (["--plot", "nowhere/out.png"], ["no folder `nowhere`"]),
        (["--device", "h1000"], ["Did you mean `h100-80gb`"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_compare_refuses_before_it_compiles(stack, options, expected, monkeypatch):
    monkeypatch.setattr("jaxckpt.xla.measure.compile_for", None)
    message = error_of(run("compare", stack, *options))
    for part in expected:
        assert part in message


def test_compare_shows_what_the_workload_itself_refuses(stack):
    message = error_of(run("compare", stack.replace(":mine", ":fixed")))
    assert "no policy" in message


def test_compare_without_matplotlib_names_the_extra(stack, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = error_of(run("compare", stack, "--plot", "out.png"))
    assert "jaxckpt[plot]" in message


def test_compare_draws_a_picture_and_a_table(stack, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("COLUMNS", "80")
    picture = tmp_path / "out.png"
    options = "--policies", "none,full", "--schedules", "every(2)"
    result = run("compare", stack, *options, "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "every(2)" in result.stdout
    assert max(map(len, result.stdout.splitlines()[1:])) <= 80


@pytest.mark.aot
def test_compare_compiles_equal_programs_once_and_keeps_them(
    stack, monkeypatch, tmp_path
):
    monkeypatch.setenv("JAXCKPT_CACHE", str(tmp_path / "cache"))
    policies = "full,maxtext:full,save(out_proj),maxtext:save_out_proj"
    options = "--device", "h100-80gb", "--policies", policies, "--set", "layers=2"
    found, _ = compared(stack, *options)
    assert len(found["rows"]) == 4
    assert len(list((tmp_path / "cache").glob("*.hlo"))) == 2
    monkeypatch.setattr("jaxckpt.xla.compile.run_compiler", None)
    assert compared(stack, *options)[0] == found


def write_noisy_workload(folder):
    """Write a workload that prints wherever it can: at import, call and trace."""
    file = folder / "noisy.py"
    file.write_text(
        textwrap.dedent(
            """
            import os
            import jax, jax.numpy as jnp, optax
            from jaxckpt.remat import remat
            from jaxckpt.workload import Workload

            print("import")
            os.system("echo child")

            def mine(*, batch: int = 4, policy=None) -> Workload:
                print("call")
                def layer(w, x):
                    print("trace")
                    return jnp.tanh(x @ w)
                def loss_fn(params, batch, rng=None):
                    return remat(layer, policy=policy)(params, batch).sum()
                shape = jax.ShapeDtypeStruct
                return Workload(
                    "mine", loss_fn, shape((8, 8), "float32"),
                    shape((batch, 8), "float32"), optax.sgd(0.1),
                    init=lambda rng: jax.random.normal(rng, (8, 8)),
                )
            """
        )
    )
    return file


@pytest.mark.parametrize(
    "arguments",
    [
        ("measure", "--policy", "full"),
        ("explain", "--policy", "full"),
        ("compare", "--policies", "full"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_json_is_all_that_stdout_gets(arguments, tmp_path):
    file = write_noisy_workload(tmp_path)
    command, *options = arguments
    result = run_apart(command, f"{file}:mine", *options, "--json")
    assert result.returncode == 0, result.stderr
    assert isinstance(json.loads(result.stdout), dict)
    for printed in ("import", "child", "call", "trace"):
        assert printed in result.stderr


def test_explain_draws_a_binomial_schedule_as_the_executors_list():
    settings = "--schedule", "binomial(3)", "--set", "num_layers=10"
    shown = run("explain", "models/gpt.py:tiny", *settings).stdout
    _, *picture = executor.binomial(10, 3).draw().splitlines()
    assert "\n".join(picture) in shown


def test_explain_shows_the_peak_and_the_stages(tmp_path):
    file = write_noisy_workload(tmp_path)
    result = run("explain", f"{file}:mine", "--peak", "--stages")
    assert result.exit_code == 0, result.output
    assert "who holds memory at the peak on attached" in result.stdout
    assert "bytes across its start" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    found = json.loads(run("explain", f"{file}:mine", "--peak", "--json").stdout)
    names = {one["name"] for one in found["holders"]}
    assert {"state.params", "batch"} <= names
    assert (
        json.loads(run("explain", f"{file}:mine", "--json").stdout)["holders"] is None
    )


@pytest.mark.aot
def test_measure_for_an_absent_gpu_reports_every_key():
    result = run_apart(
        "measure", GPT, "--set", "batch=2", "--set", "seq=16", "--device", "l40s",
        "--policy", "full", "--json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    measured = json.loads(result.stdout)
    assert " ".join(measured) == (
        "workload device mesh policy schedule peak_bytes argument_bytes output_bytes "
        "temp_bytes alias_bytes host_bytes forward_flops recompute_flops step_seconds "
        "compile_seconds attention scanned xla_flags versions "
        "unpriced warnings"
    )
    used = sum(measured[f"{part}_bytes"] for part in ("argument", "output", "temp"))
    assert measured["peak_bytes"] == used - measured["alias_bytes"]
    assert (measured["device"], measured["policy"]) == ("l40s", "full")


def test_train_prints_both_losses_and_logs(tmp_path):
    result = run(
        "train", GPT, "--steps", "2", "--set", "batch=2", "--set", "num_layers=1",
        "--set", "seq=16", "--policy", "save(out_proj)", "--out", str(tmp_path),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "final loss" in result.stdout
    assert "validation loss" in result.stdout
    assert "unigram entropy" in result.stdout
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
