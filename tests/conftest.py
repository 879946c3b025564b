"""Settings of the whole suite: platform, checked annotations, and what can run here."""

import importlib.util
import os

import pytest
from jaxtyping import install_import_hook

# Before anything imports JAX. To run the `gpu` tests, set JAX_PLATFORMS=cuda,cpu.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

# From here on, calls check their arguments and results against the annotations, array
# shapes included. An int may stand where a float is declared, as for pyright.
install_import_hook(
    ["jaxckpt", "models"],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)

CUDA_PLUGINS = "jax_cuda12_plugin", "jax_cuda13_plugin"


def pytest_configure(config):
    """Keep compiled results beside pytest's own cache, not in the user's."""
    if hasattr(config, "cache"):
        os.environ.setdefault("JAXCKPT_CACHE", str(config.cache.mkdir("jaxckpt")))


def pytest_collection_modifyitems(items):
    """Skip what this machine cannot do, and say why."""
    has_plugin = any(importlib.util.find_spec(name) for name in CUDA_PLUGINS)
    for item in items:
        if item.get_closest_marker("aot") and not has_plugin:
            item.add_marker(pytest.mark.skip(reason="needs the extra `aot`"))
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs an attached NVIDIA GPU"))


def _has_gpu():
    import jax

    return any(device.platform == "gpu" for device in jax.devices())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Under JAX_REMAT3, skip the cases that jaxckpt refuses; `-rs` lists them."""
    report = yield
    refusal = str(call.excinfo.value) if call.excinfo else ""
    refused = refusal.startswith("`") and "JAX_REMAT3" in refusal
    if refused and os.environ.get("JAX_REMAT3", "0") == "1" and report.failed:
        report.outcome = "skipped"
        file, line, _ = item.location
        report.longrepr = (file, line or 0, f"Skipped: refused: {refusal}")
    return report
