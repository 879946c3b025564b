"""Find a workload function by `FILE:WORKLOAD` and call it with `--set key=value`."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from jaxckpt.errors import JaxckptError, WorkloadError, did_you_mean
from jaxckpt.settings import parse_settings, signature, takes_rest
from jaxckpt.workload import Workload

WorkloadFunction = Callable[..., Workload]


def load_workload(spec: str, settings: Sequence[str] = (), **extra: Any) -> Workload:
    """Call the workload function that `FILE:WORKLOAD` names and return its workload.

    Args:
        spec: Path of a Python file, a colon, and the name of a workload function in it.
        settings: `key=value` texts, typed by the function's annotations.
        **extra: Keywords that are passed as they are, such as `policy`. None is left
            out where the function has no such keyword; anything else is an error there.

    Raises:
        WorkloadError: For a file, name or setting that is not there or not valid, and
            for whatever the function refuses.
    """
    function = find_workload(spec)
    keywords = parse_settings(function, settings, spec=spec)
    keywords.update(_accepted(function, extra, spec))
    return _call(function, keywords, spec)


def find_workload(spec: str) -> WorkloadFunction:
    """Import the file of `FILE:WORKLOAD` and return the function it names.

    Raises:
        WorkloadError: The text has no colon; the file is missing or fails on import; or
            it has no workload function of that name.
    """
    file, colon, name = spec.rpartition(":")
    if not colon or not file or not name:
        raise WorkloadError(
            f"`{spec}` is not FILE:WORKLOAD. Write the path of a Python file, a colon "
            "and the name of a workload function in it, as in `models/gpt.py:tiny`."
        )
    module = import_file(file)
    found = getattr(module, name, None)
    valid = workload_names(module)
    if found is None:
        raise WorkloadError(
            f"`{file}` has no workload function `{name}`. {did_you_mean(name, valid)}"
        )
    if inspect.isclass(found) or not callable(found):
        raise WorkloadError(
            f"`{name}` in `{file}` is not a workload function but of type "
            f"`{type(found).__name__}`. {did_you_mean(name, valid)}"
        )
    return cast(WorkloadFunction, found)


def workload_names(module: ModuleType) -> list[str]:
    """Return the names of a module's functions declared to return a workload."""
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and not name.startswith("_")
        and _returns_workload(value)
    ]


def _returns_workload(function: Callable[..., Any]) -> bool:
    declared = function.__annotations__.get("return")
    return declared is Workload or str(declared).split(".")[-1] == "Workload"


def import_file(file: str) -> ModuleType:
    """Import a Python file by its path; its neighbours can be imported from it.

    The file's folder and the folder above it go to the *end* of `sys.path`, so that
    both `from models.attention import ...` and `import attention` find a neighbour, and
    no neighbour hides an installed package.

    Raises:
        WorkloadError: The file is missing, or fails on import: with the line.
    """
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise WorkloadError(f"`{file}` is not a file. {_near_files(path)}")
    for folder in (str(path.parent.parent), str(path.parent)):
        if folder not in sys.path:
            sys.path.append(folder)
    try:
        return _import(path)
    except JaxckptError:
        raise
    except Exception as error:
        line = _line_in(path, error)
        raise WorkloadError(
            f"`{file}` fails on import{line}: {_one_line(error)}"
        ) from error


def _import(path: Path) -> ModuleType:
    """Import under the name a neighbour would use (`models.gpt`), else an own one."""
    name = f"{path.parent.name}.{path.stem}"
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin and Path(spec.origin).resolve() == path:
        return importlib.import_module(name)
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"jaxckpt_workload_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise WorkloadError(
            f"`{path}` is not a Python file: its name must end in `.py`."
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _near_files(path: Path) -> str:
    if not path.parent.is_dir():
        return f"There is no folder `{path.parent}` either."
    names = [p.name for p in path.parent.glob("*.py") if p.name != "__init__.py"]
    nearest = difflib.get_close_matches(path.name, names, n=20, cutoff=0.0)
    return did_you_mean(path.name, nearest)


def _line_in(path: Path, error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.lineno and error.filename:
        where = "" if Path(error.filename) == path else f" of `{error.filename}`"
        return f", line {error.lineno}{where}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if Path(f.filename) == path]
    return f", line {lines[-1]}" if lines else ""


def _one_line(error: BaseException) -> str:
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {' '.join(message.split())}"


def _accepted(
    function: WorkloadFunction, extra: Mapping[str, Any], spec: str
) -> dict[str, Any]:
    parameters = signature(function, spec)
    takes_all = takes_rest(parameters) is not None
    accepted: dict[str, Any] = {}
    for key, value in extra.items():
        if key in parameters or takes_all:
            accepted[key] = value
        elif value is not None:
            raise WorkloadError(
                f"`{spec}` takes no keyword `{key}`, so that `--{key.split('_')[0]}` "
                f"cannot reach it. Add `{key}` to the workload function's keywords."
            )
    return accepted


def _call(
    function: WorkloadFunction, keywords: Mapping[str, Any], spec: str
) -> Workload:
    try:
        workload = function(**keywords)
    except JaxckptError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"`{spec}` refuses its settings: {_one_line(error)}"
        ) from error
    if not isinstance(workload, Workload):
        raise WorkloadError(
            f"`{spec}` returns `{type(workload).__name__}`. A workload function "
            "returns `jaxckpt.Workload`."
        )
    return workload
