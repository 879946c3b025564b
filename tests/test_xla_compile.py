"""Compiling apart: footprints, the cache, and compilers that crash, hang or swell."""

import os
import pathlib
import signal
import time
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxckpt.devices import active_device, catalog, get_device
from jaxckpt.errors import CompileError, DeviceError
from jaxckpt.xla import Footprint, compile_for, process, time_step
from jaxckpt.xla import compile as compile_module
from jaxckpt.xla.export import export_program
from jaxckpt.xla.process import Limits, run_compiler

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)
State = namedtuple("State", ["step", "weights"])


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXCKPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def step(state, x):
    """Return a new state like the old one, and a number."""
    weights = state.weights - 0.1 * (x @ state.weights)
    return State(state.step + 1, weights), weights.sum()


def abstract_state():
    return State(jax.ShapeDtypeStruct((), jnp.int32), X)


def test_peak_counts_shared_memory_once():
    assert Footprint(100, 60, 40, 50, host_bytes=7).peak_bytes == 150


# --- Exporting -----------------------------------------------------------------------


def test_exported_bytes_do_not_depend_on_file_and_line():
    source = "def f(x):\n    return jnp.tanh(x) @ x\n"
    programs = []
    for file, text in [("one.py", source), ("/other/two.py", "\n\n\n" + source)]:
        names = {"jnp": jnp}
        exec(compile(text, file, "exec"), names)
        programs.append(export_program(names["f"], [X]).serialized)
    assert programs[0] == programs[1]


def test_exported_bytes_depend_on_the_program():
    assert export_program(jnp.sin, [X]) != export_program(jnp.cos, [X])


@pytest.mark.parametrize("donate", [0, (0,), None])
def test_donated_arguments_are_found(donate):
    fn = step if donate is not None else jax.jit(step, donate_argnums=0)
    assert export_program(fn, [abstract_state(), X], donate).donated == (0, 1)


def test_nothing_is_donated_unless_asked_for():
    assert export_program(step, [abstract_state(), X]).donated == ()


def test_export_allows_any_custom_call():
    assert export_program(unknown_call, [X]).serialized


def unknown_call(x):
    return jax.ffi.ffi_call("jaxckpt_no_such_call", X)(x)


# --- Compiling for an absent chip ----------------------------------------------------


@pytest.mark.aot
@pytest.mark.parametrize("name", list(catalog()))
def test_every_chip_compiles(name, cache_folder):
    result = compile_for(step, abstract_state(), X, device=name, donate_argnums=0)
    size = 64 * 64 * 4
    assert result.footprint.argument_bytes == 2 * size + 4
    assert result.footprint.alias_bytes == size + 4
    assert result.hlo_text.startswith("HloModule")
    assert not result.from_cache


@pytest.mark.aot
def test_host_memory_is_counted_apart(cache_folder):
    def f(x):
        return jax.device_put(jnp.sin(x), jax.memory.Space.Host), x @ x

    footprint = compile_for(f, X, device="h100-80gb").footprint
    size = 64 * 64 * 4
    assert (footprint.host_bytes, footprint.argument_bytes) == (size, size)
    assert footprint.output_bytes < 2 * size


@pytest.mark.aot
def test_program_is_traced_for_its_device(cache_folder):
    seen = []

    def f(x):
        seen.append(active_device().name)
        return x + 1

    compile_for(jax.jit(f), X, device="h200")
    compile_for(jax.jit(f), X, device="l40s")
    assert set(seen) == {"h200", "l40s"}


@pytest.mark.aot
def test_compiler_s_refusal_is_told_in_one_line():
    with pytest.raises(CompileError, match=r"h200.*jaxckpt_no_such_call") as caught:
        compile_for(unknown_call, X, device="h200", cache=False)
    assert "\n" not in str(caught.value)


@pytest.mark.aot
def test_real_compiler_over_its_memory_limit_is_stopped():
    with pytest.raises(CompileError, match=r"more than 0\.03 GiB of host memory"):
        compile_for(jnp.sin, X, device="h200", memory_limit_bytes=2**25, cache=False)


@pytest.mark.aot
def test_real_compiler_over_its_time_limit_is_stopped():
    with pytest.raises(CompileError, match=r"longer than 0\.2 s"):
        compile_for(jnp.sin, X, device="h200", time_limit_seconds=0.2, cache=False)


def test_missing_wheels_are_an_error_that_says_what_to_install(monkeypatch):
    reason = "not installed: `pip install 'jaxckpt[aot]'`"
    monkeypatch.setattr(compile_module, "can_compile", lambda device: reason)
    with pytest.raises(DeviceError, match=r"`h200`: not installed.*jaxckpt\[aot\]"):
        compile_for(jnp.sin, X, device="h200")


# --- The cache -----------------------------------------------------------------------


@pytest.mark.aot
def test_second_compile_is_read_from_disk(cache_folder):
    first = compile_for(jnp.sin, X, device="h200")
    again = compile_for(jnp.sin, X, device="h200")
    assert (first.from_cache, again.from_cache) == (False, True)
    assert (again.footprint, again.hlo_text) == (first.footprint, first.hlo_text)
    assert again.compile_seconds == first.compile_seconds
    assert len(list(cache_folder.iterdir())) == 1


@pytest.mark.aot
@pytest.mark.parametrize("damage", ["truncated", "changed", "emptied"])
def test_damaged_entry_is_compiled_again_and_replaced(cache_folder, damage):
    first = compile_for(jnp.sin, X, device="h200")
    (entry,) = cache_folder.iterdir()
    whole = entry.read_bytes()
    middle = len(whole) // 2
    flipped = bytes([whole[middle] ^ 1])
    entry.write_bytes(
        {
            "truncated": whole[:middle],
            "changed": whole[:middle] + flipped + whole[middle + 1 :],
            "emptied": b"",
        }[damage]
    )
    again = compile_for(jnp.sin, X, device="h200")
    assert not again.from_cache
    assert again.footprint == first.footprint
    assert compile_for(jnp.sin, X, device="h200").from_cache


def test_cache_key_depends_on_all_that_decides(monkeypatch):
    program = export_program(jnp.sin, [X])
    keys = {compile_module._cache_key(program, get_device("h200"))}
    keys.add(compile_module._cache_key(program, get_device("h100-80gb")))
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    keys.add(compile_module._cache_key(program, get_device("h200")))
    monkeypatch.setattr(compile_module, "toolchain_versions", dict)
    keys.add(compile_module._cache_key(program, get_device("h200")))
    assert len(keys) == 4


def test_cache_that_cannot_be_written_only_warns(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXCKPT_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="Cannot write the compile cache"):
        compile_module.disk.write_entry("key", {"a": 1})
    assert compile_module.disk.read_entry("key") is None


# --- Compilers that fail -------------------------------------------------------------

REPORT_PID = "import os, pathlib, sys; print('last words', flush=True)\n"
SLEEP = """
import subprocess, time
nap = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(nap)
pathlib.Path(os.environ["PIDS"]).write_text(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""
SWELL = """
import time
held = []
while len(held) < 100:
    held.append(b"x" * 2**25)
    time.sleep(0.02)
"""


def run_fake(program, tmp_path, monkeypatch, **limits):
    """Run a Python text in place of the compiler."""
    file = tmp_path / "fake_compiler.py"
    file.write_text(REPORT_PID + program)
    monkeypatch.setattr(process, "CHILD_PROGRAM", file)
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    limits = Limits(**{"seconds": 60.0} | limits)
    return run_compiler({}, b"", target="h200", limits=limits)


def assert_all_dead(tmp_path):
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        assert is_dead(pid)


def is_dead(pid):
    """Whether a process ends within a second; one that nobody reaps counts as dead."""
    for _ in range(20):
        try:
            state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
        except OSError:
            return True
        if state.split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_crash_is_an_error_with_the_last_words(tmp_path, monkeypatch):
    with pytest.raises(CompileError, match=r"`h200`.*crashed \(SIGABRT\)") as caught:
        run_fake("os.abort()", tmp_path, monkeypatch)
    assert "last words" in str(caught.value)


def test_hang_is_stopped_with_all_that_it_started(tmp_path, monkeypatch):
    with pytest.raises(CompileError, match=r"longer than 3 s.*time_limit_seconds"):
        run_fake(SLEEP, tmp_path, monkeypatch, seconds=3.0)
    assert_all_dead(tmp_path)


def test_swelling_is_stopped(tmp_path, monkeypatch):
    with pytest.raises(CompileError, match=r"0\.25 GiB of host memory"):
        run_fake(SWELL, tmp_path, monkeypatch, host_bytes=2**28)


def test_kill_from_outside_is_laid_to_the_kernel(tmp_path, monkeypatch):
    program = f"os.kill(os.getpid(), {int(signal.SIGKILL)})"
    with pytest.raises(CompileError, match="most likely by the kernel"):
        run_fake(program, tmp_path, monkeypatch)


@pytest.mark.parametrize("program", ["", "raise SystemExit(3)"])
def test_end_without_a_result_is_an_error(program, tmp_path, monkeypatch):
    with pytest.raises(CompileError, match=r"without a result|ended with status 3"):
        run_fake(program, tmp_path, monkeypatch)


def test_interrupt_stops_the_compiler(tmp_path, monkeypatch):
    def interrupt(*_):
        while not (tmp_path / "pids").exists():
            time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "_watch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_fake(SLEEP, tmp_path, monkeypatch)
    assert_all_dead(tmp_path)


def test_compiler_may_not_open_the_attached_chip(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert process._child_environment()["JAX_PLATFORMS"] == "cpu"
    assert os.environ["JAX_PLATFORMS"] == "cuda"


# --- The attached device -------------------------------------------------------------


def concrete():
    return State(jnp.int32(0), jnp.ones((64, 64))), jnp.ones((64, 64)) / 64


def test_attached_device_gives_the_same_record():
    result = compile_for(step, abstract_state(), X, device="attached", donate_argnums=0)
    assert result.footprint.argument_bytes == 2 * 64 * 64 * 4 + 4
    assert result.footprint.alias_bytes == 64 * 64 * 4 + 4
    assert result.executable is not None


def test_timing_passes_a_donated_state_on():
    state, x = concrete()
    record = compile_for(step, state, x, device="attached", donate_argnums=0)
    timed = time_step(record, [state, x], repeats=3)
    assert len(timed.seconds) == 3
    assert min(timed.seconds) <= timed.median_seconds <= max(timed.seconds)
    assert state.weights.is_deleted()


def test_timing_copies_what_is_donated_but_does_not_come_back():
    x = jnp.ones((64, 64))
    time_step(lambda x: x.astype(jnp.int32), [x], donate_argnums=0, repeats=2)
    np.testing.assert_array_equal(x, 1.0)


@pytest.mark.parametrize("repeats", [0, -1])
def test_timing_no_call_is_refused(repeats):
    with pytest.raises(ValueError, match=f"repeats={repeats}"):
        time_step(jnp.sin, [jnp.ones(3)], repeats=repeats)


@pytest.mark.aot
def test_timing_an_absent_chip_is_refused(cache_folder):
    record = compile_for(jnp.sin, X, device="h200")
    with pytest.raises(ValueError, match="`h200`, which is not here"):
        time_step(record, [jnp.ones((64, 64))])
