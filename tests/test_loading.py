"""`FILE:WORKLOAD` and `--set`: what is found, what is typed, and what is refused."""

import textwrap
from typing import Annotated, Any, Literal

import pytest

from jaxckpt.errors import PolicyError, WorkloadError
from jaxckpt.loading import import_file, load_workload, workload_names
from jaxckpt.settings import parse_settings

WORKLOADS = """
    from jaxckpt.errors import PolicyError
    from jaxckpt.workload import Workload

    sizes = [1, 2]

    def mlp(*, batch: int = 8, width: int = 16, policy=None) -> Workload:
        if batch < 1:
            raise ValueError(f"`batch={batch}` is not positive")
        given = {"batch": batch, "width": width, "policy": policy}
        return Workload("mlp", len, given, {})

    def plain(*, batch: int = 8) -> "Workload":
        return Workload("plain", len, {"batch": batch}, {})

    def fussy(*, policy=None) -> Workload:
        raise PolicyError("`sve(a)` is not a policy.")

    def broken() -> Workload:
        return {}["missing"]

    def number() -> int:
        return 3
"""


@pytest.fixture
def write(tmp_path):
    def write(text, name="mine.py"):
        file = tmp_path / "project" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(textwrap.dedent(text))
        return str(file)

    return write


@pytest.fixture
def file(write):
    return write(WORKLOADS)


def test_a_workload_is_called_with_typed_settings_and_extra_keywords(file):
    workload = load_workload(f"{file}:mlp", ["batch=4", "width=32"], policy="p")
    assert workload.params == {"batch": 4, "width": 32, "policy": "p"}


def test_only_functions_that_return_a_workload_are_offered(file):
    assert workload_names(import_file(file)) == ["mlp", "plain", "fussy", "broken"]


@pytest.mark.parametrize("spec", ["models/gpt.py", ":mlp", "models/gpt.py:", ""])
def test_a_spec_without_file_or_name_is_refused(spec):
    with pytest.raises(WorkloadError, match="is not FILE:WORKLOAD"):
        load_workload(spec)


def test_a_missing_file_names_its_neighbours(file):
    spec = file.replace("mine.py", "mien.py") + ":mlp"
    with pytest.raises(WorkloadError, match=r"is not a file.*Did you mean `mine\.py`"):
        load_workload(spec)


def test_a_missing_folder_is_said(tmp_path):
    with pytest.raises(WorkloadError, match="There is no folder"):
        load_workload(f"{tmp_path}/nowhere/mine.py:mlp")


def test_a_file_that_is_not_python_is_refused(write):
    with pytest.raises(WorkloadError, match=r"must end in `\.py`"):
        load_workload(write("", "notes.txt") + ":mlp")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import os\nx = undefined", r"line 2: NameError: name 'undefined'"),
        ("import os\n\ndef f(:\n    pass", r"line 3: SyntaxError"),
        ("import not_installed_at_all", r"line 1: ModuleNotFoundError"),
    ],
)
def test_a_failing_import_says_the_line(write, text, message):
    with pytest.raises(WorkloadError, match=f"fails on import, {message}"):
        load_workload(write(text) + ":mlp")


def test_a_file_that_failed_is_read_again(write):
    with pytest.raises(WorkloadError):
        import_file(write("undefined"))
    assert import_file(write("x = 1")).x == 1


def test_a_missing_name_suggests_the_file_s_workloads(file):
    with pytest.raises(WorkloadError, match=r"Did you mean `plain`\? Valid: broken"):
        load_workload(f"{file}:plane")


@pytest.mark.parametrize(("name", "kind"), [("sizes", "list"), ("Workload", "type")])
def test_a_name_that_is_no_function_is_refused(file, name, kind):
    with pytest.raises(WorkloadError, match=f"not a workload function but .*`{kind}`"):
        load_workload(f"{file}:{name}")


def test_a_function_that_returns_something_else_is_refused(file):
    with pytest.raises(WorkloadError, match=r"returns `int`.*jaxckpt\.Workload"):
        load_workload(f"{file}:number")


def test_what_the_function_refuses_becomes_one_message(file):
    with pytest.raises(WorkloadError, match="`batch=0` is not positive"):
        load_workload(f"{file}:mlp", ["batch=0"])
    with pytest.raises(WorkloadError, match="KeyError: 'missing'"):
        load_workload(f"{file}:broken")
    with pytest.raises(PolicyError):
        load_workload(f"{file}:fussy", policy="p")


def test_a_policy_needs_a_function_that_takes_one(file):
    assert load_workload(f"{file}:plain", policy=None).params == {"batch": 8}
    with pytest.raises(WorkloadError, match=r"takes no keyword `policy`.*`--policy`"):
        load_workload(f"{file}:plain", policy="p")


def test_neighbours_can_be_imported_by_folder_or_alone(write):
    write("value = 7", "neighbour.py")
    by_folder = write("from project.neighbour import value", "by_folder.py")
    alone = write("from neighbour import value", "alone.py")
    assert import_file(by_folder).value == 7
    assert import_file(alone).value == 7


def test_a_file_is_the_same_module_as_its_ordinary_import():
    from models import losses

    assert import_file("models/losses.py") is losses


def typed(
    *,
    whole: int = 1,
    number: float = 0.5,
    switch: bool = False,
    text: str = "a",
    maybe: str | None = None,
    few: Literal["bf16", "f32", 8] = "f32",
    either: int | str = 0,
    noted: Annotated[int, "layers"] = 1,
    anything: Any = None,
    bare=None,
    policy: Any = None,
):
    return None


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("whole=3", 3),
        ("whole=-3", -3),
        ("number=1e-3", 1e-3),
        ("number=2", 2.0),
        ("switch=true", True),
        ("switch=No", False),
        ("text=3", "3"),
        ("text=a=b", "a=b"),
        ("text=", ""),
        ("maybe=None", None),
        ("maybe=corpus.txt", "corpus.txt"),
        ("few=bf16", "bf16"),
        ("few=8", 8),
        ("either=5", 5),
        ("either=five", "five"),
        ("noted=2", 2),
        ("anything=(1, 2)", (1, 2)),
        ("bare=word", "word"),
    ],
)
def test_a_value_takes_the_type_of_its_annotation(setting, value):
    (found,) = parse_settings(typed, [setting]).values()
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("whole=abc", "`whole=abc` is not a whole number. The default is `1`."),
        ("whole=1.5", "is not a whole number"),
        ("whole=", "is not a whole number"),
        ("whole=true", "is not a whole number"),
        ("number=fast", "is not a number"),
        ("number=nan", "is not a number"),
        ("switch=2", "is not true or false"),
        ("few=fp8", "is not one of `bf16`, `f32`, `8`"),
        ("noted=x", "is not a whole number"),
        ("whoel=3", "has no setting `whoel`. Did you mean `whole`?"),
        ("whole", "`--set whole` is not key=value"),
        ("=3", "is not key=value"),
        ("policy=full", "use `--policy`"),
    ],
)
def test_a_bad_setting_says_the_rule(setting, message):
    with pytest.raises(WorkloadError) as caught:
        parse_settings(typed, [setting])
    assert message in str(caught.value)


def test_a_key_given_twice_is_refused():
    with pytest.raises(WorkloadError, match="given twice"):
        parse_settings(typed, ["whole=1", "whole=2"])


def test_an_open_function_takes_any_key():
    def open_function(**settings: int):
        return None

    assert parse_settings(open_function, ["depth=3"]) == {"depth": 3}
    with pytest.raises(WorkloadError, match="is not a whole number"):
        parse_settings(open_function, ["depth=x"])


def test_an_annotation_that_cannot_be_read_is_said(write):
    file = write(
        """
        from __future__ import annotations
        def mlp(*, batch: Missing = 1) -> Workload: ...
        """
    )
    with pytest.raises(WorkloadError, match="annotation that cannot be read: name 'Mi"):
        load_workload(f"{file}:mlp", ["batch=1"])
