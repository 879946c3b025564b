"""Chips, the active one, and what it takes to compile for one that is not here."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest

from jaxckpt.devices import (
    active_device,
    can_compile,
    catalog,
    get_device,
    has_cudnn_wheels,
    target,
    target_config,
    topology_devices,
    use,
)
from jaxckpt.errors import DeviceError

CHIPS = list(catalog())


@pytest.mark.parametrize("name", CHIPS)
def test_catalog_chip_has_every_number(name):
    device = get_device(name)
    assert device.name == name
    numbers = dataclasses.asdict(device) | dataclasses.asdict(device.target)
    optional = {"nvlink_bytes_per_second"}
    assert all(value for key, value in numbers.items() if key not in optional)


@pytest.mark.parametrize(
    ("name", "teraflops"), [("a100-80gb", 19.5), ("h100-80gb", 66.9), ("rtx4090", 82.6)]
)
def test_float32_rate_is_the_datasheet_s(name, teraflops):
    rate = get_device(name).float32_flops_per_second
    assert rate == pytest.approx(teraflops * 1e12, rel=0.01)


def test_unknown_device_names_the_near_ones():
    with pytest.raises(DeviceError, match=r"`h1000`.*Did you mean `h100-80gb`"):
        get_device("h1000")


def test_get_device_takes_a_device():
    slow = dataclasses.replace(get_device("h200"), efficiency=0.5)
    assert get_device(slow) is slow


@pytest.mark.parametrize("efficiency", [0.0, -1.0, 1.5])
def test_efficiency_outside_its_range_is_refused(efficiency):
    with pytest.raises(DeviceError, match="efficiency"):
        dataclasses.replace(get_device("h200"), efficiency=efficiency)


def attach(monkeypatch, kind, stats=None):
    """Make JAX list one GPU of `kind`."""
    fake = types.SimpleNamespace(
        device_kind=kind, platform="gpu", memory_stats=lambda: stats
    )
    monkeypatch.setattr(jax, "devices", lambda: [fake])


def test_attached_chip_of_the_catalog_is_recognised(monkeypatch):
    attach(monkeypatch, "NVIDIA H200")
    device = get_device("attached")
    assert device.is_attached
    assert device.peak_flops_per_second == get_device("h200").peak_flops_per_second
    assert can_compile(device) is None


def test_attached_chip_of_another_kind_knows_its_memory_only(monkeypatch):
    attach(monkeypatch, "NVIDIA H100 PCIe", {"bytes_limit": 123})
    device = get_device("attached")
    assert (device.platform, device.memory_bytes) == ("cuda", 123)
    assert device.peak_flops_per_second is None


def test_active_device_is_the_innermost_and_ends_with_its_block():
    with use("h200"):
        with pytest.raises(KeyError), use("l40s") as inner:
            assert active_device() is inner
            raise KeyError
        assert active_device().name == "h200"
    assert active_device() is None


def test_jitted_function_is_traced_again_for_another_device():
    seen = []

    @jax.jit
    def f(x):
        seen.append(active_device().name)
        return x

    for name in ("h200", "l40s", "h200"):
        with use(name):
            jax.eval_shape(f, 1.0)
    assert seen[:2] == ["h200", "l40s"]


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        ({}, r"not installed.*jaxckpt\[aot\].*jax-cuda12-plugin==0.10.2"),
        ({12: (None, None)}, "not installed"),
        ({12: ("0.10.2", None)}, "`jax-cuda12-pjrt`"),
        ({13: (None, "0.10.2")}, "`jax-cuda13-plugin`"),
        ({12: ("0.10.1", "0.10.1")}, r"version 0.10.1, but jaxlib is 0.10.2"),
        ({12: ("0.10.2", "0.10.1")}, r"version 0.10.2/0.10.1, but jaxlib"),
    ],
)
def test_missing_plugin_is_explained(installed, reason):
    match = pytest.raises(AssertionError, match=reason)
    with match:
        raise AssertionError(target._missing_plugin(installed, "0.10.2"))


@pytest.mark.parametrize("major", [12, 13])
def test_plugin_of_jaxlib_s_version_is_enough(major):
    installed = {12: ("0.10.1", None), major: ("0.10.2", "0.10.2")}
    assert target._missing_plugin(installed, "0.10.2") is None


def test_target_config_carries_the_chip_s_numbers():
    text = target_config(get_device("l40s"))
    for line in ["core_count: 142", "major: 8 minor: 9", "clock_rate_ghz: 2.52"]:
        assert line in text


def test_attached_device_has_no_target_config():
    with pytest.raises(DeviceError, match="no compiler target numbers"):
        target_config(get_device("attached"))


def test_cudnn_needs_both_wheels(tmp_path, monkeypatch):
    monkeypatch.setattr(target.importlib.util, "find_spec", find_in(tmp_path))
    assert not has_cudnn_wheels()
    add_library(tmp_path, "cudnn", "libcudnn.so.9")
    assert not has_cudnn_wheels()
    add_library(tmp_path, "cublas", "libcublas.so.12")
    assert has_cudnn_wheels()


def find_in(root):
    """Return a `find_spec` that knows the packages under `root` only."""

    def find_spec(name):
        folder = root / name.removeprefix("nvidia.")
        spec = types.SimpleNamespace(submodule_search_locations=[str(folder)])
        return spec if folder.exists() else None

    return find_spec


def add_library(root, package, library):
    folder = root / package / "lib"
    folder.mkdir(parents=True)
    (folder / library).touch()


@pytest.mark.aot
def test_topology_has_as_many_devices_as_asked():
    assert len(topology_devices(get_device("h100-80gb"), 8)) == 8


def test_topology_of_no_devices_is_refused(monkeypatch):
    monkeypatch.setattr(target, "can_compile", lambda device: None)
    with pytest.raises(DeviceError, match="`count=0`"):
        topology_devices(get_device("h100-80gb"), 0)


def test_topology_without_the_wheels_says_what_to_install(monkeypatch):
    monkeypatch.setattr(target, "_installed_plugins", dict)
    with pytest.raises(DeviceError, match=r"jaxckpt\[aot\]"):
        topology_devices(get_device("h100-80gb"))


def test_device_is_hashable_and_abstract_tracing_sees_it():
    assert len({*catalog().values()}) == len(CHIPS)
    with use("h200"):
        out = jax.eval_shape(lambda: jnp.zeros(active_device().target.multiprocessors))
    assert out.shape == (132,)
