"""Bytes on one device: told by types, by `shard_map`, or followed from arguments."""

import json

import helpers
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import jaxckpt

MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
AUTO = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def sharded(mesh, shape, *spec):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


@pytest.mark.parametrize("mesh", [MESH, AUTO], ids=["explicit", "auto"])
def test_bytes_are_those_of_one_device(mesh):
    x, w = sharded(mesh, (8, 16), "data"), sharded(mesh, (16, 6), None, "model")
    graph = jaxckpt.trace(lambda w, x: jnp.sin(x @ w), w, x, argnums=None)
    assert [v.bytes for v in graph.values] == [4 * 2 * 3] * 2
    kept = [r for r in graph.residuals if not r.argument]
    assert [(r.primitive, r.shape, r.bytes) for r in kept] == [("cos", (8, 6), 24)]


def test_inside_shard_map_bytes_are_those_of_one_device():
    rows, columns = PartitionSpec("data"), PartitionSpec(None, "model")
    local = lambda w, x: jnp.sin(x @ w)  # noqa: E731
    fn = jax.shard_map(
        local,
        mesh=AUTO,
        in_specs=(columns, rows),
        out_specs=PartitionSpec("data", "model"),
    )
    x, w = sharded(AUTO, (8, 16), "data"), sharded(AUTO, (16, 6), None, "model")
    graph = jaxckpt.trace(lambda w, x: fn(w, x) * 2, w, x, argnums=None)
    found = {v.primitive: v.bytes for v in graph.values}
    assert (found["dot_general"], found["sin"], found["mul"]) == (24, 24, 24)
    product = next(e for e in graph.equations if e.primitive == "dot_general")
    assert product.flops == 2 * 8 * 16 * 6  # on all devices
    assert product.bytes == 4 * (2 * 16 + 16 * 3 + 2 * 3)  # on one


def test_constraints_and_loops_are_followed():
    def fn(ws, x):
        def step(c, w):
            c = jnp.tanh(c @ w).reshape(4, 2, 16).transpose(1, 0, 2).reshape(8, 16)
            spec = NamedSharding(AUTO, PartitionSpec("data"))
            return lax.with_sharding_constraint(c, spec), jnp.sum(c, axis=1)

        return lax.scan(step, jnp.cos(x), ws)

    ws = jax.ShapeDtypeStruct((3, 16, 16), jnp.float32)
    x = sharded(AUTO, (8, 16), ("data", "model"))
    graph = jaxckpt.trace(fn, ws, x, argnums=None)
    found = {v.primitive: v.bytes for v in graph.values}
    assert found["cos"] == 8 * 16 * 4 // 8
    assert found["sharding_constraint"] == 8 * 16 * 4 // 4


FSDP = """
import json, math
import jax, jaxckpt
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxckpt import _jax
from models import gpt, llama

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

def placed(leaf, axis):
    spec = P(*[None] * axis, "data") if leaf.shape and not leaf.shape[axis] % 8 else P()
    sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

def largest(leaf):
    axis = max(range(leaf.ndim), key=lambda i: leaf.shape[i], default=0)
    return placed(leaf, axis)

def sizes(model, **settings):
    work = model.tiny(num_layers=2, batch=8, seq=16, **settings)
    params = jax.tree.map(largest, work.params)
    batch = jax.tree.map(lambda leaf: placed(leaf, 0), work.batch)
    graph = jaxckpt.trace(work.loss_fn, params, batch)
    program = graph._split.linearized()
    outputs = _jax.open_jaxpr(program.closed).outvars[program.num_outputs:]
    run = jax.jit(_jax.jaxpr_function(program.closed))
    compiled = run.lower(*jax.tree.leaves((params, batch))).compile()
    real = {}
    for v, s in zip(outputs, compiled.output_shardings[program.num_outputs:]):
        if not isinstance(v, _jax.Literal):
            part = math.prod(s.shard_shape(v.aval.shape)) * v.aval.dtype.itemsize
            real.setdefault(v, part)
    pairs = [(r, b) for r, b in zip(graph.residuals, real.values()) if r.held]
    return sum(r.bytes for r, _ in pairs), sum(b for _, b in pairs)

cases = [(gpt, {}), (gpt, {"scan": False}), (llama, {"policy": "full"})]
print(json.dumps([sizes(model, **settings) for model, settings in cases]))
"""


def test_bytes_of_fsdp_residuals_are_the_compilers():
    flags = "--xla_force_host_platform_device_count=8"
    for ours, compiled in json.loads(helpers.run_python(FSDP, XLA_FLAGS=flags)):
        assert ours == compiled > 0
