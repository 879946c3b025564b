"""Run the compiler in a process of its own, within limits of time and host memory."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from jaxckpt.errors import CompileError
from jaxckpt.xla.dump import dump_options, dumped_module

CHILD_PROGRAM = pathlib.Path(__file__).with_name("compile_child.py")

_POLL_SECONDS = 0.1
_DUMP = "dump"
_TAIL_LINES = 8
_SPARED_HOST_SHARE = 0.1
_NOISE = re.compile(r"InitializeLog|cudart_stub|cuda_executor|computation_placer")


@dataclass(frozen=True)
class Limits:
    """What one compile may use.

    Attributes:
        seconds: Wall-clock time.
        host_bytes: Resident host memory; None for 90 % of what is free at its start.
    """

    seconds: int | float
    host_bytes: int | None = None


@dataclass(frozen=True)
class ChildResult:
    """What the compiler's process wrote: bytes by name, seconds, optimized HLO.

    And the module with its buffers (`HloProto`), where that was asked for.
    """

    stats: dict[str, int]
    compile_seconds: float
    hlo_text: str
    module: bytes | None = None


def run_compiler(
    request: dict[str, Any],
    program: bytes,
    *,
    target: str,
    limits: Limits,
    dump: bool = False,
) -> ChildResult:
    """Compile `program` in a child process and return what it wrote.

    Args:
        request: Topology keywords, donated arguments and compiler options.
        program: A serialised `jax.export` module.
        target: Name of the device, for messages.
        limits: Time and host memory that the compiler may use.
        dump: Whether the module with its buffers is wanted.

    Raises:
        CompileError: The compiler refused, crashed, hung, or used too much memory.
    """
    with tempfile.TemporaryDirectory(prefix="jaxckpt-") as name:
        folder = pathlib.Path(name)
        if dump:
            options = request["compiler_options"] | dump_options(folder / _DUMP)
            request = request | {"compiler_options": options}
        (folder / "request.json").write_text(json.dumps(request))
        (folder / "program.bin").write_bytes(program)
        fault = _run_child(folder, limits)
        log = _tail(folder / "log.txt")
        if fault is not None:
            raise CompileError(f"Compiling for `{target}`: {fault}{log}")
        return _read_result(folder, target, log)


def _run_child(folder: pathlib.Path, limits: Limits) -> str | None:
    """Start the child and watch it; return what went wrong, or None.

    Memory is watched by polling the resident size. A limit set on the process itself
    would fail inside XLA: address space (`RLIMIT_AS`) counts the gigabytes that thread
    stacks and allocator arenas reserve but never touch, and a refused allocation
    (`RLIMIT_DATA`) aborts LLVM with nothing that tells it from a compiler bug.
    """
    host_bytes = limits.host_bytes or _spare_host_bytes()
    with (folder / "log.txt").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-P", str(CHILD_PROGRAM), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_child_environment(),
            start_new_session=True,
        )
    try:
        fault = _watch(child, time.monotonic() + limits.seconds, host_bytes)
    finally:
        _kill_group(child)
    if fault == "time":
        return (
            f"the compiler ran longer than {limits.seconds:g} s and was stopped. Raise "
            "`time_limit_seconds`, or scan over equal layers: the program is smaller."
        )
    if fault == "memory":
        return (
            f"the compiler used more than {_gibibytes(host_bytes)} of host memory and "
            "was stopped. Raise `memory_limit_bytes`, free host memory, or scan over "
            "equal layers: the program is smaller."
        )
    return _explain_exit(child.returncode)


def _watch(child: subprocess.Popen, deadline: float, host_bytes: int) -> str | None:
    """Wait for `child`; return the limit that it broke, `"time"` or `"memory"`."""
    while child.poll() is None:
        if time.monotonic() > deadline:
            return "time"
        if _resident_bytes(child.pid) > host_bytes:
            return "memory"
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_POLL_SECONDS)
    return None


def _kill_group(child: subprocess.Popen) -> None:
    """End the child with all that it started, whatever state it is in, and reap it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _explain_exit(code: int) -> str | None:
    if code == 0:
        return None
    if code == -signal.SIGKILL:
        return (
            "the compiler was killed from outside, most likely by the kernel for lack "
            "of host memory. Free host memory, or scan over equal layers."
        )
    if code < 0:
        return (
            f"the compiler crashed ({_signal_name(-code)}). This is a fault of XLA, "
            "not of your program: try another policy or form of the layers, or another "
            "version of jax and its CUDA plugin."
        )
    return f"the compiler's process ended with status {code}."


def _read_result(folder: pathlib.Path, target: str, log: str) -> ChildResult:
    try:
        result = json.loads((folder / "result.json").read_text())
    except (OSError, ValueError):
        raise CompileError(
            f"Compiling for `{target}`: the compiler ended without a result.{log}"
        ) from None
    if "error" in result:
        first_line = result["error"].strip().splitlines()[0]
        raise CompileError(f"XLA cannot compile this for `{target}`: {first_line}")
    hlo_text = (folder / "hlo.txt").read_text()
    module = dumped_module(folder / _DUMP)
    return ChildResult(result["stats"], result["compile_seconds"], hlo_text, module)


def _child_environment() -> dict[str, str]:
    """Return the environment of the child: it must not open an attached accelerator."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
    }


def _resident_bytes(pid: int) -> int:
    """Return the resident bytes of `pid` that are its own, or 0 where not known."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def _spare_host_bytes() -> int:
    """Return 90 % of the host memory that is free, or no limit where not known."""
    try:
        text = pathlib.Path("/proc/meminfo").read_text()
    except OSError:
        return sys.maxsize
    free = re.search(r"MemAvailable:\s+(\d+) kB", text)
    share = 1 - _SPARED_HOST_SHARE
    return round(int(free.group(1)) * 1024 * share) if free else sys.maxsize


def _tail(log: pathlib.Path) -> str:
    """Return the last lines of `log` as the end of a message, without known noise."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    told = [line[:200] for line in lines if line.strip() and not _NOISE.search(line)]
    if not told:
        return ""
    return "\nThe compiler's last lines:\n  " + "\n  ".join(told[-_TAIL_LINES:])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
