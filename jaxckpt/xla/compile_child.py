"""The compiler's own process: read a program, compile it, write what came out.

It is run by its path and imports nothing of jaxckpt, so that it starts as fast as JAX
does. Its one argument is a folder with `request.json` and `program.bin`; it writes
`result.json` (byte counts and seconds, or `error`) and `hlo.txt` there.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import pathlib
import signal
import sys
import time
from typing import Any

_PR_SET_PDEATHSIG = 1
_CATEGORIES = ("argument", "output", "temp", "alias")


def die_first() -> None:
    """Make the kernel end this process before its parent, and together with it.

    Out of memory it should choose the compiler; and a parent that is killed outright
    must not leave a compiler running. Both are Linux only, and only a help.
    """
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def compile_program(request: dict[str, Any], program: bytes) -> tuple[dict, str]:
    """Compile `program` for the absent chip; return the result and its HLO."""
    import jax
    from jax import export
    from jax.experimental import topologies

    jax.config.update("jax_enable_x64", request["enable_x64"])
    exported = export.deserialize(bytearray(program))
    devices = topologies.get_topology_desc(**request["topology"]).devices
    place = jax.sharding.SingleDeviceSharding(devices[0])
    args = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=place)
        for aval in exported.in_avals
    ]
    step = jax.jit(exported.call, donate_argnums=tuple(request["donated"]))
    start = time.perf_counter()
    compiled = step.lower(*args).compile(compiler_options=request["compiler_options"])
    seconds = time.perf_counter() - start
    stats = compiled.memory_analysis()
    names = [f"{side}{name}" for side in ("", "host_") for name in _CATEGORIES]
    counts = {name: int(getattr(stats, f"{name}_size_in_bytes")) for name in names}
    return {"stats": counts, "compile_seconds": seconds}, compiled.as_text() or ""


def main(folder: pathlib.Path) -> None:
    """Serve the one request in `folder`."""
    die_first()
    request = json.loads((folder / "request.json").read_text())
    try:
        result, hlo_text = compile_program(
            request, (folder / "program.bin").read_bytes()
        )
        (folder / "hlo.txt").write_text(hlo_text)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
