"""How to compile for a chip that is not here: its description, and what it takes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pathlib
from typing import Any

from jax.experimental import topologies

from jaxckpt.devices.device import Device
from jaxckpt.errors import DeviceError

_CUDA_MAJORS = (13, 12)

_PROTO = """\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {target.shared_memory_bytes_per_multiprocessor}
  threads_per_core_limit: 2048
  core_count: {target.multiprocessors}
  fpus_per_core: {target.fp_units_per_multiprocessor}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {memory_bandwidth}
  l2_cache_size: {target.l2_bytes}
  clock_rate_ghz: {clock_ghz}
  device_memory_size: {device.memory_bytes}
  shared_memory_per_block_optin: {target.shared_memory_bytes_per_block_opt_in}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{device.name}"
"""


def target_config(device: Device) -> str:
    """Return the text proto (XLA's `GpuTargetConfigProto`) that describes `device`.

    Raises:
        DeviceError: The device has no compiler numbers (it is not of the catalogue).
    """
    target = device.target
    if target is None or device.memory_bytes_per_second is None:
        raise DeviceError(
            f"`{device.name}` ({device.title}) has no compiler target numbers, so "
            "nothing can be compiled for it while it is absent. Use a catalogue chip."
        )
    major, minor = target.compute_capability.split(".")
    return _PROTO.format(
        device=device,
        target=target,
        memory_bandwidth=round(device.memory_bytes_per_second),
        clock_ghz=target.clock_hertz / 1e9,
        major=major,
        minor=minor,
    )


def topology_arguments(device: Device, count: int = 1) -> dict[str, Any]:
    """Return the keywords of `get_topology_desc` for `count` chips in one host.

    `topology` is slices x hosts x chips per host.
    """
    if count < 1:
        raise DeviceError(f"`count={count}` is not a number of devices. Use 1 or more.")
    return {
        "topology_name": device.name,
        "platform": "cuda",
        "target_config": target_config(device),
        "topology": f"1x1x{count}",
    }


def topology_devices(device: Device, count: int = 1) -> list[Any]:
    """Return JAX devices of `count` absent chips: shard abstract arrays over them.

    Args:
        device: A chip of the catalogue.
        count: Number of chips in one host.

    Raises:
        DeviceError: The chip cannot be compiled for here; says why.
    """
    if (reason := can_compile(device)) is not None:
        raise DeviceError(f"Cannot compile for `{device.name}`: {reason}")
    return topologies.get_topology_desc(**topology_arguments(device, count)).devices


def can_compile(device: Device) -> str | None:
    """Return None where `device` can be compiled for here, else the reason.

    An attached device always can. An absent chip needs the CUDA plugin wheels, of
    exactly jaxlib's version, but neither a GPU nor a driver.
    """
    if device.is_attached:
        return None
    if device.target is None:
        return "it has no compiler target numbers (it is not a chip of the catalogue)."
    return _missing_plugin(_installed_plugins(), importlib.metadata.version("jaxlib"))


def plugin_version() -> str | None:
    """Return the CUDA plugin's name and version (`"cuda12 0.10.2"`), or None."""
    for major, (plugin, compiler) in _installed_plugins().items():
        if plugin and compiler:
            return f"cuda{major} {compiler}"
    return None


def _installed_plugins() -> dict[int, tuple[str | None, str | None]]:
    """Return, by CUDA version, the versions of the plugin's two wheels."""
    return {
        major: (_version(f"jax-cuda{major}-plugin"), _version(f"jax-cuda{major}-pjrt"))
        for major in _CUDA_MAJORS
    }


def _missing_plugin(
    installed: dict[int, tuple[str | None, str | None]], jaxlib: str
) -> str | None:
    """Return why none of the `installed` plugins can compile for `jaxlib`."""
    fix = f"jax-cuda12-plugin=={jaxlib} and jax-cuda12-pjrt=={jaxlib}"
    install = f"`pip install 'jaxckpt[aot]'` installs it ({fix})."
    if (jaxlib, jaxlib) in installed.values():
        return None
    present = {m: pair for m, pair in installed.items() if any(pair)}
    if not present:
        return f"XLA's compiler for CUDA is not installed. {install}"
    major, pair = next(iter(present.items()))
    if not all(pair):
        lacking = f"jax-cuda{major}-{'pjrt' if pair[0] else 'plugin'}"
        return f"half of the CUDA plugin is missing: `{lacking}`. {install}"
    return (
        f"the CUDA plugin is of version {'/'.join(dict.fromkeys(map(str, pair)))}, "
        f"but jaxlib is {jaxlib}; they must be equal. {install}"
    )


def has_cudnn_wheels() -> bool:
    """Whether cuDNN and cuBLAS are installed as wheels, for cuDNN's fused attention.

    `pip install 'jaxckpt[cudnn]'` installs them; the compiler then opens them without
    a GPU.
    """
    return _has_library("cudnn", "libcudnn.so.9") and (
        _has_library("cublas", "libcublas.so.12")
        or _has_library("cu13", "libcublas.so.13")
    )


def _has_library(package: str, library: str) -> bool:
    try:
        spec = importlib.util.find_spec(f"nvidia.{package}")
    except ModuleNotFoundError:
        return False
    roots = (spec.submodule_search_locations or []) if spec else []
    return any((pathlib.Path(root) / "lib" / library).exists() for root in roots)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
