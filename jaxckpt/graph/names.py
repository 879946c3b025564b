"""Readable names of operations: where they stand, and what they do.

A name says nothing about line numbers, so that it stays when a file is edited.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from jaxckpt import _jax


@dataclass(frozen=True)
class Where:
    """Where an operation stands in the program's text.

    Attributes:
        scope: Name stack: `jax.named_scope`s and flax module path.
        source: `file:line (function)`.
        function: The function, as short as it is clear.
    """

    scope: str = ""
    source: str = ""
    function: str = ""

    def of(self, eqn: Any) -> Where:
        """Return where an equation stands, of a jaxpr that stands here.

        JAX begins a new name stack inside each call and loop, and knows no line of the
        operations inside functions of its own: these have that of the call. What
        `einsum` pushes on the stack, its formula, is left out.
        """
        inner = (part for part in _jax.scope(eqn).split("/") if "->" not in part)
        source = _jax.source_line(eqn)
        return Where(
            scope=_joined(self.scope, *inner),
            source=source or self.source,
            function=function_of(source) or self.function,
        )

    def label(self, operation: str) -> str:
        """Return the name of an operation here that the program does not name.

        Example:
            >>> Where("decoder/mlp", function="Dense").label("dot_general")
            'decoder/mlp/dot_general'
            >>> Where(function="mlp").label("dot_general")
            'mlp/dot_general'
        """
        return _joined(self.scope or self.function, operation)


def function_of(source: str) -> str:
    """Return the function of `file:line (function)`, as short as it is clear.

    Example:
        >>> function_of("gpt.py:10 (loss.<locals>.block.<locals>.<lambda>)")
        'block'
        >>> function_of("gpt.py:10 (Linear.__call__)")
        'Linear'
    """
    found = re.search(r"\((.*)\)$", source)
    parts = found[1].split(".<locals>.") if found else []
    named = [part for part in parts if not part.startswith("<")]
    return named[-1].removesuffix(".__call__") if named else ""


def _joined(*parts: str) -> str:
    return "/".join(filter(None, parts))
