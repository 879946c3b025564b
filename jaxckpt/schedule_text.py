"""The text form of schedules: constructors and trees, as Python would write them."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxckpt import schedule as s
from jaxckpt.errors import PolicyError, ScheduleError, did_you_mean
from jaxckpt.policy import Policy, parse_policy
from jaxckpt.schedule_tree import Keep, Node, Remat, Segment, check_depth

_RULES: dict[str, Callable[..., s.Schedule]] = {
    f.__name__: f
    for f in (
        s.none,
        s.full,
        s.uniform,
        s.every,
        s.remat_every,
        s.sqrt,
        s.nested,
        s.binomial,
    )
}
_WORDS = "none", "full"  # also without parentheses
_CALL = re.compile(r"\s*([A-Za-z_]\w*)\s*\((.*)\)\s*", re.DOTALL)
_TIMES = re.compile(r"\s*([^\s(),*]+)\s*\*(?!\*)(.*)", re.DOTALL)
_KEYWORD = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)(.*)", re.DOTALL)
_QUOTED = re.compile(r"""\s*(["'])(?:\\.|(?!\1)[^\\])*\1\s*""", re.DOTALL)
_NUMBER = re.compile(r"\s*[+-]?[0-9]{1,18}\s*")
_MOST_NODES = 10_000


class _Call(NamedTuple):
    """`name(argument, ..., keyword=...)`, each part as it stands in the text."""

    text: str
    name: str
    arguments: list[str]
    keywords: dict[str, str]


def parse(text: str) -> s.Schedule:
    """Return the schedule that a text describes (see `jaxckpt.parse_schedule`)."""
    if not isinstance(text, str):
        raise ScheduleError(f"`{text!r}` is not a schedule text (a string).")
    if not text.strip():
        raise ScheduleError(
            "An empty text is no schedule. Write for example `every(4)` or "
            "`Remat(full, 12), Keep(4)`."
        )
    if text.strip() in _WORDS:
        return _RULES[text.strip()]()
    parts = split_at(text, ",")
    if len(parts) == 1:
        call = _call(text)
        if call.name in _RULES:
            return _rule(call)
    return s.tree(*_parse_nodes(parts, 0))


def split_at(text: str, separator: str) -> list[str]:
    """Split at a character outside of parentheses and quotes.

    Raises:
        ScheduleError: A parenthesis or a quote is left open, or a part is empty.

    Example:
        >>> split_at("save(a, b), full", ",")
        ['save(a, b)', ' full']
    """
    parts, start = [], 0
    for position in _top_level(text, separator):
        parts.append(text[start:position])
        start = position + 1
    parts.append(text[start:])
    if any(not part.strip() for part in parts):
        raise ScheduleError(
            f"`{text.strip()}` is not complete: something is missing beside a "
            f"`{separator}`."
        )
    return parts


def _top_level(text: str, separator: str) -> Iterator[int]:
    """Yield where the separator stands outside of parentheses and quotes."""
    depth, quote, escaped = 0, "", False
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote and not escaped else quote
            escaped = character == "\\" and not escaped
        elif character in "'\"":
            quote = character
        elif character in "()":
            depth += 1 if character == "(" else -1
            if depth < 0:
                raise ScheduleError(f"`{text.strip()}` closes a parenthesis too many.")
        elif character == separator and depth == 0:
            yield position
    if depth or quote:
        missing = "a quote" if quote else "a parenthesis"
        raise ScheduleError(f"`{text.strip()}` does not close {missing}.")


def _rule(call: _Call) -> s.Schedule:
    rule = _RULES[call.name]
    names = list(inspect.signature(rule).parameters)
    _refuse_keywords(call, names)
    positional = [
        _argument(call, names[min(i, len(names) - 1)] if names else "", text)
        for i, text in enumerate(call.arguments)
    ]
    named = {key: _argument(call, key, text) for key, text in call.keywords.items()}
    try:
        return rule(*positional, **named)
    except TypeError as error:
        raise ScheduleError(f"`{call.text}`: {error}.") from None


def _argument(call: _Call, place: str, text: str) -> Any:
    if place == "policy":
        return _policy(text)
    if _is_number(text):
        return int(text)
    raise ScheduleError(
        f"`{text.strip()}` in `{call.name}(...)` is not a whole number of at least 1."
    )


def _parse_nodes(parts: Sequence[str], depth: int) -> list[Node]:
    check_depth(depth, "The schedule")
    nodes: list[Node] = []
    size = 0
    for part in parts:
        times, text = _times(part)
        node = _node(_call(text), depth)
        size += times * _size(node)
        if size > _MOST_NODES:
            raise ScheduleError(f"A schedule has over {_MOST_NODES} nodes.")
        nodes += [node] * times
    return nodes


def _times(text: str) -> tuple[int, str]:
    """Split `3 * node` in how often and which."""
    match = _TIMES.fullmatch(text)
    if match is None:
        return 1, text
    if not _is_number(match[1]) or not 1 <= int(match[1]) <= _MOST_NODES:
        raise ScheduleError(
            f"`{match[1]} * ...` in `{text.strip()}`: use a whole number from 1 to "
            f"{_MOST_NODES}."
        )
    return int(match[1]), match[2]


def _size(node: Node) -> int:
    """Return how many nodes a tree is, itself included."""
    return 1 + (sum(map(_size, node.children)) if isinstance(node, Segment) else 0)


def _node(call: _Call, depth: int) -> Node:
    if call.name not in _NODES:
        raise ScheduleError(_not_a_node(call))
    return _NODES[call.name](call, depth)


def _segment(call: _Call, depth: int) -> Node:
    _refuse_keywords(call, ["policy"])
    policy = call.keywords.get("policy")
    children = tuple(_parse_nodes(call.arguments, depth + 1))
    if policy is None:
        return Segment(children)
    return Segment(children, _some_policy(policy, call))


def _keep(call: _Call, depth: int) -> Node:
    _refuse_keywords(call, ["layers"])
    layers = _take_layers(call)
    _refuse_rest(call)
    return Keep(layers)


def _remat(call: _Call, depth: int) -> Node:
    _refuse_keywords(call, ["layers", "policy"])
    layers = _take_layers(call)
    policy = call.keywords.get("policy")
    if policy is None and call.arguments:
        policy = call.arguments.pop()
    _refuse_rest(call)
    return Remat(None if policy is None else _some_policy(policy, call), layers)


_NODES: dict[str, Callable[[_Call, int], Node]] = {
    "Keep": _keep,
    "Remat": _remat,
    "Segment": _segment,
}


def _not_a_node(call: _Call) -> str:
    """Say what is wrong with text that should be a node of a tree."""
    given = call.name or call.text
    nodes = ", ".join(f"`{name}(...)`" for name in _NODES)
    if call.text in _RULES and call.text not in ("none", "full"):
        setting = "" if call.text == "sqrt" else "4"
        return f"`{call.text}` is written as a call: `{call.text}({setting})`."
    if given in _RULES:
        return (
            f"`{call.text}` is a whole schedule, and no part of a tree, which is made "
            f"of {nodes}. Between schedules of a list stands a semicolon."
        )
    with contextlib.suppress(PolicyError):
        parse_policy(call.text)
        return (
            f"`{call.text}` is a policy, not a schedule. Write "
            f"`uniform({call.text})` for all layers; a tree is made of {nodes}."
        )
    return f"`{given}` is not a schedule. {did_you_mean(given, [*_RULES, *_NODES])}"


def _take_layers(call: _Call) -> int:
    """Take the number of layers out of a call: by keyword, or the last argument."""
    count = call.keywords.get("layers")
    if count is None:
        count = call.arguments.pop() if call.arguments else ""
    if not _is_number(count):
        raise ScheduleError(
            f"`{call.text}`: `{count.strip()}` is not a number of layers. Use a whole "
            "number of at least 1."
        )
    return int(count)


def _refuse_keywords(call: _Call, valid: Sequence[str]) -> None:
    for name in call.keywords:
        if name not in valid:
            raise ScheduleError(
                f"`{call.text}` has an unknown argument `{name}`. "
                f"{did_you_mean(name, valid)}"
            )


def _refuse_rest(call: _Call) -> None:
    if call.arguments:
        raise ScheduleError(
            f"`{call.text}` has an argument too many: `{call.arguments[0].strip()}`."
        )


def _some_policy(text: str, call: _Call) -> Policy:
    policy = _policy(text)
    if policy is None:
        raise ScheduleError(
            f"`{call.text}`: `none` is no policy of a rematerialised layer. Use "
            "`Keep(layers)` for layers without remat."
        )
    return policy


def _policy(text: str) -> Policy | None:
    """Read a policy, in quotes or not."""
    try:
        quoted = _QUOTED.fullmatch(text)
        return parse_policy(_unquoted(text) if quoted else text.strip())
    except PolicyError as error:
        raise PolicyError(f"In the schedule, {error}") from None


def _unquoted(text: str) -> str:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        raise PolicyError(
            f"`{text.strip()}` is not a string as Python writes it."
        ) from None


def _call(text: str) -> _Call:
    """Take a text apart; the name is "" where it is no call."""
    text = text.strip()
    match = _CALL.fullmatch(text)
    if match is None or not _encloses(match[2]):
        return _Call(text, "", [], {})
    call = _Call(text, match[1], [], {})
    for part in split_at(match[2], ",") if match[2].strip() else []:
        keyword = _KEYWORD.fullmatch(part)
        if keyword is None:
            call.arguments.append(part)
        elif keyword[1] in call.keywords:
            raise ScheduleError(f"`{text}` gives `{keyword[1]}` twice.")
        else:
            call.keywords[keyword[1]] = keyword[2]
    return call


def _encloses(inside: str) -> bool:
    """Return whether parentheses around a text belong together: not `(a) | (b)`."""
    try:
        list(_top_level(inside, ","))
    except ScheduleError:
        return False
    return True


def _is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None
