"""Compile a step for a device, present or not, and say what the compiler made of it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax

from jaxckpt.devices import Device, can_compile, get_device, plugin_version, use
from jaxckpt.devices.target import topology_arguments
from jaxckpt.errors import CompileError, DeviceError
from jaxckpt.xla import cache as disk
from jaxckpt.xla.dump import dump_options, dumped_module, no_jax_cache
from jaxckpt.xla.export import Program, export_program
from jaxckpt.xla.footprint import Footprint, footprint_from_stats, read_stats
from jaxckpt.xla.peak_buffers import Buffer, held_buffers, named_arguments
from jaxckpt.xla.peak_proto import ProtoError, read_assignment
from jaxckpt.xla.process import Limits, run_compiler

XLA_FLAGS_USED: Mapping[str, str] = MappingProxyType(
    {"xla_disable_hlo_passes": "rematerialization"}
)
"""XLA's own rematerialisation starts at a limit of its own and changes the program."""

_ENTRY_FORMAT = 1


@dataclass(frozen=True)
class Compilation:
    """What the compiler made of one program.

    Attributes:
        device: Name of the device that it was compiled for.
        footprint: Bytes by category.
        hlo_text: The optimized module.
        compile_seconds: Time that the compiler took, also when the result is cached.
        from_cache: Whether it was read from disk.
        executable: The program itself, for an attached device; else None.
        buffers: What holds memory when it is fullest (see `holders`); None where it was
            not asked for.
    """

    device: str
    footprint: Footprint
    hlo_text: str = dataclasses.field(repr=False)
    compile_seconds: float
    from_cache: bool = False
    executable: Any = dataclasses.field(default=None, repr=False, compare=False)
    buffers: tuple[Buffer, ...] | None = dataclasses.field(default=None, repr=False)


def compile_for(
    fn: Callable[..., Any],
    *args: Any,
    device: Device | str,
    donate_argnums: int | Sequence[int] | None = None,
    time_limit_seconds: int | float = 1800,
    memory_limit_bytes: int | None = None,
    cache: bool = True,
    peak: bool = False,
) -> Compilation:
    """Compile `fn(*args)` for `device` and return its footprint and optimized HLO.

    An absent chip's program is compiled in a process of its own, so that a compiler
    that crashes, hangs or runs away does not take this one down; the result is kept on
    disk. For the attached device it is compiled here and can be run.

    Args:
        fn: The function, jitted or not; it is traced with `device` active.
        *args: Abstract (`jax.ShapeDtypeStruct`) or concrete arguments.
        device: A device or the name of one.
        donate_argnums: Arguments whose memory the results may reuse; None for those
            that a jitted `fn` donates.
        time_limit_seconds: Most that the compiler may take.
        memory_limit_bytes: Most host memory that the compiler may hold; None for 90 %
            of what is free at its start.
        cache: Whether to look the result up on disk and keep it there.
        peak: Whether to read from the compiler which buffers are held when memory is
            fullest: the `buffers` of the result.

    Raises:
        DeviceError: The device is unknown, or cannot be compiled for here.
        CompileError: The compiler refused, crashed, hung, or used too much memory.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
        >>> compile_for(jnp.sin, x, device="attached").footprint.argument_bytes
        4096
    """
    device = get_device(device)
    if (reason := can_compile(device)) is not None:
        raise DeviceError(f"Cannot compile for `{device.name}`: {reason}")
    with use(device):
        if device.is_attached:
            return _compile_here(fn, args, donate_argnums, peak)
        program = export_program(fn, args, donate_argnums)
    key = _cache_key(program, device)
    found = _from_entry(disk.read_entry(key), device) if cache else None
    if found is None or (peak and found.buffers is None):
        limits = Limits(time_limit_seconds, memory_limit_bytes)
        entry = _compile_apart(program, device, limits, peak)
        if cache:
            disk.write_entry(key, entry)
        found = _from_entry(entry, device)
        assert found is not None
        found = dataclasses.replace(found, from_cache=False)
    buffers = named_arguments(found.buffers, fn, args) if peak else None
    return dataclasses.replace(found, buffers=buffers)


def _compile_here(
    fn: Callable[..., Any], args: Sequence[Any], donate_argnums: Any, peak: bool
) -> Compilation:
    if donate_argnums is not None:
        fn = jax.jit(fn, donate_argnums=donate_argnums)
    elif not hasattr(fn, "lower"):
        fn = jax.jit(fn)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="jaxckpt-") as name:
        folder = pathlib.Path(name)
        options = {**XLA_FLAGS_USED, **(dump_options(folder) if peak else {})}
        try:
            lowered = fn.lower(*args)  # pyright: ignore[reportFunctionMemberAccess]
            with no_jax_cache() if peak else contextlib.nullcontext():
                compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            first_line = str(error).strip().splitlines()[0]
            raise CompileError(f"XLA cannot compile this here: {first_line}") from error
        seconds = time.perf_counter() - start
        footprint = footprint_from_stats(read_stats(compiled.memory_analysis()))
        return Compilation(
            "attached",
            footprint,
            compiled.as_text() or "",
            seconds,
            executable=compiled,
            buffers=_buffers(dumped_module(folder), footprint) if peak else None,
        )


def _compile_apart(
    program: Program, device: Device, limits: Limits, peak: bool
) -> dict[str, Any]:
    """Compile in another process and return the entry that the cache keeps."""
    request = {
        "topology": topology_arguments(device),
        "donated": program.donated,
        "compiler_options": dict(XLA_FLAGS_USED),
        "enable_x64": bool(jax.config.jax_enable_x64),  # pyright: ignore
    }
    result = run_compiler(
        request, program.serialized, target=device.name, limits=limits, dump=peak
    )
    entry = dataclasses.asdict(result)
    module = entry.pop("module")
    if peak:
        footprint = footprint_from_stats(result.stats)
        entry["buffers"] = list(map(vars, _buffers(module, footprint)))
    return entry


def _buffers(module: bytes | None, footprint: Footprint) -> tuple[Buffer, ...]:
    """Read the buffers at the peak from the module that the compiler wrote.

    Raises:
        CompileError: It wrote none.
    """
    try:
        assignment = read_assignment(module or b"")
    except ProtoError as error:
        raise CompileError(
            "The compiler did not write down where its buffers lie, so that nobody can "
            "say who holds memory at the peak. Compile without `peak`."
        ) from error
    return held_buffers(assignment, footprint.peak_bytes)


def _cache_key(program: Program, device: Device) -> str:
    """Return the digest of all that decides the result."""
    decides = {
        "format": _ENTRY_FORMAT,
        "topology": topology_arguments(device),
        "donated": program.donated,
        "compiler_options": dict(XLA_FLAGS_USED),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "versions": toolchain_versions(),
    }
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode())
    digest.update(program.serialized)
    return digest.hexdigest()


def toolchain_versions() -> dict[str, str | None]:
    """Return the versions of what takes part in a compile; None for what is absent."""
    versions: dict[str, str | None] = {"plugin": plugin_version()}
    for package in ("jax", "jaxlib", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _from_entry(entry: dict[str, Any] | None, device: Device) -> Compilation | None:
    """Return the stored compilation, or None where the entry is not whole."""
    try:
        assert entry is not None
        footprint = footprint_from_stats(entry["stats"])
        hlo_text, seconds = str(entry["hlo_text"]), float(entry["compile_seconds"])
        stored = entry.get("buffers")
        buffers = None if stored is None else tuple(Buffer(**b) for b in stored)
    except (AssertionError, KeyError, TypeError, ValueError):
        return None
    return Compilation(
        device.name, footprint, hlo_text, seconds, from_cache=True, buffers=buffers
    )
