"""The text form of policies: a small grammar, and other tools' recipes by name."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any, NoReturn

from jaxckpt import policy as p
from jaxckpt.errors import PolicyError, did_you_mean
from jaxckpt.policy_algebra import Policy, Recipe

_QKV = ("query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj")
_MLP_IN = ("mlpwi_0", "mlpwi_1", "mlpwi")
_MINIMAL = (*_QKV, "out_proj", *_MLP_IN, "mlpwo")

_BODIES: dict[str, Policy] = {
    # MaxText, `remat_policy` (its decoder's `get_remat_policy`, read in 2026). Its
    # other two values are not recipes: `none` is no remat, `custom` is
    # `save(...) | offload(...)`.
    "maxtext:full": p.save_nothing(),
    "maxtext:minimal": p.save(_MINIMAL),
    "maxtext:minimal_with_context": p.save(_MINIMAL, "context"),
    "maxtext:minimal_flash": p.save(_MINIMAL, "context"),
    "maxtext:minimal_with_quantization": p.save(_MINIMAL, "quantization"),
    "maxtext:minimal_with_context_and_quantization": p.save(
        _MINIMAL, "context", "quantization"
    ),
    "maxtext:save_dot_with_context_except_mlp": p.save(_QKV, "context", "out_proj"),
    "maxtext:save_dot_except_mlp": p.save(_QKV, "out_proj"),
    "maxtext:save_dot_except_mlpwi": p.save(_QKV, "out_proj", "mlpwo"),
    "maxtext:save_qkv_proj": p.save(_QKV),
    "maxtext:save_out_proj": p.save("out_proj"),
    "maxtext:qkv_proj_offloaded": p.offload(_QKV[:-1]),
    "maxtext:minimal_offloaded": p.offload(_MINIMAL),
    # Megatron-Core, `recompute_granularity`: `selective` is the attention core, which
    # takes a policy by scope.
    "megatron:full": p.save_nothing(),
    # t5x, `remat_policy`.
    "t5x:full": p.save_nothing(),
    "t5x:minimal": p.save_dots(batch_dims=False),
}

_ALIASES: dict[str, Policy] = {
    "full": p.save_nothing(),
    "dots": p.save_dots(),
    "dots_no_batch": p.save_dots(batch_dims=False),
}

_CONSTRUCTORS: dict[str, Callable[..., Policy]] = {
    f.__name__: f
    for f in (
        p.save,
        p.offload,
        p.recompute,
        p.save_dots,
        p.offload_dots,
        p.save_everything,
        p.save_nothing,
        p.save_larger_than,
    )
}
_DEEPEST = 50
_MOST_OPERATORS = 200
_BY_NAMES = {"save", "offload", "recompute"}
_TOKEN = re.compile(
    r"\s*(?:(?P<op>[|()-])|(?P<call>[A-Za-z_]\w*)\s*\(|(?P<atom>[A-Za-z_][\w:]*))"
)
_ARGUMENT = re.compile(
    r"""\s*(?P<arg>(?:\w+\s*=\s*)?(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|[^,()"']*?)"""
    r"""\s*(?P<end>[,)])"""
)


def recipe(name: str) -> Policy:
    """Return another tool's policy under its own name.

    Names that the model does not have are left out of account, but one must match.

    Args:
        name: `"maxtext:minimal"`, `"t5x:minimal"`, ...; see `recipe_names`.

    Raises:
        PolicyError: For an unknown name, with the known ones.

    Example:
        >>> str(recipe("maxtext:save_out_proj"))
        'maxtext:save_out_proj'
    """
    if name not in _BODIES:
        raise PolicyError(f"`{name}` is not a recipe. {did_you_mean(name, _BODIES)}")
    return Recipe(name, _BODIES[name])


def recipe_names() -> tuple[str, ...]:
    """Return the names that `recipe` knows.

    Example:
        >>> "maxtext:minimal" in recipe_names()
        True
    """
    return tuple(_BODIES)


def parse(text: str) -> Policy | None:
    """Return the policy that a text describes (see `jaxckpt.parse_policy`)."""
    if not isinstance(text, str):
        raise PolicyError(f"`{text!r}` is not a policy text (a string).")
    if text.strip() == "none":
        return None
    return _Parser(text).parse()


class _Parser:
    """Recursive descent over `|` (loosest), `-`, and atoms."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0
        self.operators = 0

    def parse(self) -> Policy:
        policy = self._union()
        if self.text[self.position :].strip():
            self._fail("`|`, `-` or the end")
        return policy

    def _union(self) -> Policy:
        policy = self._difference()
        while self._take("|"):
            policy = policy | self._difference()
        return policy

    def _difference(self) -> Policy:
        policy = self._atom()
        while self._take("-"):
            policy = policy - self._atom()
        return policy

    def _take(self, operator: str) -> bool:
        match = _TOKEN.match(self.text, self.position)
        if match is None or match["op"] != operator:
            return False
        self.position = match.end()
        self.operators += 1
        if self.operators > _MOST_OPERATORS:
            raise PolicyError(
                f"A policy has over {_MOST_OPERATORS} operators. Use patterns, or one "
                "`save(...)` of many names."
            )
        return True

    def _atom(self) -> Policy:
        if self._take("("):
            self.depth += 1
            if self.depth > _DEEPEST:
                raise PolicyError(f"A policy nests parentheses over {_DEEPEST} deep.")
            policy = self._union()
            self.depth -= 1
            if not self._take(")"):
                self._fail("`)`")
            return policy
        match = _TOKEN.match(self.text, self.position)
        if match is None or match["op"]:
            self._fail("a policy")
        if match["atom"]:
            policy = self._named(match["atom"])
            self.position = match.end()
            return policy
        if match["call"] not in _CONSTRUCTORS:
            hint = did_you_mean(match["call"], _CONSTRUCTORS)
            raise PolicyError(
                f"`{match['call']}(...)` in `{self.text}` is unknown. {hint}"
            )
        self.position = match.end()
        return self._call(match["call"])

    def _named(self, atom: str) -> Policy:
        if atom in _ALIASES:
            return _ALIASES[atom]
        if atom in _BODIES:
            return recipe(atom)
        if atom == "none":
            raise PolicyError(
                f"`none` (no remat) stands alone; it is no part of `{self.text}`."
            )
        valid = ["none", *_ALIASES, *_BODIES, *(f"{c}(...)" for c in _CONSTRUCTORS)]
        raise PolicyError(f"`{atom}` is not a policy. {did_you_mean(atom, valid)}")

    def _call(self, function: str) -> Policy:
        arguments = self._arguments()
        if function in _BY_NAMES:
            return _CONSTRUCTORS[function](*map(self._unquoted, arguments))
        positional: list[Any] = []
        keywords: dict[str, Any] = {}
        for argument in arguments:
            key, equals, value = argument.partition("=")
            if not equals:
                positional.append(self._setting(argument))
            elif key.strip() in keywords:
                raise PolicyError(f"`{self.text}` gives `{key.strip()}` twice.")
            else:
                keywords[key.strip()] = self._setting(value.strip())
        try:
            return _CONSTRUCTORS[function](*positional, **keywords)
        except TypeError as error:
            raise PolicyError(f"`{self.text}`: {error}.") from None

    def _unquoted(self, argument: str) -> str:
        if not argument.startswith(("'", '"')):
            return argument
        try:
            return ast.literal_eval(argument)
        except (ValueError, SyntaxError):
            raise PolicyError(
                f"`{argument}` in `{self.text}` is not a string as Python writes it."
            ) from None

    def _setting(self, argument: str) -> object:
        """Read a setting: True, False, or text such as `1MiB`, quoted or not."""
        if argument in ("True", "False"):
            return argument == "True"
        return self._unquoted(argument)

    def _arguments(self) -> list[str]:
        arguments: list[str] = []
        while True:
            match = _ARGUMENT.match(self.text, self.position)
            if match is None:
                self._fail("`,` or `)`")
            self.position = match.end()
            last = match["end"] == ")"
            if match["arg"]:
                arguments.append(match["arg"])
            elif arguments or not last:
                self._fail("a name")
            if last:
                return arguments

    def _fail(self, expected: str) -> NoReturn:
        rest = self.text[self.position :].strip() or "the end"
        raise PolicyError(
            f"`{self.text}` is not a policy: expected {expected} before `{rest}`. "
            "Write for example `save(query_proj, mlpwi*) | offload(context)`."
        )
