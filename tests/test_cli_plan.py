"""`--plan FILE`: what it does to a command, and what bad files get."""

import dataclasses
import json

import helpers
import jax
import pytest
from helpers_cli import error_of
from typer.testing import CliRunner

import jaxckpt
from jaxckpt import Plan, every, plan_from
from jaxckpt.cli import app
from jaxckpt.loading import load_workload
from jaxckpt.plan_verified import PlanFigures, Verified, argument_shapes

WORKLOADS = """
import itertools
import jax, jax.numpy as jnp, optax
from jax.ad_checkpoint import checkpoint_name
from jaxckpt.workload import Workload

def layer(x, w):
    up = checkpoint_name(jnp.tanh(x @ w), "up")
    return x + jnp.sin(jnp.sin(up) @ w.T), None

def plain(*, layers: int = 4, batch: int = 8) -> Workload:
    def loss_fn(params, batch, rng=None):
        return (jax.lax.scan(layer, batch, params)[0] ** 2).mean()
    shape = jax.ShapeDtypeStruct
    return Workload(
        "plain", loss_fn, shape((layers, 16, 16), "float32"),
        shape((batch, 16), "float32"), optax.sgd(0.1), layers=layers,
        init=lambda rng: jax.random.normal(rng, (layers, 16, 16)) / 4,
        data=lambda split: itertools.repeat(jnp.ones((batch, 16))),
    )

def stacks(*, batch: int = 8) -> Workload:
    def loss_fn(params, batch, rng=None):
        for name in ("encoder", "decoder"):
            with jax.named_scope(name):
                batch, _ = jax.lax.scan(layer, batch, params[name])
            batch = jnp.exp(jnp.sin(batch))
        return batch.mean()
    shape = lambda n: jax.ShapeDtypeStruct((n, 16, 16), "float32")
    return Workload(
        "stacks", loss_fn, {"encoder": shape(4), "decoder": shape(3)},
        jax.ShapeDtypeStruct((batch, 16), "float32"), optax.sgd(0.1),
    )
"""
LAYER = 2 * 2 * 8 * 16 * 16  # FLOPs of two products


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def good(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def plain(tmp_path):
    (tmp_path / "mine.py").write_text(WORKLOADS)
    return f"{tmp_path}/mine.py:plain"


@pytest.fixture
def stacks(plain):
    return plain.replace(":plain", ":stacks")


def write_plan(path, spec, rule, settings=(), *, verified=None):
    """Write a plan for a workload, as if it was fitted for the device `verified`."""
    workload = load_workload(spec, settings)
    plan = plan_from(rule, workload.loss_fn, workload.params, workload.batch)
    if verified is not None:
        figures = PlanFigures(2**20, 0.5)
        shapes = argument_shapes(workload.params, workload.batch)
        found = Verified(
            verified, 2**30, figures, figures, 0, 10, 5, 0.5, 0.0, 1.0, 1, shapes,
            (("jax", jax.__version__),), "", "roofline-1",
        )  # fmt: skip
        plan = dataclasses.replace(plan, verified=found)
    plan.save(path)
    return path


# --- What it does --------------------------------------------------------------------


def test_measure_follows_a_plan(plain, tmp_path):
    path = write_plan(tmp_path / "plan.json", plain, "every(2)")
    result = good("measure", plain, "--plan", path, "--json")
    measured = json.loads(result.stdout)
    assert (measured["policy"], measured["schedule"]) == (None, "every(2)")
    assert measured["plan"] == str(path) and measured["warnings"] == []
    assert measured["recompute_flops"] == (every(2).forwards(4) - 4) * LAYER
    assert "note" not in result.stderr
    keys = list(json.loads(good("measure", plain, "--json").stdout))
    assert [key for key in measured if key != "plan"] == keys
    heading = good("measure", plain, "--plan", path).stdout.splitlines()[0]
    assert heading == f"{plain} on attached, plan {path}"


def test_measure_in_python_takes_a_plan(plain):
    w = load_workload(plain)
    plan = plan_from("every(2)", w.loss_fn, w.params, w.batch)
    found = jaxckpt.measure(
        w.loss_fn, w.params, w.batch, optimizer=w.optimizer, plan=plan
    )
    assert (found.policy, found.schedule, found.plan) == (None, "every(2)", None)
    assert found.recompute_flops == (every(2).forwards(4) - 4) * LAYER


def test_explain_draws_the_stacks_of_a_plan(stacks, tmp_path):
    rule = {"encoder": "every(2)", "decoder": "save(up)"}
    path = write_plan(tmp_path / "plan.json", stacks, rule, verified="attached")
    shown = good("explain", stacks, "--plan", path).stdout
    assert f"stacks, plan {path}" in shown.replace("\n", "")
    assert "encoder: every(2) on 4 layers" in shown
    assert "decoder: uniform(save(up)) on 3 layers" in shown
    assert "verified on attached" in shown
    assert max(map(len, shown.splitlines())) <= 80
    found = json.loads(good("explain", stacks, "--plan", path, "--json").stdout)
    assert (found["plan"], found["schedule"]) == (str(path), None)
    assert found["stacks"]["encoder"]["kept_inputs"] == [0, 2]
    assert found["stacks"]["decoder"]["num_layers"] == 3
    assert found["recompute_flops"] > 0
    assert "plan" not in json.loads(good("explain", stacks, "--json").stdout)


def test_measure_says_the_schedule_of_each_stack(stacks, tmp_path):
    rule = {"encoder": "every(2)", "decoder": "none"}
    path = write_plan(tmp_path / "plan.json", stacks, rule)
    measured = json.loads(good("measure", stacks, "--plan", path, "--json").stdout)
    assert measured["schedule"] == "encoder: every(2); decoder: none"


def test_compare_adds_the_rows_of_plans(plain, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "other").mkdir()
    one = write_plan(tmp_path / "mine.json", plain, "every(2)")
    two, three = (
        write_plan(tmp_path / name / "plan.json", plain, rule)
        for name, rule in ((".", "full"), ("other", "remat_every(2)"))
    )
    plans = [option for path in (one, two, three, one) for option in ("--plan", path)]
    options = "compare", plain, "--policies", "none", *plans
    rows = json.loads(good(*options, "--json").stdout)["rows"]
    assert {(row["policy"], row["schedule"], row.get("plan")) for row in rows} == {
        ("none", None, None),
        (None, "every(2)", str(one)),
        (None, "full", str(two)),
        (None, "remat_every(2)", str(three)),
    }
    shown = good(*options).stdout
    assert "policy or plan" in shown and f" {one.name} " in shown
    assert f" {two} " in shown and f" {three} " in shown


def test_compare_adds_a_plan_to_the_default_policies(plain, tmp_path):
    (tmp_path / "all.py").write_text(
        WORKLOADS.replace("*, layers", "*, policy=None, layers")
    )
    path = write_plan(tmp_path / "plan.json", plain, "full", ["layers=2"])
    options = f"{tmp_path}/all.py:plain", "--set", "layers=2", "--plan", path
    with helpers.no_optimizations():
        rows = json.loads(good("compare", *options, "--json").stdout)["rows"]
    assert {"none", "full", "dots", None} <= {row["policy"] for row in rows}


def losses(folder):
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_training_under_a_plan_has_the_losses_without_it(tmp_path):
    gpt = "models/gpt.py:tiny"
    settings = ["num_layers=2", "seq=16", "batch=2", "dtype=float32"]
    rule = "Segment(Remat(save(query_proj, 'mlp*'), 2))"
    path = write_plan(tmp_path / "plan.json", gpt, rule, settings, verified="attached")
    sets = [option for setting in settings for option in ("--set", setting)]
    command = "train", gpt, "--steps", 3, *sets
    with helpers.no_optimizations():
        good(*command, "--out", tmp_path / "plain")
        result = good(*command, "--plan", path, "--out", tmp_path / "planned")
    assert result.stdout.splitlines()[0] == f"{gpt}, 3 steps, plan {path}"
    assert "note" not in result.stderr
    planned, plain = losses(tmp_path / "planned"), losses(tmp_path / "plain")
    assert planned == pytest.approx(plain, rel=1e-5) and len(set(plain)) == 3


def test_train_says_that_a_plan_offloads_in_vain(plain, tmp_path):
    path = write_plan(tmp_path / "plan.json", plain, "offload(up)")
    result = good("train", plain, "--steps", 1, "--plan", path)
    assert "offload has no effect" in result.stderr


@pytest.mark.parametrize(
    ("verified", "settings", "note"),
    [
        (None, ["--set", "batch=2"], None),
        ("attached", [], None),
        ("attached", ["--set", "batch=2"], "here (batch float32[2,16] on attached)"),
        ("h100-80gb", [], "batch float32[8,16] on h100-80gb; here (batch float32[8"),
    ],
)
@pytest.mark.parametrize("command", ["measure", "explain", "compare", "train"])
def test_another_shape_or_device_than_verified_is_noted_once(
    command, verified, settings, note, plain, tmp_path
):
    path = write_plan(tmp_path / "plan.json", plain, "full", verified=verified)
    more = {"train": ["--steps", 1], "compare": ["--policies", "none"]}.get(command, [])
    result = good(command, plain, *more, *settings, "--plan", path)
    notes = [line for line in result.stderr.splitlines() if line.startswith("note: ")]
    if note is None:
        assert notes == []
    else:
        assert len(notes) == 1 and note in notes[0]
        assert notes[0].endswith("nothing is verified.")


# --- What is refused -----------------------------------------------------------------

COMMANDS = {
    "measure": ["--json"],
    "explain": ["--json"],
    "compare": ["--policies", "none", "--json"],
    "train": ["--steps", "1"],
}
each_command = pytest.mark.parametrize("command", COMMANDS)


@each_command
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda text: None, "is not a file"),
        (lambda text: text[:-40], "is not JSON"),
        (lambda text: "[" * 10**6, "nests too deep"),
        (lambda text: text * 5000, "is longer than 1048576 bytes"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "`format` 2"),
        (lambda text: text.replace('"layers": 4', '"layers": 9'), "was edited"),
        (lambda text: text.replace('"replace"', '"replce"'), "`replace`"),
    ],
    ids=["missing", "cut", "deep", "large", "format", "edited", "field"],
)
def test_bad_plan_files_are_one_message_and_status_2(
    command, change, expected, plain, tmp_path
):
    path = write_plan(tmp_path / "plan.json", plain, "every(2)")
    text = change(path.read_text())
    path.unlink() if text is None else path.write_text(text)
    # The workload is not even looked at.
    message = error_of(run(command, "nowhere.py:x", *COMMANDS[command], "--plan", path))
    assert expected in message and str(path) in message


@each_command
def test_another_depth_is_refused_before_anything_compiles(
    command, plain, tmp_path, monkeypatch
):
    monkeypatch.setattr("jaxckpt.xla.measure.compile_for", None)
    monkeypatch.setattr("jaxckpt.training.loop.make_train_step", None)
    path = write_plan(tmp_path / "plan.json", plain, "every(2)", ["layers=3"])
    arguments = command, plain, *COMMANDS[command], "--plan", path
    assert "made for another program" in error_of(run(*arguments))


@pytest.mark.parametrize("command", ["measure", "explain", "train"])
@pytest.mark.parametrize("option", [("--policy", "none"), ("--schedule", "every(2)")])
def test_plan_goes_alone(command, option, tmp_path):
    path = tmp_path / "plan.json"
    Plan((("layers", every(2)),)).save(path)
    arguments = command, "nowhere.py:x", *COMMANDS[command], "--plan", path, *option
    message = error_of(run(*arguments))
    assert "without `--policy` and `--schedule`" in message and str(path) in message
