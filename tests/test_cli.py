"""The command line: what bad input gets, and what `--json` leaves on stdout."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from typer.testing import CliRunner

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


def error_of(result):
    """Return the one message of a refused command."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert result.stdout == ""
    (message,) = result.stderr.splitlines()
    assert message.startswith("error: ")
    return message


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
        ["measure", GPT, "--schedule", "every(2)"],
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


@pytest.mark.parametrize("command", ["measure", "explain"])
def test_json_is_all_that_stdout_gets(command, tmp_path):
    file = write_noisy_workload(tmp_path)
    result = run_apart(command, f"{file}:mine", "--policy", "full", "--json")
    assert result.returncode == 0, result.stderr
    assert isinstance(json.loads(result.stdout), dict)
    for printed in ("import", "child", "call", "trace"):
        assert printed in result.stderr


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
