"""Plan files: what goes in comes out, and whatever else is in one is refused."""

import copy
import dataclasses
import inspect
import json
import os
import pathlib
import random
import time

import chex
import foreign
import helpers
import jax
import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt import Keep, Remat, Segment, every, full, offload, save, tree
from jaxckpt.errors import PlanError
from jaxckpt.loading import load_workload
from jaxckpt.plan import Plan, plan_from
from jaxckpt.plan_fields import parse_json
from jaxckpt.plan_lines import from_lines, to_lines
from jaxckpt.plan_verified import (
    ArgumentShapes,
    PlanFigures,
    Verified,
    argument_shapes,
)

ODD_NAMES = save("a,b", 'say "x"', "it's", "x|y(", "mlp*", "é") | offload("c")
LONG = save(*(f"projection_{i}" for i in range(9))) | offload("out_proj") - save("b")
SCHEDULES = helpers.SCHEDULES | {
    "odd names": tree(Segment([Keep(2), Remat(ODD_NAMES, 4)], policy=LONG), Keep(1)),
    "long": jaxckpt.remat_every(3, LONG),
    "unfilled": tree(Remat(None, 7)),
    "deep": tree(Segment([Segment([Segment([Segment(Keep(3)), Keep(2)])]), Keep(2)])),
}
VERIFIED = Verified(
    device="h100-80gb",
    budget_bytes=70 * 2**30,
    predicted=PlanFigures(60 * 2**30, 1.25),
    compiled=PlanFigures(61 * 2**30, None),
    host_bytes=2**30,
    forward_flops=4 * 10**19,
    recompute_flops=10**19,
    lower_bound_seconds=1.0,
    gap=0.25,
    solve_seconds=0.0,
    compiles=2,
    argument_shapes=ArgumentShapes(("tokens int32[4,9]",), "00ff"),
    versions=(("plugin", "cuda12 0.10.2"), ("jax", "0.10.2")),
    xla_flags="--xla_disable_hlo_passes=rematerialization",
    cost_model="roofline-1",
)
RULES = ("encoder", every(2)), ("decoder", tree(Remat(save("up"), 3)))
PLAN = Plan(RULES, None, "replace", (4, 3), "0123456789abcdef", VERIFIED)
DOCUMENT = json.loads(PLAN.to_json())


# --- What goes in comes out ----------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_come_back(name):
    schedule = SCHEDULES[name]
    plan = Plan((("layers", schedule),), depths=(7,))
    text = plan.to_json()
    found = Plan.from_json(text)
    if isinstance(schedule, helpers.Mixed):  # it has no text, so that its tree is kept
        assert found.schedule == tree(*schedule.nodes(7))
    else:
        assert found == plan
    assert found.schedule.nodes(7) == schedule.nodes(7)
    assert found.to_json() == text


@pytest.mark.parametrize("name", SCHEDULES)
def test_lines_of_a_schedule_are_short(name):
    lines = to_lines(SCHEDULES[name], 7)
    assert max(map(len, lines)) <= 64
    assert from_lines(lines).nodes(7) == SCHEDULES[name].nodes(7)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"verified": None, "depths": (), "fingerprint": None},
        {"form": "scan", "existing": "keep"},
        {"verified": dataclasses.replace(VERIFIED, lower_bound_seconds=None, gap=None)},
    ],
    ids=lambda change: ",".join(change),
)
def test_plans_come_back(change):
    plan = dataclasses.replace(PLAN, **change)
    found = Plan.from_json(plan.to_json())
    assert found == plan and hash(found) == hash(plan) and str(found) == str(plan)


def test_file_reads_and_compares_well(tmp_path):
    plan = Plan((("layers", tree(Remat(save("up"), 2), Keep(2))),), depths=(4,))
    plan.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    head, checksum = text.split('  "checksum"')
    assert checksum.startswith(': "sha256:') and checksum.endswith('"\n}\n')
    assert head.replace(DOCUMENT["jax"], "0.10.*") == (
        '{\n  "format": 1,\n  "jax": "0.10.*",\n  "program": {\n'
        '    "fingerprint": null,\n    "stacks": [\n      {\n'
        '        "name": "layers",\n        "layers": 4,\n        "schedule": [\n'
        '          "Remat(save(up), 2),",\n          "Keep(2)"\n        ]\n'
        '      }\n    ]\n  },\n  "form": null,\n  "existing": "replace",\n'
        '  "verified": null,\n'
    )
    assert str(tmp_path) not in text and time.strftime("%Y") not in head


def test_fitted_plan_says_what_was_found():
    assert PLAN.predicted.step_seconds == 1.25 and PLAN.compiled == VERIFIED.compiled
    assert (PLAN.forward_flops, PLAN.recompute_flops) == (4 * 10**19, 10**19)
    assert PLAN.gap == 0.25
    for part in (
        "verified on h100-80gb for tokens int32[4,9], budget 70.00 GiB",
        "61.00 GiB compiled, 60.00 GiB predicted, 1.00 GiB on the host",
        "? compiled, 1.25 s predicted; at least 1 s, gap 25.0 %",
        "4e+19 FLOP forward, 25.0 % of it again",
    ):
        assert part in str(PLAN)


@pytest.mark.parametrize(
    "name", ["predicted", "compiled", "forward_flops", "recompute_flops", "gap"]
)
def test_plan_that_was_not_fitted_says_so(name):
    plan = dataclasses.replace(PLAN, verified=None)
    with pytest.raises(PlanError, match="was not fitted.*jaxckpt.fit"):
        getattr(plan, name)
    assert "verified" not in str(plan)


def test_argument_shapes_tell_batches_and_parameters_apart():
    batch = {"tokens": jnp.zeros((4, 9), "int32"), "mask": jnp.zeros(4, bool)}
    one = argument_shapes([jnp.ones(3)], batch)
    assert one.batch == ("mask bool[4]", "tokens int32[4,9]")
    abstract = jax.eval_shape(lambda: ([jnp.ones(3)], batch))
    assert argument_shapes(*abstract) == one
    assert argument_shapes([jnp.ones(4)], batch).parameters != one.parameters
    assert argument_shapes([], jnp.ones((2, 3))).batch == ("float32[2,3]",)


# --- What is refused -----------------------------------------------------------------

DROP = "(not there)"


def edited(path, value):
    """Return the document with a value replaced, added or dropped."""
    document = copy.deepcopy(DOCUMENT)
    *outer, last = path
    place = document
    for key in outer:
        place = place[key]
    if value is DROP:
        del place[last]
    else:
        place[last] = value
    return json.dumps(document)


NAME = ("program", "stacks", 0, "name")
LAYERS = ("program", "stacks", 0, "layers")
LINES = ("program", "stacks", 0, "schedule")
BUDGET = ("verified", "budget_bytes")
PEAK = ("verified", "compiled", "peak_bytes")
SECONDS = ("verified", "predicted", "step_seconds")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), DROP, "no key `format`. It must have: format, jax"),
        (("format",), 2, "`format` 2, and this version of jaxckpt reads 1"),
        (("format",), True, "`format` is `true`"),
        (("format",), "1", "`format` is `\"1\"`"),
        (("jax",), "0.9.*", "with jax 0.9.*, and this is jax .*install jax 0.9"),
        (("jax",), "new", "`jax` is `\"new\"`.*series of JAX's versions"),
        (("extra",), 1, "unknown key `\"extra\"`. Valid: checksum"),
        (("verified", "budgt_bytes"), 1, "`verified`. Did you mean `budget_bytes`"),
        (BUDGET, DROP, "no key `budget_bytes` in `verified`"),
        (("program",), [], "`program` is a list. It must be an object"),
        (("program", "stacks"), [], "list of at least 1"),
        (("program", "stacks"), {}, "`program.stacks` is an object"),
        (("program", "fingerprint"), 5, "`program.fingerprint` is `5`"),
        (NAME, "other", "was edited"),
        (NAME, "a\nb", "stacks.0..name` is `\"a.nb\"`.*without line breaks"),
        (NAME, "x" * 2000, "at most 1000 characters"),
        (NAME, "decoder", "rules for the stacks .'decoder', 'decoder'"),
        (LAYERS, True, "stacks.0..layers` is `true`. It must be a whole number"),
        (LAYERS, 4.0, "`4.0`. It must be a whole number, written without a point"),
        (LAYERS, 0, "from 1 to 100000"),
        (LAYERS, 10**18, "from 1 to 100000"),
        (LAYERS, None, "Either every stack must have"),
        (("program", "stacks", 1, "layers"), 4, "holds 3 layers, and the stack 4"),
        (LINES, "every(2)", "schedule` is `\"every.2.\"`. It must be a list"),
        (LINES, [], "at least 1"),
        (LINES, [7], "schedule.0.` is `7`"),
        (LINES, ["evry(2)"], "`evry`.*Did you mean `every`"),
        (LINES, ["every(2", ""], "does not close"),
        (LINES, ["uniform(save(up)", "| none)"], "`none`"),
        (LINES, ["Segment("] * 60 + ["Keep(4)"] + [")"] * 60, "at most 50 levels"),
        (LINES, ["Keep(1),"] * 40_000, "longer than 65536 characters"),
        (LINES, ["9999 * Segment(9999 * Segment(Keep(1)))"], "over 10000 nodes"),
        (LINES, ["x" * 990] * 60, "`x.* \\.\\.\\. "),
        (("form",), "scaned", "`form` is `\"scaned\"`. Did you mean `scan`"),
        (("existing",), None, "`existing` is `null`. Valid: keep, replace"),
        (("verified",), 3, "`verified` is `3`"),
        (("verified", "device"), ["h100"], "`verified.device` is a list"),
        (BUDGET, -1, "`verified.budget_bytes` is `-1`.*from 1 to"),
        (BUDGET, 2**63, "from 1 to 9223372036854775807"),
        (PEAK, float("nan"), "`verified.compiled.peak_bytes` is `NaN`"),
        (PEAK, None, "peak_bytes` is `null`"),
        (SECONDS, float("nan"), "predicted.step_seconds` is `NaN`.*from 0 to 1e.30"),
        (SECONDS, float("inf"), "`Infinity`"),
        (SECONDS, -float("inf"), "`-Infinity`"),
        (SECONDS, -0.5, "`-0.5`"),
        (SECONDS, True, "`true`. It must be a number"),
        (SECONDS, "1.0", "It must be a number"),
        (("verified", "versions"), [["jax", "1"]], "`verified.versions` is a list"),
        (("verified", "versions", "jax"), 3, "`verified.versions.jax` is `3`"),
        (("verified", "argument_shapes", "batch", 0), 1, "batch.0.` is `1`"),
        (("checksum",), None, "`checksum` is `null`"),
        (("checksum",), "sha256:0", "was edited"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_each_bad_field_is_one_clear_error(path, value, message):
    began = time.perf_counter()
    with pytest.raises(PlanError, match=message) as caught:
        Plan.from_json(edited(path, value))
    assert str(caught.value).startswith("The text")
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 900
    assert time.perf_counter() - began < 5


WHOLE = json.dumps(DOCUMENT)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON.*line 1, column 1.*Make the plan again"),
        (WHOLE[:-1], "is not JSON.*Was it cut off"),
        (WHOLE[: len(WHOLE) // 2], "is not JSON"),
        (WHOLE + "{}", "Extra data"),
        ("\ufeff" + WHOLE, "BOM"),
        ("[1]", "what it holds is a list. It must be an object"),
        ("null", "what it holds is `null`"),
        (WHOLE.replace('"form"', '"format": 1, "form"'), 'key `"format"` twice'),
        (WHOLE.replace('"host', '"device": "a", "host'), 'key `"device"` twice'),
        ("[" * 2**19, "nests too deep"),
        ('{"format":' * 10**5, "nests too deep"),
        ("[" * 10**7, "longer than 1048576 bytes"),
        (WHOLE.replace("1.25", "1e999"), "`Infinity`"),
        (WHOLE.replace("1.25", "1" * 5000), "`verified.*step_seconds` is `1000"),
        (WHOLE.replace("1.25", "-" + "1" * 5000), "`-1000.*from 0 to"),
    ],
    ids=range(15),
)
def test_what_is_no_plan_is_refused_at_once(text, message):
    began = time.perf_counter()
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text)
    assert time.perf_counter() - began < 5


def test_text_must_be_text():
    with pytest.raises(PlanError, match="of type `bytes`"):
        inspect.unwrap(parse_json)(b"{}", "It")


def test_mutated_files_give_a_plan_or_a_clear_error():
    rng = random.Random(0)
    for _ in range(300):
        text = list(WHOLE)
        for _ in range(rng.randint(1, 3)):
            i = rng.randrange(len(text))
            text[i : i + rng.randint(0, 3)] = rng.choice(['"', "}", "0", "-", "é", ","])
        try:
            found = Plan.from_json("".join(text))
        except PlanError as error:
            assert str(error)
        else:
            assert found == PLAN


def test_an_edit_is_noticed_and_can_be_meant():
    text = edited(LINES, ["every(1)"])
    with pytest.raises(PlanError, match="was edited.*load_plan.path, edited=True"):
        Plan.from_json(text)
    found = Plan.from_json(text, edited=True)
    assert found.verified is None and dict(found.rules)["encoder"] == every(1)
    assert Plan.from_json(found.to_json()) == found
    assert Plan.from_json(WHOLE, edited=True) == PLAN
    with pytest.raises(PlanError, match="`evry`"):
        Plan.from_json(edited(LINES, ["evry(1)"]), edited=True)


def test_layout_is_no_edit():
    backwards = json.dumps(dict(reversed(DOCUMENT.items())), indent=7)
    assert Plan.from_json(backwards.replace("\n", "\r\n")) == PLAN


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan((("layers", helpers.Mixed()),)), "`mixed` is a schedule without a text"),
        (Plan((("a\nb", full()),)), "without line breaks"),
        (
            dataclasses.replace(PLAN, verified=dataclasses.replace(VERIFIED, gap=1e99)),
            "The plan: `verified.gap` is `1e.99`",
        ),
    ],
)
def test_what_could_not_be_read_again_is_not_written(plan, message, tmp_path):
    with pytest.raises(PlanError, match=message):
        plan.save(tmp_path / "plan.json")
    assert list(tmp_path.iterdir()) == []


# --- Files ---------------------------------------------------------------------------


def test_plans_are_saved_and_loaded(tmp_path):
    for path in (tmp_path / "one.json", str(tmp_path / "two")):
        PLAN.save(path)
        assert Plan.load(path) == jaxckpt.load_plan(path) == PLAN
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.json", "two"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_killed_save_leaves_the_old_file(step, tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    PLAN.save(path)

    def killed(*args):
        raise KeyboardInterrupt

    owner = os if step == "fsync" else pathlib.Path
    monkeypatch.setattr(owner, step, killed)
    with pytest.raises(KeyboardInterrupt):
        dataclasses.replace(PLAN, form="scan").save(path)
    assert Plan.load(path) == PLAN and list(tmp_path.iterdir()) == [path]


def test_link_to_a_plan_stays_a_link(tmp_path):
    link = tmp_path / "latest.json"
    link.symlink_to(tmp_path / "plan.json")
    PLAN.save(link)
    assert link.is_symlink() and Plan.load(tmp_path / "plan.json") == PLAN


@pytest.mark.parametrize("name", ["nowhere/plan.json", "", "file/plan.json", "a\0b"])
def test_files_that_cannot_be_written_are_said(name, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="cannot be written: .*Give the name of a file"):
        PLAN.save(f"{tmp_path}/{name}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "not a file. Give the path of a plan file"),
        (b"\xff\xfe{}", "is not UTF-8 text .byte 0."),
        (b"", "is not JSON"),
        (WHOLE.encode()[:-9], "is not JSON"),
        (b" " * 2**21 + WHOLE.encode(), "longer than 1048576 bytes"),
    ],
    ids=["missing", "utf-16", "empty", "cut", "large"],
)
def test_files_that_are_no_plans_are_named(content, message, tmp_path):
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PlanError, match=f"^`{path}` .*{message}"):
        jaxckpt.load_plan(path)


def test_what_is_no_file_is_not_read(tmp_path):
    for path in (tmp_path, "/dev/zero", "a\0b"):
        with pytest.raises(PlanError, match="is not a file|cannot be read"):
            jaxckpt.load_plan(path)


# --- Applying what was loaded --------------------------------------------------------


def loaded(plan, folder):
    plan.save(folder / "plan.json")
    return jaxckpt.load_plan(folder / "plan.json")


def check_gradients(plan, fn, *args, has_aux=False):
    with helpers.no_optimizations():
        planned, plain = (
            helpers.interpret(jax.value_and_grad(f, has_aux=has_aux), *args)
            for f in (plan.apply(fn), fn)
        )
    chex.assert_trees_all_close(planned, plain, rtol=1e-5, atol=1e-5)


def test_loaded_plan_gives_equal_gradients_for_our_gpt(tmp_path):
    settings = ["num_layers=3", "seq=8", "batch=2", "dtype=float32"]
    workload = load_workload("models/gpt.py:tiny", settings)
    rule = "Segment(Remat(save(query_proj, 'mlp*'), 2)), Keep(1)"
    made = plan_from(rule, workload.loss_fn, workload.params, workload.batch)
    plan = loaded(made, tmp_path)
    assert plan == made
    with helpers.no_optimizations():
        params = jax.jit(workload.init)(jax.random.key(0))
    batch = {"tokens": jax.random.randint(jax.random.key(1), (2, 9), 0, 256)}
    check_gradients(plan, workload.loss_fn, params, batch)


@pytest.mark.parametrize("name", ["equinox_transformer", "linen_scan"])
def test_loaded_plan_gives_equal_gradients_for_other_programs(name, tmp_path):
    case = foreign.PROGRAMS[name]()
    plan = loaded(plan_from("every(2)", case.fn, *case.args), tmp_path)
    check_gradients(plan, case.fn, *case.args, has_aux=case.has_aux)


def test_loaded_plan_is_refused_for_another_depth_and_program(tmp_path):
    settings = ["num_layers=3", "seq=8", "batch=2"]
    one = load_workload("models/gpt.py:tiny", settings)
    plan = loaded(plan_from("every(2)", one.loss_fn, one.params, one.batch), tmp_path)
    deeper = load_workload("models/gpt.py:tiny", ["num_layers=4", *settings[1:]])
    other = load_workload("models/llama.py:tiny", settings)
    for workload in (deeper, other):
        with pytest.raises(PlanError, match="made for another program than"):
            jax.eval_shape(
                plan.apply(workload.loss_fn), workload.params, workload.batch
            )
