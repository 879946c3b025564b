"""Read `--set key=value`: each value takes the type of the function's annotation."""

from __future__ import annotations

import ast
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jaxckpt.errors import WorkloadError, did_you_mean

_OWN_OPTION = {"policy": "--policy", "schedule": "--schedule"}
_BOOLS = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}


def parse_settings(
    function: Callable[..., Any], settings: Sequence[str], *, spec: str = "the workload"
) -> dict[str, Any]:
    """Return the keywords that `key=value` texts mean for a workload function.

    Values take the type of the keyword's annotation: `int`, `float`, `bool`, `str`,
    `None`, `Literal` and unions of them. A keyword without annotation takes a Python
    literal, or the text itself.

    Raises:
        WorkloadError: No `=`, a key given twice or unknown to the function, or a value
            that is not of the annotated type.

    Example:
        >>> def tiny(
        ...     *, batch: int = 8, dropout: float = 0.0, data_path: str | None = None
        ... ): ...
        >>> parse_settings(tiny, ["batch=4", "dropout=0.1", "data_path=none"])
        {'batch': 4, 'dropout': 0.1, 'data_path': None}
    """
    keywords: dict[str, Any] = {}
    parameters = signature(function, spec)
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip()
        if not equals or not key:
            raise WorkloadError(
                f"`--set {setting}` is not key=value. Write it as in `--set batch=4`."
            )
        if key in keywords:
            raise WorkloadError(f"`--set {key}` is given twice. Give each key once.")
        keywords[key] = _setting(key, text.strip(), parameters, spec)
    return keywords


def _setting(
    key: str, text: str, parameters: Mapping[str, inspect.Parameter], spec: str
) -> Any:
    if key in _OWN_OPTION:
        raise WorkloadError(f"`--set {key}=...`: use `{_OWN_OPTION[key]}` for that.")
    parameter = parameters.get(key) or takes_rest(parameters)
    if parameter is None:
        valid = [k for k in parameters if k not in _OWN_OPTION]
        raise WorkloadError(
            f"`{spec}` has no setting `{key}`. {did_you_mean(key, valid)}"
        )
    try:
        return _parse(text, parameter.annotation)
    except ValueError:
        kind = _describe(parameter.annotation)
        default = parameter.default
        hint = "" if default is parameter.empty else f" The default is `{default}`."
        raise WorkloadError(f"`{key}={text}` is not {kind}.{hint}") from None


def signature(
    function: Callable[..., Any], spec: str
) -> Mapping[str, inspect.Parameter]:
    """Return a function's parameters by name, their annotations evaluated."""
    try:
        return inspect.signature(function, eval_str=True).parameters
    except NameError as error:
        raise WorkloadError(
            f"`{spec}` has an annotation that cannot be read: {error}. Import the name "
            "at the head of the file, not under TYPE_CHECKING."
        ) from error


def takes_rest(parameters: Mapping[str, inspect.Parameter]) -> inspect.Parameter | None:
    """Return the parameter that takes every other keyword (`**settings`), if any."""
    rest = [p for p in parameters.values() if p.kind is p.VAR_KEYWORD]
    return rest[0] if rest else None


def _parse(text: str, kind: Any) -> Any:
    """Return `text` as a value of the annotation `kind`, or raise `ValueError`."""
    if kind in (inspect.Parameter.empty, Any):
        return _parse_literal(text)
    if kind is None or kind is type(None):
        if text.lower() == "none":
            return None
        raise ValueError(text)
    if kind is bool:
        if text.lower() in _BOOLS:
            return _BOOLS[text.lower()]
        raise ValueError(text)
    if kind is float:
        number = float(text)
        if math.isnan(number):
            raise ValueError(text)
        return number
    if kind in (int, str):
        return kind(text)
    return _parse_composite(text, kind)


def _parse_composite(text: str, kind: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _parse(text, arguments[0])
    if origin is Literal:
        for choice in arguments:
            if str(choice) == text:
                return choice
        raise ValueError(text)
    if origin in (typing.Union, types.UnionType):
        # The text is the last resort: it takes anything.
        for option in sorted(arguments, key=lambda option: option is str):
            try:
                return _parse(text, option)
            except ValueError:
                continue
    raise ValueError(text)


def _parse_literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _describe(kind: Any) -> str:
    """Return an annotation in words, with its article."""
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a text",
        type(None): "none",
    }
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(option) for option in arguments)
    if origin is typing.Annotated:
        return _describe(arguments[0])
    return words.get(kind, f"something that `--set` can write (it takes `{kind}`)")
