"""A program as a chain of stages: our models and other libraries."""

import functools
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chains import (
    TOKENS,
    WIDTH,
    chain_of,
    check_same,
    kinds_of,
    layer,
    layer_weights,
    stacked,
    summary,
    table,
    unrolled_loss,
)
from flax import linen as nn
from flax import nnx
from helpers import LinenBlock, NNXBlock, function_block, weights

import jaxckpt
from jaxckpt import _jax
from jaxckpt.graph.stages import stages
from jaxckpt.graph.stages.runs import find_repeats
from jaxckpt.stack_call import use
from models import gpt, llama, moe, vit

MODELS = {"gpt": gpt, "llama": llama, "vit": vit, "moe": moe}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_a_model_is_embedding_layers_and_head(model, scan):
    workload = model.tiny(num_layers=4, batch=2, scan=scan)
    graph = jaxckpt.trace(workload.loss_fn, workload.params, workload.batch)
    with use(None):
        chain = chain_of(workload.loss_fn, workload.params, workload.batch)
    assert summary(chain) == [("layers", 4, scan)]
    assert chain.stages[0].name == "embedding" and chain.stages[-1].name == "head"
    assert chain.kinds == 3
    assert sum(s.layers * s.flops for s in chain.stages) == graph.forward_flops


@pytest.mark.parametrize("model", [gpt, llama], ids=["gpt", "llama"])
@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_what_crosses_into_a_layer_is_its_input_and_what_layers_share(model, scan):
    workload = model.tiny(num_layers=4, batch=2, seq=16, scan=scan)
    with use(None):
        chain = chain_of(workload.loss_fn, workload.params, workload.batch)
    hidden = 2 * 16 * 128 * 2  # batch, seq, width, bytes of bfloat16
    rotation = {gpt: 0, llama: 2 * 16 * 16 * 4}[model]
    (stack,) = chain.stacks
    assert {stage.carry_bytes for stage in stack.stages} == {hidden + rotation}


def test_scanned_and_unrolled_layers_have_the_same_work():
    layers = []
    for scan in (True, False):
        workload = gpt.tiny(num_layers=3, batch=2, seq=16, scan=scan)
        with use(None):
            chain = chain_of(workload.loss_fn, workload.params, workload.batch)
        layers.append(chain.stacks[0].stages[0])
    assert layers[0].flops == layers[1].flops
    assert layers[0].carry_bytes == layers[1].carry_bytes


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_a_model_with_dropout_has_equal_layers(scan):
    workload = gpt.tiny(num_layers=4, batch=2, seq=16, scan=scan, dropout=0.1)
    key = jax.random.key(0)
    with use(None):
        chain = chain_of(workload.loss_fn, workload.params, workload.batch, key)
    assert summary(chain) == [("layers", 4, scan)]
    assert len(kinds_of(chain.stacks[0])) == 1


@pytest.mark.parametrize("schedule", ["full", "every(2)", "remat_every(2)"])
@pytest.mark.parametrize("form", ["explicit", "scan", "unrolled"])
def test_layers_are_found_behind_a_schedule(schedule, form):
    workload = gpt.tiny(num_layers=4, batch=1, seq=8)
    with use(schedule, form=form):
        chain = chain_of(workload.loss_fn, workload.params, workload.batch)
    assert len(chain.stacks) == 1
    expected = {"full": 4, "every(2)": 2, "remat_every(2)": 2}[schedule]
    assert chain.stacks[0].num_layers == (4 if form == "unrolled" else expected)


def test_the_time_to_cut_grows_with_the_depth_and_no_faster():
    def seconds(count):
        params = [layer_weights(0)] * count
        closed = jax.make_jaxpr(lambda p, x: functools.reduce(layer, p, x))(params, x)
        start = time.process_time()
        assert summary(stages(closed)) == [("layers", count, False)]
        return time.process_time() - start

    x = jnp.ones((2, WIDTH))
    seconds(8)
    assert seconds(256) < 8 * seconds(64)


class LinenModel(nn.Module):
    """Blocks in a Python loop."""

    how: str
    count: int = 4

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH, name="into")(x)
        block = nn.remat(LinenBlock) if self.how == "remat" else LinenBlock
        if self.how == "scan":
            scan = nn.scan(
                lambda module, carry, _: (module(carry), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.count,
            )
            x, _ = scan(block(name="blocks"), x, None)
        else:
            for i in range(self.count):
                name = None if self.how == "auto" else f"block_{i}"
                x = block(name=name)(x)
        return jnp.sum(nn.Dense(3, name="out")(x))


def initialized(model, x):
    """Return parameters without compiling their initialisation."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    return jax.tree.map(lambda s: np.full(s.shape, 0.1, s.dtype), shapes)


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("auto", "LinenBlock"),
        ("named", "block"),
        ("remat", "block"),
        ("scan", "blocks"),
    ],
)
def test_linen_blocks_are_layers(how, name):
    model, x = LinenModel(how), jnp.ones((2, 3, 5))
    params = initialized(model, x)
    chain = check_same(model.apply, params, x)
    assert summary(chain) == [(name, 4, how == "scan")]
    assert [chain.stages[0].name, chain.stages[-1].name] == ["embedding", "head"]
    assert chain.kinds == 3


def test_remat_that_stays_is_one_operation_a_layer():
    model, x = LinenModel("remat"), jnp.ones((2, 3, 5))
    params = initialized(model, x)
    chain = check_same(model.apply, params, x, remat=False)
    assert [(s.num_layers, s.scanned) for s in chain.stacks] == [(4, False)]
    assert chain.kinds == 3
    (eqn,) = _jax.open_jaxpr(chain.stages[2].body).eqns
    assert _jax.remat_parameters(eqn) is not None


def test_nnx_blocks_are_layers():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.into = nnx.Linear(5, WIDTH, rngs=rngs)
            self.blocks = nnx.List(NNXBlock(rngs=rngs) for _ in range(3))

        def __call__(self, x):
            x = self.into(x)
            for block in self.blocks:
                x = block(x)
            return jnp.sum(x)

    graphdef, state = nnx.split(Model(nnx.Rngs(0)))
    chain = check_same(
        lambda s, x: nnx.merge(graphdef, s)(x), state, jnp.ones((2, 4, 5))
    )
    assert summary(chain) == [("layers", 3, False)]


def test_equinox_layers_are_layers():
    mlp = eqx.nn.MLP(5, 3, WIDTH, depth=4, key=jax.random.key(0))
    params, static = eqx.partition(mlp, eqx.is_array)

    def run(p, x):
        return jnp.sum(jax.vmap(eqx.combine(p, static))(x))

    chain = check_same(run, params, jnp.ones((4, 5)))
    assert summary(chain) == [("layers", 3, False)]
    assert len(kinds_of(chain.stacks[0])) == 1


@pytest.mark.parametrize("count", [2, 3, 7])
def test_functions_in_a_loop_are_layers(count):
    def loss(params, x):
        for w in params:
            x = function_block(w, x)
        return jnp.sum(x)

    params = [weights(i) for i in range(count)]
    chain = check_same(loss, params, jnp.ones((2, 4, WIDTH)))
    assert [s.num_layers for s in chain.stacks] == [count]
    assert len(kinds_of(chain.stacks[0])) == 1


def test_weights_cast_before_the_layers_move_to_their_layer():
    def loss(params, tokens):
        half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        x = half["table"][tokens]
        for w in half["layers"]:
            x = layer(x, w)
        return jnp.sum(x @ half["table"].T)

    params = {"table": table(), "layers": [layer_weights(i) for i in range(4)]}
    chain = check_same(loss, params, TOKENS)
    (stack,) = chain.stacks
    assert len(stack.stages) == 4 and len(kinds_of(stack)) == 1
    for stage in stack.stages:
        casts = [
            e for e in _jax.open_jaxpr(stage.body).eqns if e.invars[0].aval.ndim == 2
        ]
        assert [e.primitive.name for e in casts][:2] == ["convert_element_type"] * 2
        assert stage.carry_bytes == 2 * 3 * WIDTH * 2


@pytest.mark.parametrize("when", ["at once", "inside"])
def test_adapters_of_frozen_weights_belong_to_their_layer(when):
    def merge(w):
        return {"a": w["a"] + w["down"] @ w["up"], "b": w["b"]}

    def loss(adapters, base, tokens):
        layers = [a | b for a, b in zip(adapters, base["layers"], strict=True)]
        if when == "at once":
            layers = list(map(merge, layers))
        x = base["table"][tokens]
        for w in layers:
            x = layer(x, w if when == "at once" else merge(w))
        return jnp.sum(x @ base["table"].T)

    base = {"table": table(), "layers": [layer_weights(i) for i in range(4)]}
    adapters = [{"down": jnp.ones((WIDTH, 2)), "up": jnp.ones((2, 16))}] * 4
    chain = check_same(loss, adapters, base, TOKENS)
    (stack,) = chain.stacks
    assert len(stack.stages) == 4 and len(kinds_of(stack)) == 1
    assert all(s.carry_bytes == 2 * 3 * WIDTH * 4 for s in stack.stages)


def test_adapters_merged_into_stacked_weights_leave_a_loop_over_layers():
    def loss(adapters, base, x):
        merged = base["a"] + jnp.einsum(
            "lir,lro->lio", adapters["down"], adapters["up"]
        )

        def body(x, w):
            return (layer(x, w), None)

        return jnp.sum(jax.lax.scan(body, x @ jnp.eye(WIDTH), base | {"a": merged})[0])

    adapters = {"down": jnp.ones((4, WIDTH, 2)), "up": jnp.ones((4, 2, 16))}
    chain = check_same(loss, adapters, stacked(4), jnp.ones((3, WIDTH)))
    assert [(s.num_layers, s.scanned) for s in chain.stacks] == [(4, True)]


def test_find_repeats_puts_the_longest_first():
    row = [9, 1, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1, 2, 8, 8]
    best = find_repeats(row)[0]
    assert (best.start, best.period, best.times) == (1, 4, 3)


def test_a_chain_prints_a_line_for_each_run_of_equal_stages():
    text = str(chain_of(unrolled_loss, stacked(4), jnp.ones((2, WIDTH))))
    lines = text.splitlines()
    assert len(lines) == 4
    assert lines[2].split()[:5] == ["layers[0]", "..", "layers[3]", "x", "4"]
    assert "1.02e+03" in lines[2] and "64 B" in lines[2]
