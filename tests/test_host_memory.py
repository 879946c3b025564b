"""Optimizer state on the host: the same numbers, fewer device bytes, copies in turn."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxlib.mlir import ir

from jaxckpt import host_memory
from jaxckpt.devices import get_device, topology_devices, use
from jaxckpt.errors import DeviceError, WorkloadError
from jaxckpt.host_memory import (
    THRESHOLD_BYTES,
    keep_on_host,
    supports_host_memory,
    to_device,
    to_host,
)
from jaxckpt.training import TrainState, abstract_state, make_train_step, train_step_fn
from jaxckpt.xla import compile_for

WIDTH, LAYERS = 256, 4
BATCH = np.linspace(-1, 1, 8 * WIDTH, dtype=np.float32).reshape(8, WIDTH)
MATRIX = WIDTH * WIDTH * 4

OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "trace": optax.trace(0.9),  # its updates are its state
    "stateless": optax.sgd(1e-2),
    "global": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "conditional": optax.apply_if_finite(optax.adam(1e-2), 3),
    "average": optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "every_second": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
}


def _loss(params, batch):
    x = batch
    for weights in params["weights"]:
        x = jnp.tanh(x @ weights + params["bias"])
    return jnp.mean((x - 0.5) ** 2)


def _params():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / 16 for key in keys]
    return {"weights": weights, "bias": jnp.zeros(WIDTH)}


def _train(optimizer, steps, **settings):
    begins = keep_on_host(optimizer) if settings.get("offload_optimizer") else optimizer
    state = TrainState.create(_params(), begins, jax.random.key(1))
    # One program for all steps: states come back to the memory that they came from.
    step = make_train_step(_loss, optimizer, **settings).lower(state, BATCH).compile()
    losses = []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return state, losses


def _kinds(tree):
    return [x.sharding.memory_kind for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_with_the_state_on_the_host_gives_the_same(name):
    plain, plain_losses = _train(OPTIMIZERS[name], 5)
    moved, losses = _train(OPTIMIZERS[name], 5, offload_optimizer=True)
    chex.assert_trees_all_equal_structs(moved, plain)
    chex.assert_trees_all_close(losses, plain_losses, rtol=1e-5)
    chex.assert_trees_all_close(moved, plain, rtol=1e-4, atol=1e-6)


def test_settings_of_the_step_hold_with_offload_too():
    settings = {"accumulate": 2, "clip_norm": 0.01}
    plain, _ = _train(OPTIMIZERS["adamw"], 3, **settings)
    moved, _ = _train(OPTIMIZERS["adamw"], 3, offload_optimizer=True, **settings)
    chex.assert_trees_all_close(moved, plain, rtol=1e-4, atol=1e-6)


def test_large_leaves_of_the_state_alone_stay_on_the_host():
    state, _ = _train(OPTIMIZERS["adamw"], 2, offload_optimizer=True)
    moments = state.opt_state[0]
    for tree in (moments.mu, moments.nu):
        assert _kinds(tree) == ["device"] + ["pinned_host"] * LAYERS
    assert _kinds(moments.count) == ["device"]
    assert set(_kinds(state.params)) == {"device"}


@pytest.mark.parametrize("threshold", [1, 400, 401, THRESHOLD_BYTES])
def test_threshold_is_the_fewest_bytes_that_move(threshold):
    tree = {"a": jnp.ones(100), "b": jnp.ones(()), "c": np.ones(2**14, np.float32)}
    moved = to_host(tree, threshold_bytes=threshold)
    expected = [x.nbytes >= threshold for x in jax.tree.leaves(tree)]
    spaces = [str(jax.typeof(x)) for x in jax.tree.leaves(moved)]
    assert ["<host>" in space for space in spaces] == expected
    chex.assert_trees_all_equal(to_device(moved), tree)
    assert set(_kinds(to_device(moved))) == {"device"}


def test_random_keys_and_plain_numbers_stay():
    tree = {"key": jax.random.key(0), "number": 3.0}
    moved = to_host(tree, threshold_bytes=1)
    assert moved["number"] == 3.0
    assert _kinds(moved["key"]) == ["device"]


def test_parameters_move_too():
    params = to_host(_params())
    expected = jax.grad(_loss)(_params(), BATCH)
    grads = jax.jit(lambda p: jax.grad(_loss)(to_device(p), BATCH))(params)
    chex.assert_trees_all_close(grads, expected, rtol=1e-5, atol=1e-7)
    assert "pinned_host" in _kinds(params)


# --- Errors --------------------------------------------------------------------------


def test_state_on_the_device_is_an_error_that_says_how_to_move_it():
    optimizer = OPTIMIZERS["adamw"]
    state = TrainState.create(_params(), optimizer, jax.random.key(1))
    step = make_train_step(_loss, optimizer, offload_optimizer=True)
    with pytest.raises(WorkloadError, match=r"`\[0\]\.mu\['weights'\]\[0\]` is in dev"):
        step(state, BATCH)
    state = dataclasses.replace(state, opt_state=to_host(state.opt_state))
    assert int(step(state, BATCH)[0].step) == 1


def test_threshold_below_one_is_an_error():
    for call in (to_host, keep_on_host):
        with pytest.raises(WorkloadError, match="`threshold_bytes=0` is not a number"):
            call(optax.identity(), threshold_bytes=0)


def test_device_without_host_memory_is_an_error(monkeypatch):
    monkeypatch.setattr(host_memory, "supports_host_memory", lambda device: False)
    with pytest.raises(DeviceError, match="has no pinned host memory"):
        to_host(jnp.ones(2**14))


# --- Bytes, by the compiler of a GPU that is not here ---------------------------------


@pytest.fixture
def wide(monkeypatch):
    """Layers of 4 MiB each, so that states outweigh everything else."""
    monkeypatch.setitem(globals(), "WIDTH", 1024)
    monkeypatch.setitem(globals(), "LAYERS", 8)
    optimizer = OPTIMIZERS["adamw"]
    state = abstract_state(jax.eval_shape(_params), optimizer)
    batch = jax.ShapeDtypeStruct((8, 1024), jnp.float32)

    def step(**settings):
        return train_step_fn(_loss, optimizer, **settings)

    return step, state, batch


@pytest.mark.aot
def test_offloaded_state_counts_as_host_memory(wide):
    step, *args = wide
    h100 = {"device": "h100-80gb", "donate_argnums": 0}
    plain = compile_for(step(), *args, **h100).footprint
    moved = compile_for(step(offload_optimizer=True), *args, **h100).footprint
    states = 2 * 8 * 2**22
    assert (plain.host_bytes, moved.host_bytes) == (0, states)
    assert plain.argument_bytes - moved.argument_bytes == states
    # The states of three parameters: two on their way back and one in its turn.
    assert plain.peak_bytes - moved.peak_bytes > states - 3 * 2 * 2**22


@pytest.mark.aot
def test_states_are_on_the_device_in_turn(wide):
    step, *args = wide
    plain = _device_bytes(step(), *args, host=False)
    states, largest = 2 * 8 * 2**22, 2 * 2**22
    # Of two parameters at a time, and for each the copy in and the copy back.
    in_turn = _device_bytes(step(offload_optimizer=True), *args, host=True)
    assert in_turn < plain - states + 4 * largest


@pytest.mark.aot
def test_absent_devices_list_no_host_memory():
    assert not supports_host_memory(topology_devices(get_device("h100-80gb"))[0])


def _device_bytes(fn, state, batch, *, host):
    """Return the device bytes of a step whose large states are arguments on the host.

    No sharding can say so for an absent device, so the lowered module is told.
    """
    place = jax.sharding.SingleDeviceSharding(
        topology_devices(get_device("h100-80gb"))[0]
    )
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), (state, batch)
    )
    with use("h100-80gb"):
        lowered = jax.jit(fn, donate_argnums=0, keep_unused=True).lower(*args)
    if host:
        paths = jax.tree_util.tree_leaves_with_path(args)
        _put_on_host(
            lowered.compiler_ir("stablehlo"),
            [
                "opt_state" in jax.tree_util.keystr(path) and leaf.size >= 2**14
                for path, leaf in paths
            ],
        )
    options = {"xla_disable_hlo_passes": "rematerialization"}
    found = lowered.compile(compiler_options=options).memory_analysis()
    used = found.argument_size_in_bytes + found.output_size_in_bytes
    return used + found.temp_size_in_bytes - found.alias_size_in_bytes


def _put_on_host(module, on_host):
    main = next(
        f for f in module.body.operations if f.attributes["sym_name"].value == "main"
    )
    with module.context:
        kinds = [ir.StringAttr.get("pinned_host" if h else "device") for h in on_host]
        changed = [
            ir.DictAttr.get({**{a.name: a.attr for a in old}, "mhlo.memory_kind": kind})
            for old, kind in zip(main.attributes["arg_attrs"], kinds, strict=True)
        ]
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(changed)
