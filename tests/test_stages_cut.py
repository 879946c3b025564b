"""Where programs are cut: several stacks, none, and what is no layer."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from chains import (
    TOKENS,
    WIDTH,
    check_same,
    kinds_of,
    layer,
    layer_weights,
    residual_block,
    stacked,
    summary,
    table,
)


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_encoder_and_decoder_are_two_stacks(scan):
    def run(body, x, ws):
        if scan:
            return jax.lax.scan(lambda x, w: (body(x, w), None), x, ws)[0]
        for i in range(len(ws["a"])):
            x = body(x, jax.tree.map(lambda w, i=i: w[i], ws))
        return x

    def cross(memory, x, w):
        x = layer(x, w)
        scores = jax.nn.softmax(x @ memory.T)
        return x + scores @ memory

    def loss(params, source, target):
        memory = run(layer, params["table"][source], params["encoder"])
        memory = memory / jnp.linalg.norm(memory)
        x = run(
            functools.partial(cross, memory), params["table"][target], params["decoder"]
        )
        return jnp.sum(x @ params["table"].T)

    params = {"encoder": stacked(4), "decoder": stacked(3), "table": table()}
    chain = check_same(loss, params, jnp.arange(5), jnp.arange(3))
    assert summary(chain) == [("layers", 4, scan), ("layers#2", 3, scan)]
    encoder, decoder = chain.stacks
    assert [len(kinds_of(s)) for s in chain.stacks] == [1, 1]
    assert kinds_of(encoder) != kinds_of(decoder)
    hidden, memory = 3 * WIDTH * 4, 5 * WIDTH * 4
    assert {s.carry_bytes for s in decoder.stages} == {hidden + memory}


def test_stages_of_different_widths_are_several_stacks():
    widths = (8, 16, 32)

    def loss(params, x):
        for stage in params:
            x = x @ stage["down"]
            for w in stage["blocks"]:
                x = residual_block(x, w)
        return jnp.sum(x)

    params = [
        {
            "down": jnp.ones((WIDTH if i == 0 else widths[i - 1], width)) / width,
            "blocks": [layer_weights(j, width, 2 * width) for j in range(3)],
        }
        for i, width in enumerate(widths)
    ]
    chain = check_same(loss, params, jnp.ones((4, WIDTH)))
    assert [s.num_layers for s in chain.stacks] == [3, 3, 3]
    assert chain.kinds == 3 + 3 + 1  # blocks, steps down, and the sum


def test_a_chain_without_repeats_is_cut_between_its_blocks():
    widths = (8, 12, 16, 20)

    def loss(params, x):
        x = x @ jnp.eye(WIDTH)
        for w in params:
            x = jax.nn.relu(x @ w["skip"] + jax.nn.relu(x @ w["a"]) @ w["b"])
        return jnp.sum(x)

    params = [
        {
            "skip": jnp.ones((one, two)) / two,
            "a": jnp.ones((one, 3 * one)) / one,
            "b": jnp.ones((3 * one, two)) / two,
        }
        for one, two in itertools.pairwise(widths)
    ]
    chain = check_same(loss, params, jnp.ones((4, WIDTH)))
    assert chain.stacks == ()
    carried = [stage.carry_bytes for stage in chain.stages]
    assert carried == [0, 4 * 8 * 4, 4 * 12 * 4, 4 * 16 * 4]
    assert all(stage.flops for stage in chain.stages)


def test_a_net_with_long_skips_is_cut_between_its_blocks():
    widths = (8, 16, 32)

    def loss(params, x):
        skips = []
        for w in params["down"]:
            x = residual_block(x, w["block"])
            skips.append(x)
            x = x @ w["step"]
        x = residual_block(x, params["middle"])
        for w, skip in zip(params["up"], reversed(skips), strict=True):
            x = residual_block(x @ w["step"] + skip, w["block"])
        return jnp.sum(x)

    def part(one, two, width):
        block = layer_weights(0, width, 2 * width)
        return {"block": block, "step": jnp.ones((one, two)) / two}

    params = {
        "down": [part(a, b, a) for a, b in itertools.pairwise(widths)],
        "middle": layer_weights(1, 32, 64),
        "up": [part(b, a, a) for a, b in [(16, 32), (8, 16)]],
    }
    chain = check_same(loss, params, jnp.ones((4, WIDTH)))
    assert chain.stacks == ()
    assert 4 <= len(chain.stages) <= 10
    middle = max(chain.stages, key=lambda s: s.carry_bytes)
    assert middle.carry_bytes >= 4 * (8 + 16) * 4  # both skips are alive there
    assert all(stage.flops for stage in chain.stages)


def test_a_net_of_equal_widths_with_long_skips_has_layers():
    def loss(params, x):
        skips = []
        for w in params[:3]:
            x = residual_block(x, w)
            skips.append(x)
        for w in params[3:]:
            x = residual_block(x + skips.pop(), w)
        return jnp.sum(x)

    params = [layer_weights(i) for i in range(6)]
    chain = check_same(loss, params, jnp.ones((4, WIDTH)))
    assert sum(s.num_layers for s in chain.stacks) == 6
    row = 4 * WIDTH * 4
    carried = [s.carry_bytes for stack in chain.stacks for s in stack.stages]
    assert carried == [0, row, 2 * row, 3 * row, 2 * row, row]


@pytest.mark.parametrize("count", [1, 2])
def test_few_layers(count):
    def loss(params, tokens):
        x = params["table"][tokens]
        for w in params["layers"]:
            x = layer(x, w)
        return jnp.sum(x @ params["table"].T)

    params = {"table": table(), "layers": [layer_weights(i) for i in range(count)]}
    chain = check_same(loss, params, TOKENS)
    assert [s.num_layers for s in chain.stacks] == ([2] if count == 2 else [])


@pytest.mark.parametrize(
    "fn", [lambda x: jnp.sum(x @ x), lambda x: jnp.sum(jnp.sin(x)), lambda x: x]
)
def test_a_program_that_cannot_be_cut_is_one_stage(fn):
    chain = check_same(fn, jnp.ones((3, 3)))
    assert len(chain.stages) <= 1
    assert chain.stacks == ()


def test_branches_of_a_layer_are_no_layers():
    def loss(params, x):
        q, k, v = (x @ params[name] for name in "qkv")
        return jnp.sum(jax.nn.softmax(q @ k.T) @ v)

    params = dict.fromkeys("qkv", jnp.ones((WIDTH, WIDTH)))
    chain = check_same(loss, params, jnp.ones((5, WIDTH)))
    assert chain.stacks == ()


def test_blocks_of_two_equal_products_are_whole():
    def loss(params, x):
        x = x @ jnp.eye(WIDTH)
        for w in params:
            x = jax.nn.relu(x + jax.nn.relu(x @ w["a"]) @ w["b"])
        return jnp.sum(x)

    params = [layer_weights(i, inner=WIDTH) for i in range(4)]
    chain = check_same(loss, params, jnp.ones((3, WIDTH)))
    (stack,) = chain.stacks
    assert len(stack.stages) == 4 and len(kinds_of(stack)) == 1
    assert {s.carry_bytes for s in stack.stages} == {3 * WIDTH * 4}


def test_two_towers_are_two_stacks():
    def loss(params, x, y):
        for w in params[:3]:
            x = layer(x, w)
        for w in params[3:]:
            y = layer(y, w)
        return jnp.sum(x @ y.T)

    params = [layer_weights(i) for i in range(6)]
    chain = check_same(loss, params, jnp.ones((2, WIDTH)), jnp.ones((2, WIDTH)))
    assert [s.num_layers for s in chain.stacks] == [3, 3]
