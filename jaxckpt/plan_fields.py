"""Reading JSON that anybody may have written: field by field, with its place."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from jaxckpt.errors import PlanError, did_you_mean

T = TypeVar("T")

MOST_BYTES = 2**20
"""How large the text of a plan may be."""

_MOST_DIGITS = 40


@dataclass(frozen=True)
class Field:
    """A value in a JSON text, and how to name it in an error.

    Attributes:
        value: The value.
        path: Its place, as `verified.compiled`; empty for the whole.
        source: The file, or what else the text is.
    """

    value: Any
    path: str
    source: str

    def fail(self, rule: str) -> NoReturn:
        """Raise `PlanError`: the place, the value, and the rule it breaks."""
        where = f"`{self.path}`" if self.path else "what it holds"
        raise PlanError(f"{self.source}: {where} is {_shown(self.value)}. {rule}")

    def fields(self, *names: str) -> list[Field]:
        """Return the values of an object that has these keys and no others."""
        if not isinstance(self.value, dict):
            self.fail(f"It must be an object with the keys {', '.join(names)}.")
        place = f" in `{self.path}`" if self.path else ""
        for name in self.value:
            if name not in names:
                raise PlanError(
                    f"{self.source} has an unknown key {_shown(name)}{place}. "
                    f"{did_you_mean(name, names)}"
                )
        for name in names:
            if name not in self.value:
                raise PlanError(
                    f"{self.source} has no key `{name}`{place}. It must have: "
                    f"{', '.join(names)}."
                )
        return [self._inner(f".{name}", self.value[name]) for name in names]

    def pairs(self) -> list[tuple[str, Field]]:
        """Return keys and values of an object with any keys."""
        if not isinstance(self.value, dict):
            self.fail("It must be an object.")
        keys = (self._inner("", key).text() for key in self.value)
        return [(key, self._inner(f".{key}", self.value[key])) for key in keys]

    def entries(self, *, least: int = 0) -> list[Field]:
        """Return the values of a list."""
        if not isinstance(self.value, list) or len(self.value) < least:
            self.fail(f"It must be a list of at least {least} values.")
        return [self._inner(f"[{i}]", value) for i, value in enumerate(self.value)]

    def text(self, *, most: int = 1000) -> str:
        """Return a text of printable characters."""
        value = self.value
        if not isinstance(value, str) or len(value) > most or not value.isprintable():
            self.fail(
                f"It must be a text of at most {most} characters, without line breaks "
                "and control characters."
            )
        return value

    def one_of(self, choices: Sequence[str]) -> str:
        """Return a text that is one of several."""
        if not isinstance(self.value, str) or self.value not in choices:
            self.fail(did_you_mean(self.value, choices))
        return self.value

    def whole(self, *, least: int = 0, most: int = 2**63 - 1) -> int:
        """Return a whole number in a range."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail("It must be a whole number, written without a point.")
        if not least <= value <= most:
            self.fail(f"It must be a whole number from {least} to {most}.")
        return value

    def number(self, *, least: float = 0, most: float = 1e30) -> float:
        """Return a number in a range."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fail("It must be a number.")
        if not least <= value <= most:  # nor is NaN
            self.fail(f"It must be a number from {least:g} to {most:g}.")
        return float(value)

    def optional(self, read: Callable[[Field], T]) -> T | None:
        """Return None for `null`, else what `read` makes of it."""
        return None if self.value is None else read(self)

    def _inner(self, place: str, value: Any) -> Field:
        return Field(value, f"{self.path}{place}".removeprefix("."), self.source)


def parse_json(text: str, source: str) -> Field:
    """Return the value that a JSON text holds.

    Args:
        text: The text, of at most a MiB.
        source: What to call it in errors.

    Raises:
        PlanError: It is too long or no JSON, or gives a key twice.

    Example:
        >>> parse_json('{"format": true}', "plan.json").fields("format")[0].whole()
        Traceback (most recent call last):
        ...
        jaxckpt.errors.PlanError: plan.json: `format` is `true`. It must be a whole \
number, \
written without a point.
    """
    if not isinstance(text, str):
        raise PlanError(f"{source} is of type `{type(text).__name__}`, not a text.")
    check_size(len(text), source)

    def as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
            raise PlanError(
                f"{source} gives the key {_shown(twice)} twice. Give each key once."
            )
        return found

    try:
        value = json.loads(text, object_pairs_hook=as_object, parse_int=_whole)
    except json.JSONDecodeError as error:
        raise PlanError(
            f"{source} is not JSON: {error.msg} (line {error.lineno}, column "
            f"{error.colno}). Was it cut off? Make the plan again."
        ) from None
    except RecursionError:
        raise PlanError(
            f"{source} nests too deep to be a plan. Make the plan again."
        ) from None
    return Field(value, "", source)


def check_size(size: int, source: str) -> None:
    """Raise `PlanError` for a text that is too long to be a plan."""
    if size > MOST_BYTES:
        raise PlanError(
            f"{source} is longer than {MOST_BYTES} bytes. No plan is; is it the right "
            "file?"
        )


def _whole(digits: str) -> int:
    """Return a whole number; one with too many digits as 10**40, out of any range."""
    if len(digits) <= _MOST_DIGITS:
        return int(digits)
    return -(10**_MOST_DIGITS) if digits.startswith("-") else 10**_MOST_DIGITS


def _shown(value: Any) -> str:
    """Return a value for an error: short, on one line."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return f"`{text if len(text) <= 60 else f'{text[:60]}...'}`"
