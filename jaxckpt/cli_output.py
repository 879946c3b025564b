"""What commands print: tables, and one JSON object that stands alone on stdout."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console


def print_table(table: Any) -> None:
    """Print what rich can render."""
    Console().print(table)


def print_json(document: Mapping[str, Any]) -> None:
    """Print one object."""
    print(json.dumps(document, indent=2))


@contextlib.contextmanager
def only_json(wanted: bool) -> Iterator[None]:
    """Send to stderr whatever the work prints, so that stdout holds the object alone.

    Both Python's stdout and the file descriptor, which C++ and child processes use.
    """
    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
