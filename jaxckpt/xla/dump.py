"""The file in which XLA writes down what it compiled and where each buffer lies."""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

_SWITCH = "jax_enable_compilation_cache"
_switch_lock = threading.RLock()
_MODULES = "*after_optimizations.hlo.pb"


def dump_options(folder: pathlib.Path) -> dict[str, Any]:
    """Return the compiler options that make XLA write into `folder`.

    They make it write more than is wanted (the code of each kernel); nothing keeps it
    from that, so the folder is one to throw away.
    """
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_proto": True}


def dumped_module(folder: pathlib.Path) -> bytes | None:
    """Return the `HloProto` of the program compiled; None where there is none.

    Small programs that the compiler tries out on the way leave files too: the largest
    is the program.
    """
    files = sorted(folder.glob(_MODULES), key=lambda file: file.stat().st_size)
    return files[-1].read_bytes() if files else None


@contextlib.contextmanager
def no_jax_cache() -> Iterator[None]:
    """Compile anew what JAX's own cache on disk has: that is stored without buffers."""
    with _switch_lock:
        before = getattr(jax.config, _SWITCH)
        jax.config.update(_SWITCH, False)
        compilation_cache.reset_cache()  # JAX looks at the switch once
        try:
            yield
        finally:
            jax.config.update(_SWITCH, before)
            compilation_cache.reset_cache()
