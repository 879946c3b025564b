"""Stages that the user marks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chains import (
    TOKENS,
    WIDTH,
    check_same,
    kinds_of,
    layer,
    layer_weights,
    stacked,
    summary,
    table,
)

from jaxckpt.errors import WorkloadError
from jaxckpt.graph.stages.marks import mark_stage


def marked_loss(params, x, name="block[{}]"):
    for i, w in enumerate(params):
        x = layer(mark_stage(x, name.format(i)), w)
    return jnp.sum(mark_stage(x, "loss"))


@pytest.mark.parametrize("name", ["block[{}]", "block_{}", "block"])
def test_marks_cut_the_program(name):
    params = [layer_weights(i) for i in range(3)]
    run = functools.partial(marked_loss, name=name)
    chain = check_same(run, params, jnp.ones((2, WIDTH)))
    assert summary(chain) == [("block", 3, False)]
    assert [s.name for s in chain.stages] == [
        "block[0]",
        "block[1]",
        "block[2]",
        "loss",
    ]
    assert len(kinds_of(chain.stacks[0])) == 1


def test_marks_cut_where_structure_would_not():
    def loss(params, x):
        for i in range(0, 4, 2):
            x = mark_stage(x, "pair")
            x = layer(layer(x, params[i]), params[i + 1])
        return jnp.sum(mark_stage(x, "head"))

    params = [layer_weights(i) for i in range(4)]
    chain = check_same(loss, params, jnp.ones((2, WIDTH)))
    assert summary(chain) == [("pair", 2, False)]


def test_a_mark_leaves_values_and_gradients_as_they_are():
    params = [layer_weights(i) for i in range(2)]
    x = jnp.ones((2, WIDTH))

    def plain(params, x):
        return jnp.sum(functools.reduce(layer, params, x))

    for one, other in zip(
        jax.tree.leaves(jax.value_and_grad(marked_loss)(params, x)),
        jax.tree.leaves(jax.value_and_grad(plain)(params, x)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_marked_tree_is_one_mark():
    def loss(params, x):
        x, step = mark_stage((x, 1), "first")
        x, y = mark_stage((layer(x, params[0]), x * 2), "second")
        return jnp.sum(layer(x, params[1]) + y) * step

    params = [layer_weights(i) for i in range(2)]
    chain = check_same(loss, params, jnp.ones((2, WIDTH)))
    assert [s.name for s in chain.stages] == ["first", "second"]


def test_a_marked_loop_is_a_stack_of_that_name():
    def loss(params, x):
        x = mark_stage(x @ jnp.eye(WIDTH), "encoder")
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params)
        return jnp.sum(mark_stage(x, "head"))

    chain = check_same(loss, stacked(3), jnp.ones((2, WIDTH)))
    assert summary(chain) == [("encoder", 3, True)]
    assert chain.stages[-1].name == "head"


@pytest.mark.parametrize(
    ("x", "name", "text"),
    [
        (jnp.ones(2), "", "is no name"),
        (jnp.ones(2), 3, "`name=3`"),
        (jnp.arange(2), "head", "no floating value"),
    ],
)
def test_a_bad_mark_is_refused(x, name, text):
    with pytest.raises(WorkloadError, match=text):
        mark_stage(x, name)


def test_what_stands_before_the_first_mark_is_no_part_of_it():
    def loss(params, tokens):
        half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        x = half["table"][tokens] * 2
        for w in half["layers"]:
            x = layer(mark_stage(x, "block"), w)
        return jnp.sum(mark_stage(x, "head"))

    params = {"table": table(), "layers": [layer_weights(i) for i in range(3)]}
    chain = check_same(loss, params, TOKENS)
    (stack,) = chain.stacks
    assert chain.stages[0].name == "embedding" and len(kinds_of(stack)) == 1
    assert {s.carry_bytes for s in stack.stages} == {2 * 3 * WIDTH * 2}
