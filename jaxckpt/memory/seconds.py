"""Seconds of a fused program by a roofline over its kernels."""

from __future__ import annotations

from typing import Any

from jaxckpt import _jax
from jaxckpt.devices import Device
from jaxckpt.matmul import find_matmul
from jaxckpt.memory.program import Kind, Op, Program
from jaxckpt.xla.products import rate_of_factors


def roofline_seconds(program: Program, device: Device) -> float | None:
    """Return the seconds of one run, kernel after kernel; None for unknown rates.

    Each kernel takes the longer of its products and its memory traffic,
    `max(flops / rate, bytes / bandwidth) / efficiency`, as `xla.roofline` prices a
    compiled program.
    """
    if not device.has_rates:
        return None
    kernels = program.kernels()
    return sum(times * _seconds(op, device) for op, times in kernels)


def _seconds(op: Op, device: Device) -> float:
    assert device.memory_bytes_per_second is not None
    if op.kind is Kind.BARRIER:
        return 0.0
    traffic = sum(_read_bytes(op)) + sum(b.bytes for b in op.writes)
    if op.kind is Kind.UPDATE:  # what stays of the target is not touched
        traffic = 2 * _update_bytes(op)
    memory = traffic / device.memory_bytes_per_second
    return max(_product_seconds(op.eqn, device), memory) / device.efficiency


def _update_bytes(op: Op) -> int:
    """Return the bytes of what an update writes: `dynamic_update_slice` or scatter."""
    update = op.eqn.invars[1 if op.primitive == "dynamic_update_slice" else -1]
    return _jax.nbytes(update.aval)


def _read_bytes(op: Op) -> list[int]:
    """Return the bytes that a kernel reads of each buffer: of a stack, one layer."""
    made = max((b.bytes for b in op.writes), default=0)
    if op.kind in (Kind.STORE, Kind.REDUCE) or not made:
        return [b.bytes for b in op.reads]
    return [min(b.bytes, 2 * made) if b.external else b.bytes for b in op.reads]


def _product_seconds(eqn: Any, device: Device) -> float:
    if eqn is None or (matmul := find_matmul(eqn.primitive.name)) is None:
        return 0.0
    inputs, outputs = ([v.aval for v in vs] for vs in (eqn.invars, eqn.outvars))
    flops = matmul.flops(inputs, outputs, eqn.params)
    if eqn.primitive.name.startswith("ragged_dot"):  # all rows times each group
        flops *= inputs[2].shape[-1]
    widest = max(8 * _jax.nbytes(a) // max(1, a.size) for a in inputs[:2])
    return flops / rate_of_factors(widest, device)
