"""The loss in chunks: the whole one's values, each product once, no logits kept."""

import functools

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt
from models.losses import cross_entropy

BATCH, SEQ, EMBED, VOCABULARY, CHUNKS = 2, 12, 8, 32, 3
TARGETS = jax.random.randint(jax.random.key(1), (BATCH, SEQ), 0, VOCABULARY)
# What is trained: all but the table, the table alone, both.
each_argnums = pytest.mark.parametrize("argnums", [(0,), (1,), (0, 1)], ids=str)
# Relative to the largest value: a half's rounding of what a product reads and returns.
TOLERANCES = {"float32": 4e-6, "bfloat16": 1e-2}


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


HIDDEN, TABLE = normal(2, BATCH, SEQ, EMBED), normal(3, VOCABULARY, EMBED)


def loss(hidden, table, *, targets=TARGETS, chunks=CHUNKS):
    return cross_entropy(hidden, table, targets, chunks=chunks)


@pytest.fixture(autouse=True, scope="module")
def _quick_compiles():
    with helpers.no_optimizations():
        yield


def check(run, *inputs, tolerance=4e-6, chunks=CHUNKS):
    """Check that `run(loss, *inputs)` is the same in chunks and whole.

    The tolerance is relative to the largest value of each array.
    """
    in_chunks, whole = (functools.partial(loss, chunks=n) for n in (chunks, 0))
    found, wanted = (
        jax.jit(functools.partial(run, fn))(*inputs) for fn in (in_chunks, whole)
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(found, wanted)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        x, y = (np.asarray(value, np.float32) for value in (x, y))
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max())


def value_and_gradients(fn, hidden, table):
    return jax.value_and_grad(fn, (0, 1))(hidden, table)


@each_argnums
@pytest.mark.parametrize("table_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_loss_and_gradients_in_chunks_equal_the_whole_ones(dtype, table_dtype, argnums):
    def run(fn, hidden, table):
        return jax.value_and_grad(fn, argnums)(hidden, table)

    tolerance = max(TOLERANCES[dtype], TOLERANCES[table_dtype])
    inputs = HIDDEN.astype(dtype), TABLE.astype(table_dtype)
    check(run, *inputs, tolerance=tolerance)


@pytest.mark.parametrize("chunks", [1, 2, 6, 12])
def test_any_number_of_chunks_gives_the_same(chunks):
    check(value_and_gradients, HIDDEN, TABLE, chunks=chunks)


@pytest.mark.parametrize("scale", [-3.0, 0.0, 1e4])
def test_gradients_scale_with_what_comes_from_behind(scale):
    def run(fn, hidden, table):
        return jax.vjp(fn, hidden, table)[1](jnp.float32(scale))

    check(run, HIDDEN, TABLE)


@pytest.mark.parametrize(
    ("table_dtype", "tolerance"), [("float32", 4e-3), ("bfloat16", 8e-3)]
)
def test_parts_of_the_tables_gradient_add_up_in_float32(table_dtype, tolerance):
    """64 parts of one position: in bfloat16 each sum would round once more."""
    hidden = normal(4, BATCH, 64, EMBED).astype(jnp.bfloat16)
    targets = jnp.arange(BATCH * 64).reshape(BATCH, 64) % VOCABULARY

    def run(fn, table):
        return jax.grad(fn, 1)(hidden, table, targets=targets)

    check(run, TABLE.astype(table_dtype), tolerance=tolerance, chunks=64)


# --- Other transformations -----------------------------------------------------------


@pytest.mark.parametrize("argnum", [0, 1])
def test_hessian_vector_products_equal_the_whole_ones(argnum):
    """Forward over reverse, and reverse twice."""
    inputs = [HIDDEN, TABLE]
    at = inputs.pop(argnum)
    direction = normal(5, *at.shape)

    def run(fn, at):
        def gradient(x):
            return jax.grad(fn, argnum)(*inputs[:argnum], x, *inputs[argnum:])

        forward_over_reverse = jax.jvp(gradient, (at,), (direction,))[1]
        return forward_over_reverse, jax.vjp(gradient, at)[1](direction)

    check(run, at)


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0)], ids=str)
def test_vmap_inside_and_outside_of_a_gradient(in_axes):
    def run(fn, *inputs):
        def total(*inputs):
            return jnp.sum(jax.vmap(fn, in_axes)(*inputs) ** 2)

        per_example = jax.vmap(jax.grad(fn, (0, 1)), in_axes)(*inputs)
        return per_example, jax.grad(total, (0, 1))(*inputs)

    inputs = zip((HIDDEN, TABLE), in_axes, strict=True)
    check(run, *(x if axis is None else jnp.stack([x, -2 * x]) for x, axis in inputs))


def test_gradients_under_a_checkpoint_of_the_whole_loss():
    def run(fn, hidden, table):
        return value_and_gradients(jax.checkpoint(fn), hidden, table)

    check(run, HIDDEN, TABLE)


def test_forward_mode_of_the_loss_itself_is_refused_as_of_any_custom_vjp():
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda x: loss(x, TABLE), (HIDDEN,), (HIDDEN,))


# --- Work and memory -----------------------------------------------------------------


@pytest.mark.parametrize(("argnums", "products"), [((0,), 2), ((1,), 2), ((0, 1), 3)])
def test_a_gradient_takes_each_product_once_a_chunk(argnums, products):
    """The logits, and the gradient of what is trained: what is frozen gets none."""
    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, argnums))(HIDDEN, TABLE)
    assert helpers.count(jaxpr) == products * CHUNKS


def test_without_a_gradient_there_are_the_logits_alone():
    assert helpers.count(jax.make_jaxpr(loss)(HIDDEN, TABLE)) == CHUNKS


def test_nothing_runs_again():
    graph = jaxckpt.trace(loss, HIDDEN, TABLE, argnums=(0, 1))
    product = 2 * BATCH * SEQ * EMBED * VOCABULARY
    assert (graph.forward_flops, graph.recompute_flops) == (product, 0)
    assert graph.gradient_flops == 3 * product


@each_argnums
def test_the_gradients_are_kept_and_no_logits(argnums):
    graph = jaxckpt.trace(loss, HIDDEN, TABLE, argnums=argnums)
    kept = sorted(r.shape for r in graph.residuals if r.shape)
    assert kept == sorted((HIDDEN.shape, TABLE.shape)[i] for i in argnums)


def test_logits_of_the_whole_sequence_never_exist():
    whole, chunk = (f"f32[{BATCH},{SEQ // n},{VOCABULARY}]" for n in (1, CHUNKS))
    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(HIDDEN, TABLE))
    assert whole not in text and chunk in text
    unchunked = jax.grad(functools.partial(loss, chunks=0))
    assert whole in str(jax.make_jaxpr(unchunked)(HIDDEN, TABLE))
