"""Loops over layers, loops that are none, and programs that hold layers inside."""

import jax
import jax.numpy as jnp
import pytest
from chains import (
    WIDTH,
    check_same,
    layer,
    layer_weights,
    scanned_loss,
    stacked,
    table,
    unrolled_loss,
)
from jax.sharding import PartitionSpec as P


def selective_scan(x, w):
    """A loop over time inside a layer, over what the layer computed."""
    h = jnp.einsum("bti,ij->btj", x, w["a"])
    gates, keys = jnp.split(jax.nn.sigmoid(h), 2, -1)

    def step(state, inputs):
        gate, key = inputs
        state = state * gate[..., None] + key[..., None] * key[:, None, :]
        return state, jnp.einsum("bij,bj->bi", state, key)

    state = jnp.zeros((x.shape[0], WIDTH, WIDTH)) + w.get("state", 0.0)
    _, y = jax.lax.scan(step, state, (gates.swapaxes(0, 1), keys.swapaxes(0, 1)))
    return x + y.swapaxes(0, 1)


@pytest.mark.parametrize("state", ["zeros", "learned"])
@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_a_loop_over_time_inside_a_layer_is_no_stack(scan, state):
    def loss(params, x):
        if scan:

            def body(x, w):
                return (selective_scan(x, w), None)

            return jnp.sum(jax.lax.scan(body, x @ jnp.eye(WIDTH), params)[0])
        x = x @ jnp.eye(WIDTH)
        for i in range(3):
            x = selective_scan(x, jax.tree.map(lambda w, i=i: w[i], params))
        return jnp.sum(x)

    params = {"a": stacked(3)["a"]}
    if state == "learned":
        params["state"] = jnp.ones((3, WIDTH, WIDTH))
    chain = check_same(loss, params, jnp.ones((2, 5, WIDTH)))
    assert [(s.num_layers, s.scanned) for s in chain.stacks] == [(3, scan)]


def test_a_recurrent_network_is_no_stack():
    def loss(params, x):
        def cell(h, x):
            return (jnp.tanh(h @ params["h"] + x @ params["x"]), None)

        h = x[0] @ params["x"]
        return jnp.sum(jax.lax.scan(cell, h, x)[0])

    params = {"h": jnp.eye(WIDTH), "x": jnp.ones((5, WIDTH))}
    chain = check_same(loss, params, jnp.ones((7, 2, 5)))
    assert chain.stacks == ()


def test_a_loop_over_chunks_of_the_loss_is_no_stack():
    def loss(params, x, labels):
        def body(x, w):
            return (layer(x, w), None)

        x, _ = jax.lax.scan(body, x @ jnp.eye(WIDTH), params["layers"])

        def chunk(total, inputs):
            x, label = inputs
            logits = jax.nn.log_softmax(x @ params["table"].T)
            return total - jnp.take(logits, label), None

        return jax.lax.scan(jax.checkpoint(chunk), 0.0, (x, labels))[0]

    params = {"layers": stacked(3), "table": table()}
    chain = check_same(loss, params, jnp.ones((4, WIDTH)), jnp.arange(4))
    assert [(s.num_layers, s.scanned) for s in chain.stacks] == [(3, True)]
    assert chain.stages[-1].flops == 4 * 2 * WIDTH * 11


def test_a_loop_that_takes_its_weights_by_number_is_a_stack():
    def loss(params, x):
        def body(i, x):
            return layer(x, jax.tree.map(lambda w: w[i], params))

        return jnp.sum(jax.lax.fori_loop(0, 5, body, x))

    chain = check_same(loss, stacked(5), jnp.ones((3, WIDTH)))
    assert [(s.num_layers, s.scanned) for s in chain.stacks] == [(5, True)]


def test_tied_layers_in_a_loop_are_a_stack():
    def loss(params, x):
        def body(x, _):
            return (layer(x, params), None)

        return jnp.sum(jax.lax.scan(body, x, None, length=6)[0])

    chain = check_same(loss, layer_weights(0), jnp.ones((3, WIDTH)))
    assert [(s.num_layers, s.scanned) for s in chain.stacks] == [(6, True)]


def test_nested_loops_over_layers_are_the_outer_one():
    @jax.checkpoint
    def inner(x, ws):
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)

    def loss(params, x):
        grouped = jax.tree.map(lambda w: w.reshape(2, 3, *w.shape[1:]), params)
        return jnp.sum(jax.lax.scan(inner, x, grouped)[0])

    chain = check_same(loss, stacked(6), jnp.ones((3, WIDTH)))
    assert [(s.num_layers, s.scanned) for s in chain.stacks] == [(2, True)]


@pytest.mark.parametrize("loss", [scanned_loss, unrolled_loss])
def test_layers_are_found_inside_a_loop_over_microbatches(loss):
    def total(params, batch):
        def add(sum, x):
            return (sum + loss(params, x), None)

        return jax.lax.scan(add, 0.0, batch)[0] / len(batch)

    chain = check_same(total, stacked(4), jnp.ones((3, 2, WIDTH)))
    (stack,) = chain.stacks
    assert stack.num_layers == 4
    assert stack.stages[0].times == 3
    assert len(stack.stages[0].place) == 2


@pytest.mark.parametrize("loss", [scanned_loss, unrolled_loss])
@pytest.mark.parametrize("wrap", ["jit", "shard_map", "checkpoint"])
def test_layers_are_found_inside_a_call(loss, wrap):
    if wrap == "shard_map":
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((1,), ("data",), axis_types=auto)
        fn = jax.shard_map(
            lambda w, x: jax.lax.psum(loss(w, x), "data"),
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P(),
        )
    else:
        fn = jax.jit(loss) if wrap == "jit" else jax.checkpoint(loss)
    chain = check_same(fn, stacked(4), jnp.ones((2, WIDTH)), remat=False)
    (stack,) = chain.stacks
    assert stack.num_layers == 4
    assert len(stack.stages[0].place) == (0 if wrap == "jit" else 2)


def test_layers_are_found_behind_a_condition():
    def loss(params, x):
        return jax.lax.cond(x[0, 0] > 0, unrolled_loss, lambda *_: 0.0, params, x)

    chain = check_same(loss, stacked(4), jnp.ones((3, WIDTH)))
    (stack,) = chain.stacks
    assert stack.num_layers == 4 and stack.stages[0].place[1].startswith("branches")


def test_a_loop_of_one_layer_is_a_stack():
    chain = check_same(scanned_loss, stacked(1), jnp.ones((3, WIDTH)))
    assert [(s.num_layers, s.scanned) for s in chain.stacks] == [(1, True)]
