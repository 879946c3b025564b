"""Amounts in words, and tables that fit 80 columns."""

import io
import itertools

import pytest
from rich.console import Console

from jaxckpt.devices import catalog, get_device
from jaxckpt.errors import CompileError, JaxckptError, PolicyError, WorkloadError
from jaxckpt.report import (
    comparison_parts,
    device_table,
    format_bytes,
    format_flops,
    format_seconds,
    measurement_table,
    policy_markdown,
    policy_table,
)
from jaxckpt.report.compare import (
    Rule,
    chosen_rules,
    compare_policies,
    default_rules,
)
from jaxckpt.report.plots import SUFFIXES, check_plot, plot_comparison
from jaxckpt.report.tables import on_pareto_front
from jaxckpt.xla.footprint import Footprint
from jaxckpt.xla.measure import Measurement

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


def row(rule, peak, again, **keys):
    figures = {"peak_bytes": int(peak * 2**30), "recompute_flops": int(again * 1e12)}
    return MEASURED | {"policy": rule, "schedule": None} | figures | keys


ROWS = [
    row("none", 50, 0),
    row("dots", 30, 0),
    row("save(a) | save(b)", 29, 4),
    row("maxtext:minimal_with_context_and_quantization", 30, 4),
    row(None, 20, 30, schedule="every(2)"),
    row("dots", 20, 30, schedule="remat_every(2)"),
    row("full", 25, 40),
]
BEST = [False, True, True, False, True, True, False]


def test_policies_are_rows_and_keep_every_figure():
    text = shown(policy_table([MEASURED | {"policy": "none"}, MEASURED]))
    assert text.count("40.00 GiB") == 2
    assert text.count("25.0 %") == 2
    assert text.count("250 ms") == 2


def test_rows_that_no_other_beats_are_on_the_pareto_front():
    assert on_pareto_front(ROWS) == BEST
    assert on_pareto_front(ROWS[::-1]) == BEST[::-1]
    assert on_pareto_front([]) == []


def test_a_comparison_marks_its_pareto_front_within_80_columns():
    parts = comparison_parts(ROWS, title="gpt [xl]", device=get_device("h100-80gb"))
    text = "".join(map(shown, parts))
    assert text.startswith("gpt [xl] on h100-80gb, attention cudnn\n")
    assert "policy or schedule" in text
    assert "h100-80gb has 79.11 GiB." in text
    assert max(map(len, text.splitlines())) <= 80
    marked = [line.startswith(" *") for line in text.splitlines() if " % " in line]
    assert marked == BEST


@pytest.fixture
def fake_compare(monkeypatch):
    """Compare without tracing or compiling: figures by rule, or an error."""

    def compare(rules, *, loads, measures):
        def load(load_for, rule, device, label):
            if rule.policy in loads:
                raise loads[rule.policy]
            return rule.policy

        def measure(policy):
            if isinstance(measures[policy], Exception):
                raise measures[policy]
            peak, again = measures[policy]
            return Measurement(
                "mine", "h200", policy, None, Footprint(peak, 0, 0, 0), 100, again,
                None, 0.0, None, False, (), (),
            )  # fmt: skip

        monkeypatch.setattr("jaxckpt.report.compare._load", load)
        monkeypatch.setattr("jaxckpt.report.compare.measure_loaded", measure)
        return compare_policies(len, rules, get_device("h200"), label="mine")

    return compare


A, B, C = "full", "dots", "none"
OPTIONAL = [Rule(policy, optional=True) for policy in (A, B, C)]


def test_compare_sorts_by_peak_and_then_by_what_runs_again(fake_compare):
    found = fake_compare(OPTIONAL, loads={}, measures={A: (5, 9), B: (7, 8), C: (7, 3)})
    assert [row.policy for row in found.rows] == [C, B, A]
    assert found.left_out == ()


def test_compare_leaves_out_optional_rules_that_fail(fake_compare):
    found = fake_compare(
        [*OPTIONAL, OPTIONAL[0]],
        loads={A: PolicyError("no such name")},
        measures={B: CompileError("out of memory"), C: (7, 3)},
    )
    assert [row.policy for row in found.rows] == [C]
    assert found.as_json()["left_out"] == [
        {"policy": A, "reason": "no such name"},
        {"policy": B, "reason": "out of memory"},
    ]


@pytest.mark.parametrize("error", [PolicyError("bad"), WorkloadError("bad")])
def test_compare_raises_for_a_rule_that_was_asked_for(fake_compare, error):
    with pytest.raises(type(error), match="bad"):
        fake_compare([Rule(A), Rule(C)], loads={A: error}, measures={C: (1, 1)})


def test_compare_raises_where_nothing_is_left(fake_compare):
    failed = dict.fromkeys((A, B, C), CompileError("no plugin"))
    with pytest.raises(CompileError, match="no plugin"):
        fake_compare(OPTIONAL, loads={}, measures=failed)


def test_the_default_rules_are_all_recipes_of_maxtext_that_do_not_offload():
    policies = [rule.policy for rule in default_rules()]
    assert policies[:4] == ["none", "full", "dots", "dots_no_batch"]
    assert len(policies) == 15 == len(set(policies))
    assert "maxtext:minimal_with_quantization" in policies
    assert not any("offload" in policy or "megatron" in policy for policy in policies)
    assert all(rule.optional for rule in default_rules())


@pytest.mark.parametrize(
    ("policies", "schedules", "expected"),
    [
        (["full, save(a, 'b,c')"], [], ["policy full", "policy save(a, 'b,c')"]),
        (["none"], ["every(2);sqrt()"],
         ["policy none", "schedule every(2)", "schedule sqrt()"]),
        ([], ["Keep(2), Remat(save('a;b'), 2); full"],
         ["schedule Keep(2), Remat(save('a;b'), 2)", "schedule full"]),
    ],
)  # fmt: skip
def test_lists_are_split_outside_of_parentheses_and_quotes(
    policies, schedules, expected
):
    rules = chosen_rules(policies, schedules)
    assert [rule.label for rule in rules] == expected
    assert not any(rule.optional for rule in rules)


def test_a_comparison_of_small_programs_is_in_mib():
    text = shown(policy_table([row("none", 0.5, 0), row("full", 0.25, 10)]))
    assert "512.00 MiB" in text and "256.00 MiB" in text


def test_a_comparison_in_markdown_has_bold_front_and_escaped_bars():
    lines = policy_markdown(ROWS).splitlines()
    assert lines[0] == "| policy or schedule | peak | temp | recomputed | step |"
    assert lines[2].startswith("| `none` | 50.00 GiB | 22.00 GiB | 0.0 % |")
    assert lines[4].startswith("| **`save(a) \\| save(b)`** |")
    assert all(line.count("|") - line.count("\\|") == 6 for line in lines)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_plot_is_written_in_each_kind(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"out{suffix}"
    plot_comparison(ROWS, path, title="gpt", device=get_device("l40s"))
    assert path.stat().st_size > 1000


def test_a_plot_has_axes_front_memory_and_labels_apart(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: saved.append(self))
    # Two dozen rules along a front, near each other, and two that share a point.
    rows = [row(f"policy_number_{i}", 20 + i / 3, 30 - i) for i in range(24)]
    rows += [row("none", 50, 0), row("nothing", 50, 0)]
    device = get_device("l40s")
    plot_comparison(rows, tmp_path / "out.png", title="gpt", device=device)
    (axes,) = saved[0].axes
    assert axes.get_title() == "gpt on l40s"
    assert "GiB" in axes.get_xlabel() and "%" in axes.get_ylabel()
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["Pareto front", "memory of l40s, 45.0 GiB"]
    texts = [t.get_text() for t in axes.texts]
    assert len(texts) == 25 and "none\nnothing" in texts
    saved[0].canvas.draw()
    renderer = saved[0].canvas.get_renderer()
    boxes = [Text.get_window_extent(t, renderer) for t in axes.texts]
    frame = axes.get_window_extent(renderer)
    assert all(frame.fully_contains(*corner) for b in boxes for corner in b.corners())
    pairs = itertools.combinations(boxes, 2)
    assert not any(one.overlaps(other) for one, other in pairs)


def test_a_plot_leaves_out_a_memory_that_is_far_away(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: saved.append(self))
    rows = [row("none", 2, 0), row("full", 1, 10)]
    device = get_device("h200")
    plot_comparison(rows, tmp_path / "out.png", title="gpt", device=device)
    (axes,) = saved[0].axes
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["Pareto front"]
    assert axes.get_xlim()[1] < 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("out.jpg", "`.jpg` is not a kind of picture"),
        ("out", "`` is not a kind"),
        ("nowhere/out.png", "there is no folder"),
        ("folder.png", "is a folder"),
    ],
)
def test_a_plot_that_cannot_be_written_is_refused(tmp_path, name, message):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(JaxckptError, match=message):
        check_plot(tmp_path / name)


def test_devices_show_every_name_and_figure_in_full():
    text = shown(device_table(catalog().values(), {"h200": "no [1]"}))
    assert "…" not in text
    assert text.count("yes") == len(catalog()) - 1
    assert "no [1]" in text
