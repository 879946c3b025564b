"""What long work says while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console

Progress = Callable[[str], AbstractContextManager[Any]]
"""`progress(text)` is entered while a step runs, and says so."""


def silent(text: str) -> AbstractContextManager[Any]:
    """Show nothing."""
    return contextlib.nullcontext()


def status() -> Progress:
    """Return a progress display on stderr, which leaves stdout alone."""
    return Console(stderr=True).status
