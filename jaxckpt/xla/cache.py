"""Compiled results on disk: a file for each key, never trusted without its checksum."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import threading
import warnings
import zlib
from typing import Any

_DIGEST_CHARACTERS = 64


def cache_folder() -> pathlib.Path:
    """Return where results are kept: `$JAXCKPT_CACHE`, or `~/.cache/jaxckpt`."""
    given = os.environ.get("JAXCKPT_CACHE")
    return pathlib.Path(given) if given else pathlib.Path.home() / ".cache" / "jaxckpt"


def read_entry(key: str) -> dict[str, Any] | None:
    """Return the entry under `key`; None if there is none or it is damaged."""
    try:
        stored = _entry_path(key).read_bytes()
        digest, payload = stored[:_DIGEST_CHARACTERS], stored[_DIGEST_CHARACTERS:]
        if hashlib.sha256(payload).hexdigest().encode() != digest:
            return None
        entry = json.loads(zlib.decompress(payload))
    except (OSError, ValueError, zlib.error):
        return None
    return entry if isinstance(entry, dict) else None


def write_entry(key: str, entry: dict[str, Any]) -> None:
    """Store `entry` under `key`: whole or not at all, replacing what was there."""
    payload = zlib.compress(json.dumps(entry).encode())
    digest = hashlib.sha256(payload).hexdigest().encode()
    path = _entry_path(key)
    # Writers may be many; each has a file of its own until it is whole.
    temporary = path.with_name(f"{key}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(digest + payload)
        temporary.replace(path)
    except OSError as error:
        warnings.warn(f"Cannot write the compile cache `{path}`: {error}", stacklevel=2)
        with contextlib.suppress(OSError):
            temporary.unlink()


def _entry_path(key: str) -> pathlib.Path:
    return cache_folder() / f"{key}.hlo"
