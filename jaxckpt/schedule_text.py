"""The text form of schedules: constructors and trees, as Python would write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from jaxckpt import schedule as s
from jaxckpt.errors import PolicyError, ScheduleError, did_you_mean
from jaxckpt.policy import Policy, parse_policy
from jaxckpt.schedule_tree import Keep, Node, Remat, Segment

_RULES: dict[str, Callable[..., s.Schedule]] = {
    f.__name__: f
    for f in (s.every, s.remat_every, s.sqrt, s.nested, s.binomial, s.uniform)
}
_WORDS: dict[str, Callable[[], s.Schedule]] = {"none": s.none, "full": s.full}
_NODES = "Keep", "Remat", "Segment"
_CALL = re.compile(r"\s*([A-Za-z_]\w*)\s*\((.*)\)\s*", re.DOTALL)
_TIMES = re.compile(r"\s*(\w+)\s*\*(?!\*)(.*)", re.DOTALL)
_KEYWORD = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)(.*)", re.DOTALL)
_QUOTED = re.compile(r"\s*(['\"])(.*)\1\s*", re.DOTALL)
_DEEPEST = 50
_MOST_NODES = 10_000


def parse(text: str) -> s.Schedule:
    """Return the schedule that a text describes (see `jaxckpt.parse_schedule`)."""
    if not isinstance(text, str):
        raise ScheduleError(f"`{text!r}` is not a schedule text (a string).")
    if text.strip() in _WORDS:
        return _WORDS[text.strip()]()
    name = _call(text)[0] if len(_split(text)) == 1 else None
    if name in _RULES:
        return _rule(text)
    return s.tree(*_parse_nodes(_split(text), 0))


def _rule(text: str) -> s.Schedule:
    name, arguments, keywords = _call(text)
    rule = _RULES[name]
    positional = [_argument(name, value) for value in arguments]
    named = {key: _argument(name, value) for key, value in keywords.items()}
    try:
        return rule(*positional, **named)
    except TypeError as error:
        raise ScheduleError(f"`{text}`: {error}.") from None


def _argument(rule: str, text: str) -> Any:
    """Read a number, else a policy, by what the rule takes."""
    if _is_number(text):
        return int(text)
    if rule in ("uniform", "remat_every"):
        return _policy(text)
    raise ScheduleError(
        f"`{text.strip()}` in `{rule}(...)` is not a whole number of at least 1."
    )


def _parse_nodes(parts: list[str], depth: int) -> list[Node]:
    if depth > _DEEPEST:
        raise ScheduleError(f"A schedule nests segments over {_DEEPEST} deep.")
    nodes = [node for part in parts for node in _repeated(part, depth)]
    if len(nodes) > _MOST_NODES:
        raise ScheduleError(f"A schedule has over {_MOST_NODES} nodes.")
    return nodes


def _repeated(text: str, depth: int) -> list[Node]:
    match = _TIMES.fullmatch(text)
    if match is None:
        return [_node(text, depth)]
    if not _is_number(match[1]) or not 1 <= int(match[1]) <= _MOST_NODES:
        raise ScheduleError(
            f"`{match[1]} * ...` in `{text.strip()}`: use a whole number from 1 to "
            f"{_MOST_NODES}."
        )
    return [_node(match[2], depth)] * int(match[1])


def _node(text: str, depth: int) -> Node:
    name, arguments, keywords = _call(text)
    if name not in _NODES:
        valid = [*_WORDS, *_RULES, *_NODES]
        given = name or text.strip()
        if name in _RULES or text.strip() in _WORDS:
            raise ScheduleError(
                f"`{text.strip()}` stands alone; a tree is made of "
                f"{', '.join(f'`{n}(...)`' for n in _NODES)}."
            )
        raise ScheduleError(
            f"`{given}` is not a schedule. {did_you_mean(given, valid)}"
        )
    if name == "Segment":
        policy = keywords.pop("policy", None)
        _refuse_keywords(text, keywords)
        children = tuple(_parse_nodes(arguments, depth + 1))
        given = {} if policy is None else {"policy": _some_policy(policy, text)}
        return Segment(children, **given)
    count = keywords.pop("layers", None) or (arguments.pop() if arguments else "")
    if not _is_number(count):
        raise ScheduleError(
            f"`{text.strip()}`: `{count.strip()}` is not a number of layers."
        )
    policy = keywords.pop("policy", None) or (arguments.pop() if arguments else None)
    _refuse_keywords(text, keywords)
    if arguments or (name == "Keep" and policy is not None):
        raise ScheduleError(f"`{text.strip()}` has too many arguments.")
    if name == "Keep":
        return Keep(int(count))
    return Remat(None if policy is None else _some_policy(policy, text), int(count))


def _some_policy(text: str, where: str) -> Policy:
    policy = _policy(text)
    if policy is None:
        raise ScheduleError(
            f"`{where.strip()}`: `none` is no policy of a rematerialised layer. Use "
            "`Keep(layers)` for layers without remat."
        )
    return policy


def _policy(text: str) -> Policy | None:
    quoted = _QUOTED.fullmatch(text)
    try:
        return parse_policy(quoted[2] if quoted else text.strip())
    except PolicyError as error:
        raise PolicyError(f"In the schedule, {error}") from None


def _call(text: str) -> tuple[str, list[str], dict[str, str]]:
    """Return name, arguments and keywords of `name(...)`; "" where it is no call."""
    match = _CALL.fullmatch(text)
    if match is None:
        return "", [], {}
    arguments: list[str] = []
    keywords: dict[str, str] = {}
    for part in _split(match[2]) if match[2].strip() else []:
        keyword = _KEYWORD.fullmatch(part)
        if keyword is None:
            arguments.append(part)
        elif keyword[1] in keywords:
            raise ScheduleError(f"`{text.strip()}` gives `{keyword[1]}` twice.")
        else:
            keywords[keyword[1]] = keyword[2]
    return match[1], arguments, keywords


def _split(text: str) -> list[str]:
    """Split at commas outside of parentheses and quotes."""
    parts, start = [], 0
    for position in _top_level_commas(text):
        parts.append(text[start:position])
        start = position + 1
    parts.append(text[start:])
    if any(not part.strip() for part in parts):
        raise ScheduleError(
            f"`{text.strip()}` is not a schedule: something is missing beside a comma. "
            "Write for example `every(4)` or `Remat(full, 12), Keep(4)`."
        )
    return parts


def _top_level_commas(text: str) -> Iterator[int]:
    depth, quote = 0, ""
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "()":
            depth += 1 if character == "(" else -1
            if depth < 0:
                raise ScheduleError(f"`{text.strip()}` closes a parenthesis too many.")
        elif character == "," and depth == 0:
            yield position
    if depth or quote:
        missing = "a quote" if quote else "a parenthesis"
        raise ScheduleError(f"`{text.strip()}` does not close {missing}.")


def _refuse_keywords(text: str, keywords: dict[str, str]) -> None:
    if keywords:
        name = next(iter(keywords))
        raise ScheduleError(f"`{text.strip()}` has an unknown argument `{name}`.")


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\s*[+-]?[0-9]+\s*", text) is not None
