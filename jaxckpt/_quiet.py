"""Import JAX without the lines that its CUDA plugin logs where no driver is.

On a machine that compiles for absent GPUs the plugin says several times that it found
no driver, straight to file descriptor 2 and before any logging setting counts.
Everything else that the import writes there is passed on.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator

_NOISE = ("cudart_stub", "All log messages before absl::InitializeLog")


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
    """Pass on what is written to file descriptor 2, without the plugin's lines."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            caught.seek(0)
            for line in caught.read().decode(errors="replace").splitlines():
                if not any(noise in line for noise in _NOISE):
                    print(line, file=sys.stderr)


if "jax" not in sys.modules:
    # Where there is no descriptor 2 there is nothing to keep quiet.
    with contextlib.suppress(OSError), without_noise():
        importlib.import_module("jax")
