"""Layers that differ in little: which are equal, and what belongs to them."""

import jax
import jax.numpy as jnp
import pytest
from chains import (
    TOKENS,
    WIDTH,
    check_every_equation_is_in_one_stage,
    check_same,
    kinds_of,
    layer,
    layer_weights,
    table,
)

from jaxckpt import _jax
from jaxckpt.graph.stages import stages


def test_the_first_layer_may_differ():
    def loss(params, x):
        total = x @ jnp.eye(WIDTH)
        for i, w in enumerate(params):
            normal = total / jnp.linalg.norm(total) if i else total
            total = total + jnp.tanh(normal @ w["a"]) @ w["b"]
        return jnp.sum(total)

    params = [layer_weights(i) for i in range(5)]
    chain = check_same(loss, params, jnp.ones((3, WIDTH)))
    assert sum(s.num_layers for s in chain.stacks) == 4
    assert len(kinds_of(chain.stacks[0])) == 1


def test_a_residual_that_is_summed_late_does_not_change_the_first_layer():
    def loss(params, x):
        x, residual = x @ jnp.eye(WIDTH), None
        for w in params:
            residual = x if residual is None else x + residual
            x = jnp.tanh(residual @ w["a"]) @ w["b"]
        return jnp.sum(x + residual)

    params = [layer_weights(i) for i in range(5)]
    chain = check_same(loss, params, jnp.ones((3, WIDTH)))
    assert [s.num_layers for s in chain.stacks] == [5]
    assert len(kinds_of(chain.stacks[0])) == 1


def test_numbers_that_differ_by_layer_make_kinds_but_one_stack():
    def loss(params, x):
        for i, w in enumerate(params):
            x = layer(x * (1 + i), w)
        return jnp.sum(x)

    params = [layer_weights(i) for i in range(4)]
    chain = check_same(loss, params, jnp.ones((3, WIDTH)))
    assert sum(s.num_layers for s in chain.stacks) >= 3
    assert len(kinds_of(chain.stacks[0])) >= 3


def test_layers_of_two_sorts_in_turn_are_layers_of_two():
    def loss(params, x):
        for i, w in enumerate(params):
            x = x @ w["a"] if i % 2 else layer(x, w)
        return jnp.sum(x)

    params = [layer_weights(i, inner=WIDTH if i % 2 else 16) for i in range(6)]
    chain = check_same(loss, params, jnp.ones((3, WIDTH)))
    assert [s.num_layers for s in chain.stacks] == [3]
    assert len(kinds_of(chain.stacks[0])) == 1


def test_effects_keep_their_order():
    def loss(params, x):
        for i, w in enumerate(params):
            jax.debug.print(f"layer {i}", ordered=True)
            x = layer(x, w)
        return jnp.sum(x)

    params = [layer_weights(i) for i in range(3)]
    closed = jax.make_jaxpr(loss)(params, jnp.ones((3, WIDTH)))
    chain = stages(closed)
    check_every_equation_is_in_one_stage(chain)
    kept = [e for e in _jax.open_jaxpr(chain.closed).eqns if e.effects]
    assert len(kept) == 3


def test_shared_values_stand_before_the_layers():
    def loss(params, x):
        for w in params:
            angles = jnp.cos(jnp.arange(WIDTH, dtype=x.dtype))
            x = layer(x, w) * angles
        return jnp.sum(x)

    def shared(params, x):
        angles = jnp.cos(jnp.sum(params[0]["a"], axis=1))
        for w in params:
            x = layer(x, w) * angles
        return jnp.sum(x)

    params = [layer_weights(i) for i in range(4)]
    for fn, extra in ((loss, 0), (shared, WIDTH * 4)):
        chain = check_same(fn, params, jnp.ones((3, WIDTH)))
        (stack,) = chain.stacks
        assert len(stack.stages) == 4 and len(kinds_of(stack)) == 1
        assert stack.stages[1].carry_bytes == 3 * WIDTH * 4 + extra


def normalised(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


@pytest.mark.parametrize("where", ["before", "behind", "behind, and the embedding"])
def test_layers_are_whole_wherever_they_normalise(where):
    def loss(params, tokens):
        x = params["table"][tokens]
        if where == "behind, and the embedding":
            x = normalised(x)
        for w in params["layers"]:
            if where == "before":
                x = x + jnp.tanh(normalised(x) @ w["a"]) @ w["b"]
            else:
                x = normalised(layer(x, w))
        return jnp.sum(normalised(x) @ params["table"].T)

    params = {"table": table(), "layers": [layer_weights(i) for i in range(4)]}
    chain = check_same(loss, params, TOKENS)
    (stack,) = chain.stacks
    assert len(stack.stages) == 4 and len(kinds_of(stack)) == 1
    assert [s.name for s in chain.stages if s not in stack.stages] == [
        "embedding",
        "head",
    ]


def test_experts_inside_a_layer_are_no_layers():
    def experts(x, w):
        gates = jax.nn.softmax(x @ w["gate"])
        return sum(gates[:, i : i + 1] * layer(x, w["one"]) for i in range(4))

    def loss(params, x):
        x = x @ jnp.eye(WIDTH)
        for w in params:
            x = layer(x, w["one"])
            x = x + experts(x, w)
        return jnp.sum(x)

    params = [{"one": layer_weights(i), "gate": jnp.ones((WIDTH, 4))} for i in range(2)]
    chain = check_same(loss, params, jnp.ones((3, WIDTH)))
    assert [s.num_layers for s in chain.stacks] == [2]


@pytest.mark.parametrize("how", ["fold", "split"])
def test_random_keys_leave_layers_equal(how):
    def loss(params, x, key):
        x = x @ jnp.eye(WIDTH)
        for i, w in enumerate(params):
            own = jax.random.fold_in(key, i)
            if how == "split":
                key, own = jax.random.split(key)
            x = layer(x * jax.random.bernoulli(own, 0.9, x.shape), w)
        return jnp.sum(x)

    params = [layer_weights(i) for i in range(4)]
    chain = check_same(loss, params, jnp.ones((3, WIDTH)), jax.random.key(0))
    (stack,) = chain.stacks
    assert len(stack.stages) == 4 and len(kinds_of(stack)) == 1
    masks = [e.primitive.name for e in _jax.open_jaxpr(stack.stages[1].body).eqns]
    assert "random_bits" in masks  # a mask is made where it is read


def test_outputs_of_every_layer_leave_it():
    def outputs(params, x):
        hidden = []
        for w in params:
            x = layer(x, w)
            hidden.append(jnp.mean(x))
        return x, hidden

    params = [layer_weights(i) for i in range(4)]
    chain = check_same(outputs, params, jnp.ones((3, WIDTH)))
    (stack,) = chain.stacks
    assert len(kinds_of(stack)) == 1
    assert [len(s.outputs) for s in stack.stages] == [2] * 4


def test_layers_that_treat_their_weights_differently_leave_the_embedding_alone():
    def loss(params, tokens):
        x = jnp.sin(params["table"][tokens])
        for i, w in enumerate(params["layers"]):
            kernel = w["a"]
            for _ in range(i):
                kernel = jnp.sin(kernel)
            x = layer(x, {"a": kernel, "b": w["b"]})
        return jnp.sum(x)

    params = {"table": table(), "layers": [layer_weights(i) for i in range(4)]}
    chain = check_same(loss, params, TOKENS)
    (stack,) = chain.stacks
    assert [s.carry_bytes for s in stack.stages] == [2 * 3 * WIDTH * 4] * 4


def test_what_all_layers_read_of_the_first_comes_behind_it():
    def loss(params, tokens):
        x, first = params["table"][tokens], None
        for w in params["layers"]:
            h = normalised(x)
            first = jnp.sum(h) if first is None else first
            x = x + jnp.tanh((h + first) @ w["a"]) @ w["b"]
        return jnp.sum(x)

    params = {"table": table(), "layers": [layer_weights(i) for i in range(4)]}
    chain = check_same(loss, params, TOKENS)
    assert [s.num_layers for s in chain.stacks] == [4]


@pytest.mark.parametrize("products", [1, 2])
def test_the_first_layer_may_take_an_argument(products):
    def loss(params, x):
        total = 0.0
        for w in params:
            up = jnp.tanh(x @ w["a"])
            x = x + up
            if products == 2:
                x = x + jnp.sin(x @ w["b"])
            total += jnp.sum(up)
        return jnp.sum(x) + total

    params = [layer_weights(i, inner=WIDTH) for i in range(4)]
    chain = check_same(loss, params, jnp.ones((3, WIDTH)))
    assert sum(s.num_layers for s in chain.stacks) == 4
    assert len(kinds_of(chain.stacks[0])) <= 2  # the first begins the total
