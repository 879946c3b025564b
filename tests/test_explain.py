"""`explain`: rows, notes about what does nothing or harm, and the picture."""

import io
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from rich.console import Console

import jaxckpt
from jaxckpt import _jax, explain, trace
from jaxckpt.devices import get_device
from jaxckpt.policy import parse_policy
from jaxckpt.report import explain as explain_module
from jaxckpt.report.explain import explain_workload
from jaxckpt.report.explain_tables import holder_table
from jaxckpt.schedule import parse_schedule
from jaxckpt.workload import Workload
from jaxckpt.xla.peak import Holder

LAYERS, ROWS, WIDTH = 4, 4096, 64
STACK = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
EXPERTS = jax.ShapeDtypeStruct((WIDTH, 8, 8), jnp.float32)
W = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
VALUE = ROWS * WIDTH * 4  # bytes: 1 MiB


def layer(w, x):
    x = checkpoint_name(x, "layer_input")
    with jax.named_scope("mixer"):
        h = checkpoint_name(x @ w, "hidden")
    h = checkpoint_name(jnp.sin(h) @ w, "middle")
    with jax.named_scope("head"):
        y = jnp.sin(h) @ w
    return x + checkpoint_name(jnp.cos(y) @ w, "last")


def stack(fn):
    return lambda ws, x: lax.scan(lambda x, w: (fn(w, x), None), x, ws)[0]


def rematted(policy, fn=layer):
    return jaxckpt.remat(fn, policy=policy)


def explained(fn, *args, label="program"):
    return explain(trace(fn, *args, argnums=None), label)


def rendered(explanation, width=80):
    file = io.StringIO()
    explanation.render(Console(file=file, width=width))
    return file.getvalue()


PROGRAMS = {
    "plain": (layer, W),
    "plain stack": (stack(layer), STACK),
    "full": (stack(rematted("full")), STACK),
    "names": (stack(rematted("save(hidden, middle)")), STACK),
    "host": (stack(rematted("save(hidden) | offload(middle)")), STACK),
    "dots": (stack(rematted("dots")), STACK),
    "single layer": (rematted("save(middle)"), W),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_rows_sum_to_the_residual_bytes(name):
    fn, w = PROGRAMS[name]
    explanation = explained(fn, w, X)
    totals = {"save": 0, "offload": 0}
    for row in explanation.rows:
        totals[row.decision] += row.total_bytes
        assert row.bytes * row.layers == row.total_bytes
    assert totals["save"] == explanation.graph.residual_bytes
    assert (totals["offload"] > 0) == (name == "host")
    assert explanation.as_json()["residual_bytes"] == totals["save"]
    sizes = [row.total_bytes for row in explanation.rows]
    assert sizes == sorted(sizes, reverse=True)


def test_a_row_holds_name_bytes_layers_decision_and_line():
    rows = {row.name: row for row in explained(*PROGRAMS["host"], X).rows}
    assert set(rows) == {"layer_input", "hidden", "middle"} or set(rows) == {
        "carry (layer input)",
        "hidden",
        "middle",
    }
    for name, decision in (("hidden", "save"), ("middle", "offload")):
        row = rows[name]
        assert (row.bytes, row.layers, row.decision) == (VALUE, LAYERS, decision)
        assert row.total_bytes == LAYERS * VALUE
        assert "test_explain.py" in row.source


def test_equal_names_of_unrolled_layers_share_a_row():
    one = rematted("save(hidden)")
    rows = explained(lambda w, x: one(w, one(w, one(w, x))), W, X).rows
    (hidden,) = [row for row in rows if row.name == "hidden"]
    assert (hidden.bytes, hidden.layers, hidden.total_bytes) == (VALUE, 3, 3 * VALUE)


def test_the_json_is_plain_and_says_what_runs_again():
    data = json.loads(json.dumps(explained(*PROGRAMS["names"], X).as_json()))
    (region,) = data["regions"]
    assert region["times"] == LAYERS
    assert region["kept"] == ["hidden", "middle"]
    assert region["recomputed"] == ["head"]
    product = 2 * ROWS * WIDTH * WIDTH
    assert data["forward_flops"] == LAYERS * 4 * product
    assert data["recompute_flops"] == LAYERS * product


# Case 1: a name that nothing carries, in a policy that JAX takes without a word.
def test_a_name_that_no_value_has_is_noted():
    policy = jax.checkpoint_policies.save_only_these_names("hiden", "middle")
    notes = explained(stack(jax.checkpoint(layer, policy=policy)), STACK, X).notes
    (note,) = [n for n in notes if "has the name `hiden`" in n]
    assert "Did you mean `hidden`" in note


# Case 2: a name on what nothing reads.
def test_a_name_that_nothing_reads_is_noted():
    explanation = explained(*PROGRAMS["full"], X)
    (note,) = [n for n in explanation.notes if "`last`" in n]
    assert "would save nothing" in note
    assert "hidden" not in note and "middle" not in note and "layer_input" not in note
    (region,) = explanation.as_json()["regions"]
    assert region["names_without_effect"] == ["last"]


def test_keeping_a_name_that_nothing_reads_is_refused_with_the_others():
    with pytest.raises(jaxckpt.PolicyError, match="keeping it saves nothing") as caught:
        explained(rematted("save(last)"), W, X).rows  # noqa: B018
    assert "layer's input" in str(caught.value)
    assert "hidden, layer_input, middle" in str(caught.value)


def dense_and_experts(weights, x):
    w, experts = weights
    y = jnp.sin(x @ w)
    y = jnp.einsum("...e,ef->...f", y, w).reshape(WIDTH, -1, 8)
    y = jnp.sin(jax.vmap(jnp.matmul)(y, experts))
    return x + jax.vmap(jnp.matmul)(y, experts).reshape(x.shape)


def experts_only(experts, x):
    y = jax.vmap(jnp.matmul)(x.reshape(WIDTH, -1, 8), experts)
    return x + jax.vmap(jnp.matmul)(jnp.sin(y), experts).reshape(x.shape)


# Case 6: weights with a batch dimension.
@pytest.mark.parametrize(
    ("fn", "weights"),
    [(dense_and_experts, (W, EXPERTS)), (experts_only, EXPERTS)],
)
@pytest.mark.parametrize(
    "wrap", [jax.checkpoint, jaxckpt.remat], ids=["jax.checkpoint", "jaxckpt.remat"]
)
def test_products_of_experts_that_a_policy_passes_over_are_noted(fn, weights, wrap):
    if wrap is jax.checkpoint and _jax.remat3_enabled():
        pytest.skip("JAX_REMAT3 asks a bare policy about names only")
    policy = jaxckpt.save_dots(batch_dims=False)
    explanation = explained(wrap(fn, policy=policy), weights, X)
    (region,) = explanation.as_json()["regions"]
    (skipped,) = region["skipped_dots"]
    assert (skipped["primitive"], skipped["bytes"]) == ("dot_general", VALUE)
    (note,) = [n for n in explanation.notes if "products of batches" in n]
    assert "1.00 MiB" in note and "`save_dots()` keeps them" in note


@pytest.mark.parametrize("policy", ["dots", "save_everything()"])
def test_products_of_experts_that_are_kept_are_not_noted(policy):
    fn = rematted(policy, dense_and_experts)
    explanation = explained(fn, (W, EXPERTS), X)
    assert explanation.as_json()["regions"][0]["skipped_dots"] == []
    assert not any("products of batches" in note for note in explanation.notes)


def unrolled(fn):
    return lambda w, x: fn(w, fn(w, fn(w, fn(w, x))))


# Case 9: remat that saves nothing, and one that does.
@pytest.mark.parametrize(
    ("fn", "w", "warned"),
    [
        (rematted("full", unrolled(layer)), W, True),
        (rematted("full", lambda w, x: x @ w), W, True),
        (stack(rematted("full", lambda w, x: x @ w)), STACK, True),
        (unrolled(rematted("full")), W, False),
        (stack(rematted("full")), STACK, False),
        (stack(rematted("save(hidden)")), STACK, False),
        (unrolled(layer), W, False),
    ],
)
def test_remat_that_saves_nothing_is_noted(fn, w, warned):
    found = [
        n for n in explained(fn, w, X).notes if n.startswith("Remat saves nothing")
    ]
    assert len(found) == warned
    assert all("per layer is best" in note for note in found)


# Case 10: remat outside the scan over layers.
@pytest.mark.parametrize(
    ("fn", "warned"),
    [
        (jax.checkpoint(stack(layer)), True),
        (rematted("full", stack(layer)), True),
        (jax.checkpoint(jax.jit(stack(layer))), True),
        (stack(rematted("full")), False),
        (stack(layer), False),
    ],
)
def test_remat_round_a_scan_of_layers_is_noted(fn, warned):
    notes = explained(fn, STACK, X).notes
    found = [n for n in notes if "round a scan over layers" in n]
    assert len(found) == warned
    assert all("Put it inside the scan" in note for note in found)


def test_a_scan_inside_a_layer_that_is_no_stack_is_not_noted():
    def chunked(w, x):
        chunks = x.reshape(4, -1, WIDTH)
        body = lambda total, chunk: (total + jnp.sin(chunk @ w).sum(), None)  # noqa: E731
        return x * lax.scan(body, 0.0, jnp.cos(chunks))[0]

    notes = explained(stack(rematted("full", chunked)), STACK, X).notes
    assert not any("round a scan over layers" in note for note in notes)


def test_the_picture_shows_what_is_kept_and_what_runs_again_in_order():
    text = rendered(explained(*PROGRAMS["host"], X, label="gpt, [x]"))
    assert text.splitlines()[0] == "gpt, [x]"
    assert f"remat x {LAYERS}" in text
    assert "* hidden  1.00 MiB" in text
    assert "h middle  1.00 MiB" in text
    assert "runs again, in order: head" in text
    text = rendered(explained(*PROGRAMS["full"], X))
    assert "runs again, in order: hidden > middle > head" in text


def test_the_picture_without_remat_says_so():
    text = rendered(explained(*PROGRAMS["plain stack"], X))
    assert "No remat: every residual stays, nothing runs again." in text
    assert "run again: 0 TFLOP" in text


def test_the_table_shows_layers_totals_place_and_line():
    lines = rendered(explained(*PROGRAMS["host"], X)).splitlines()
    (hidden,) = [line.split() for line in lines if line.startswith("hidden")]
    (middle,) = [line.split() for line in lines if line.startswith("middle")]
    assert hidden[:-1] == ["hidden", "1.00", "4", "4.00", "device"]
    assert middle[:-1] == ["middle", "1.00", "4", "4.00", "host"]
    assert hidden[-1].startswith("test_explain.py:") and hidden[-1] < middle[-1]
    assert any("kept on the device: 8.00 MiB" in line for line in lines)


def test_equal_names_of_different_lines_have_rows_of_their_own():
    def two_lines(w, x):
        x = checkpoint_name(jnp.sin(x @ w), "twice")
        x = checkpoint_name(jnp.cos(x @ w), "twice")
        return x @ w

    rows = explained(two_lines, W, X).rows
    twice = [row for row in rows if row.name == "twice"]
    assert [(row.layers, row.total_bytes) for row in twice] == [(1, VALUE)] * 2
    assert len({row.source for row in twice}) == 2


def many_values(w, x):
    for i in range(100):
        x = checkpoint_name(2 * x[:WIDTH], f"small_{i}")
        x = x * x
    return jnp.sum(x) + jnp.sum(jnp.sin(w @ w))


def test_what_is_small_is_summed_up_in_one_row():
    big = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    lines = rendered(explained(many_values, big, X)).splitlines()
    (small,) = [line.split() for line in lines if "small ones" in line]
    rows = explained(many_values, big, X).rows
    limit = sum(row.total_bytes for row in rows) / 200
    rest = [row.total_bytes for row in rows if row.total_bytes < limit]
    assert small[0] == str(len(rest)) and len(rest) >= 100
    assert small[-1] == f"{sum(rest) / 2**20:,.2f}"


def test_operations_of_unknown_work_are_noted():
    call = jax.ffi.ffi_call("jaxckpt_no_such_call", X)
    loss = lambda w, x: jnp.sum(x @ w + call(lax.stop_gradient(x)))  # noqa: E731
    explanation = explained(loss, W, X)
    (note,) = [n for n in explanation.notes if n.startswith("Not priced")]
    assert "`ffi_call`" in note and "runs once" in note and "2.00 MiB" in note
    unknown = explanation.as_json()["unknown"]
    assert unknown == {"ffi_call": {"times": 1, "bytes": 2 * VALUE}}
    assert explained(layer, W, X).as_json()["unknown"] == {}


def long_names(w, x):
    for i in range(6):
        with jax.named_scope("a_module_with_a_very_long_name/and_another_one_in_it"):
            x = checkpoint_name(jnp.sin(x @ w), f"a_quite_long_name_of_a_value_{i}")
    return x


@pytest.mark.parametrize("policy", ["full", "save(a_quite*)", "dots", None])
def test_no_line_is_longer_than_80_columns(policy):
    fn = rematted(policy, long_names)
    text = rendered(explained(fn, W, X, label="models/" + "a" * 40 + ".py:x"))
    assert max(map(len, text.splitlines())) <= 80
    for name in ("a_quite_long_name_of_a_value_0", "a_quite_long_name_of_a_value_4"):
        assert policy is None or name in text.replace("\n", "")


def explained_workload(policy=None, schedule=None, layers=10, **options):
    loss = lambda params, batch, rng=None: jnp.sum(layer(params, batch))  # noqa: E731
    workload = Workload("mlp", loss, W, X, layers=layers, optimizer=optax.adam(1e-3))
    return explain_workload(
        lambda: workload,
        policy=None if policy is None else parse_policy(policy),
        schedule=None if schedule is None else parse_schedule(schedule),
        device=get_device("attached"),
        **options,
    )


def test_who_holds_memory_at_the_peak_is_shown():
    explanation = explained_workload(peak=True)
    text = rendered(explanation)
    _, _, text = text.partition("who holds memory at the peak on attached: ")
    assert text.startswith(f"{explanation.peak.bytes / 2**20:,.2f} MiB")
    lines = [line for line in text.splitlines() if "%" in line]
    shares = [float(line.partition(" %")[0].split()[-1]) for line in lines]
    assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))
    state = [line.split()[0] for line in lines if line.split()[-1] == "argument"]
    assert len(state) == len(set(state)) and "batch" in state
    found = json.loads(json.dumps(explanation.as_json()))["holders"]
    assert sum(holder["bytes"] for holder in found) == explanation.peak.bytes
    assert {"argument", "kept"} <= {holder["kind"] for holder in found}


def test_nothing_is_compiled_unless_asked(monkeypatch):
    monkeypatch.setattr(explain_module, "compile_for", None)
    explanation = explained_workload()
    assert explanation.peak is None and explanation.as_json()["holders"] is None
    assert "who holds memory" not in rendered(explanation)


def test_the_stages_are_shown_when_asked_for():
    assert "bytes across its start" in rendered(explained_workload(stages=True))
    assert "bytes across its start" not in rendered(explained_workload())


HOLDERS = (
    Holder(600, "argument", "state.params['a_quite_long_name']['kernel']", 1, ""),
    Holder(300, "kept", "Model/layers/Block_0/normalization/convert_element_type", 24,
           "project/a_package/normalization.py:1234 (Layer.__call__)"),
    Holder(100, "argument", "state.opt_state[0].mu['a']", 1, ""),
    Holder(50, "argument", "state.opt_state[0].nu['a']", 1, ""),
    Holder(40, "recomputed", "x" * 60, 1, "f.py:1 (f)"),
    Holder(1, "rest", "gaps between buffers", 1, ""),
    Holder(1, "other", "copy s32[]", 1, ""),
)  # fmt: skip


def test_the_table_of_holders_joins_trees_and_what_is_small():
    file = io.StringIO()
    Console(file=file, width=80).print(holder_table(HOLDERS))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if "%" in line]
    assert rows[0] == ["state.params", "0.00", "54.9", "%", "argument"]
    assert rows[2] == ["state.opt_state", "0.00", "13.7", "%", "argument"]
    assert rows[-1] == ["2", "small", "ones", "0.00", "0.2", "%"]
    assert len(rows) == 5
    assert rows[1][-1] == "normalization.py:123"  # the rest on the next line


def test_a_small_row_that_is_alone_is_not_summed_up():
    file = io.StringIO()
    Console(file=file, width=80).print(holder_table(HOLDERS[:-1]))
    assert "small ones" not in file.getvalue()
    assert "gaps between buffers" in file.getvalue()


@pytest.mark.parametrize(
    ("policy", "schedule", "heading", "title"),
    [
        ("full", None, "mlp, policy save_nothing()", "full on 10 layers"),
        ("save(hidden)", None, "mlp, policy save(hidden)", "uniform(save(hidden)) on"),
        (None, "every(4)", "mlp, schedule every(4)", "every(4) on 10 layers"),
        ("save(hidden)", "remat_every(4)",
         "mlp, policy save(hidden), schedule remat_every(4)",
         "remat_every(4, save(hidden)) on 10 layers"),
    ],
)  # fmt: skip
def test_the_picture_of_the_schedule_stands_at_the_top(
    policy, schedule, heading, title
):
    lines = rendered(explained_workload(policy, schedule)).splitlines()
    assert lines[0] == heading
    assert lines[1].startswith(title)
    assert lines[2].startswith("  forward   ")
    assert max(map(len, lines)) <= 80


def test_without_rule_or_depth_there_is_no_picture_of_a_schedule():
    for explanation in (
        explained_workload(),
        explained_workload("full", layers=None),
        explained_workload(schedule="every(2)", layers=None),
    ):
        assert explanation.as_json()["schedule"] is None
        assert "forward   " not in rendered(explanation)
    assert rendered(explained_workload()).splitlines()[0] == "mlp, policy none"


@pytest.mark.parametrize(
    ("policy", "schedule", "expected"),
    [
        (None, "every(4)", ([0, 4, 8], [[8, 9], [4, 7], [0, 3]], 20)),
        ("dots", None, (list(range(10)), [[i, i] for i in range(9, -1, -1)], 20)),
        ("full", "remat_every(5)", ([0, 5], [[5, 5], [0, 0]], 12)),
        (None, "none", ([], [], 10)),
        # The outer segment keeps an input only: nothing runs to reach it.
        (None, "Segment(Segment(Keep(3))), Keep(7)", ([0], [[0, 2]], 13)),
        (None, "Segment(Keep(3), policy=save(hidden)), Keep(7)", ([0], [[0, 2]], 13)),
        (None, "Segment(2 * Segment(Keep(2))), Keep(6)",
         ([0], [[0, 1], [2, 3], [0, 1]], 16)),
    ],
)  # fmt: skip
def test_the_json_of_a_schedule_says_what_is_kept_and_run_again(
    policy, schedule, expected
):
    found = json.loads(json.dumps(explained_workload(policy, schedule).as_json()))
    found = found["schedule"]
    assert found["num_layers"] == 10
    assert parse_schedule(found["text"]).forwards(10) == found["layer_forwards"]
    assert (
        found["kept_inputs"], found["runs_again"], found["layer_forwards"],
    ) == expected  # fmt: skip
