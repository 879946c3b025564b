"""What jaxckpt plans for: the numbers of a chip, of the catalogue or attached."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import tomllib
from dataclasses import dataclass
from typing import Any

import jax

from jaxckpt.errors import DeviceError, did_you_mean

ATTACHED = "attached"

DATASHEET_EFFICIENCY = 0.8
"""Share of the datasheet rates that a well written kernel reaches.

Measured on an H200: a copy moves 4.3 of 4.8 TB/s, a bf16 product of order 8192 runs at
770-800 of 989 TFLOP/s.
"""


@dataclass(frozen=True)
class Target:
    """The numbers of a chip that its compiler reads, beside the memory's.

    Attributes:
        compute_capability: As NVIDIA writes it, `"9.0"`.
        multiprocessors: Number of streaming multiprocessors.
        fp_units_per_multiprocessor: float32 multiply-add units in each.
        clock_hertz: Boost clock.
        l2_bytes: Size of the second-level cache.
        shared_memory_bytes_per_block_opt_in: Most that one block may ask for.
        shared_memory_bytes_per_multiprocessor: What one multiprocessor has.
    """

    compute_capability: str
    multiprocessors: int
    fp_units_per_multiprocessor: int
    clock_hertz: float
    l2_bytes: int
    shared_memory_bytes_per_block_opt_in: int
    shared_memory_bytes_per_multiprocessor: int


@dataclass(frozen=True)
class Device:
    """A chip: what it can hold, how fast it is, and how to compile for it.

    A number that is not known is None; catalogue chips know all but NVLink.

    Attributes:
        name: Catalogue key, or `"attached"`.
        title: The vendor's name.
        platform: `"cuda"`, `"cpu"` or `"tpu"`.
        memory_bytes: Device memory.
        memory_bytes_per_second: Datasheet rate of the device memory.
        peak_flops_per_second: Datasheet rate of dense bf16 products.
        host_link_bytes_per_second: To or from host memory, one way.
        nvlink_bytes_per_second: To other chips, one way; None where there is none.
        target: What the compiler needs to compile for the chip while it is absent.
        device_kinds: Names under which JAX lists the chip when it is attached.
        efficiency: Share of the datasheet rates that the roofline takes as reached;
            change it with `dataclasses.replace(device, efficiency=...)`.
    """

    name: str
    title: str
    platform: str = "cuda"
    memory_bytes: int | None = None
    memory_bytes_per_second: float | None = None
    peak_flops_per_second: float | None = None
    host_link_bytes_per_second: float | None = None
    nvlink_bytes_per_second: float | None = None
    target: Target | None = None
    device_kinds: tuple[str, ...] = ()
    efficiency: float = DATASHEET_EFFICIENCY

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise DeviceError(
                f"`efficiency={self.efficiency}` is not a share of the datasheet rates."
                " Use more than 0 and at most 1."
            )

    @property
    def is_attached(self) -> bool:
        """Whether programs can run on it here, rather than only be compiled for it."""
        return self.name == ATTACHED

    @property
    def has_rates(self) -> bool:
        """Whether its rates of products and of memory are known, for a roofline."""
        rates = self.peak_flops_per_second, self.memory_bytes_per_second
        return None not in rates

    @property
    def compute_capability(self) -> str | None:
        """CUDA compute capability such as `"9.0"`, if the chip has one."""
        return self.target.compute_capability if self.target else None

    @property
    def float32_flops_per_second(self) -> float | None:
        """Return the datasheet rate of float32 arithmetic outside the tensor cores.

        `multiprocessors * units * 2 * clock`, in FLOP/s: a multiply-add counts two.
        """
        if (t := self.target) is None:
            return None
        return 2 * t.multiprocessors * t.fp_units_per_multiprocessor * t.clock_hertz


@functools.cache
def _load_catalog() -> dict[str, Device]:
    text = (
        importlib.resources.files("jaxckpt.devices")
        .joinpath("catalog.toml")
        .read_text()
    )
    return {name: _from_toml(name, row) for name, row in tomllib.loads(text).items()}


def _from_toml(name: str, row: dict[str, Any]) -> Device:
    row = dict(row)
    target = Target(**row.pop("target"))
    kinds = tuple(row.pop("device_kinds"))
    return Device(name=name, target=target, device_kinds=kinds, **row)


def catalog() -> dict[str, Device]:
    """Return the chips that jaxckpt has the numbers of, by name, in catalogue order.

    Example:
        >>> list(catalog())
        ['a100-40gb', 'a100-80gb', 'h100-80gb', 'h200', 'b200', 'l40s', 'rtx4090']
    """
    return dict(_load_catalog())


def get_device(name: str | Device) -> Device:
    """Return the device called `name`: a chip of the catalogue, or `"attached"`.

    Args:
        name: Catalogue key; `"attached"` for the first device that JAX has here. A
            `Device` is returned as it is, so that callers may take either.

    Raises:
        DeviceError: No such device.

    Example:
        >>> get_device("h100-80gb").compute_capability
        '9.0'
    """
    if isinstance(name, Device):
        return name
    if name == ATTACHED:
        return _attached()
    chips = _load_catalog()
    if name not in chips:
        raise DeviceError(
            f"`{name}` is not a known device. {did_you_mean(name, [*chips, ATTACHED])}"
        )
    return chips[name]


def _attached() -> Device:
    """Describe the first device of the default backend.

    The catalogue's numbers hold where its kind is in the catalogue; otherwise only the
    memory is known, as the share that this process may allocate.
    """
    first = jax.devices()[0]
    kind = first.device_kind
    platform = "cuda" if first.platform == "gpu" else first.platform
    for chip in _load_catalog().values():
        if kind in chip.device_kinds:
            return dataclasses.replace(chip, name=ATTACHED, title=f"{kind} (attached)")
    memory = (first.memory_stats() or {}).get("bytes_limit")
    title = f"{kind} (attached)"
    return Device(ATTACHED, title, platform, memory, device_kinds=(kind,))
