"""The list of matmul-like primitives: hand counts, batches, entries of one's own."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxckpt import _jax, matmul
from jaxckpt.graph.flops import matmul_flops
from jaxckpt.matmul import Matmul, find_matmul, register_matmul


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def forward(fn, *args):
    return matmul_flops(jax.make_jaxpr(fn)(*args))


def backward(fn, *args):
    """Count the backward pass alone: what `jax.vjp`'s function runs."""
    out, vjp = jax.vjp(fn, *(jnp.ones(a.shape, a.dtype) for a in args))
    return matmul_flops(jax.make_jaxpr(vjp)(out))


@pytest.mark.parametrize(
    ("subscripts", "shapes", "flops"),
    [
        ("mk,kn->mn", [(3, 5), (5, 7)], 2 * 3 * 5 * 7),
        ("bmk,bkn->bmn", [(2, 3, 5), (2, 5, 7)], 2 * 2 * 3 * 5 * 7),
        ("bsd,btd->bst", [(2, 3, 5), (2, 7, 5)], 2 * 2 * 3 * 5 * 7),
        ("bshd,hdm->bsm", [(2, 3, 4, 5), (4, 5, 6)], 2 * 2 * 3 * 4 * 5 * 6),
        ("k,k->", [(9,), (9,)], 2 * 9),
    ],
)
def test_a_product_counts_two_flops_for_each_multiply_and_add(
    subscripts, shapes, flops
):
    fn = lambda a, b: jnp.einsum(subscripts, a, b)  # noqa: E731
    assert forward(fn, *(struct(*shape) for shape in shapes)) == flops


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.int8])
def test_the_count_does_not_depend_on_the_dtype(dtype):
    args = struct(3, 5, dtype=dtype), struct(5, 7, dtype=dtype)
    assert forward(jnp.matmul, *args) == 2 * 3 * 5 * 7


def conv(padding="VALID", strides=(1, 1), **settings):
    def fn(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, kernel, strides, padding, dimension_numbers=numbers, **settings
        )

    return fn


IMAGE, KERNEL = struct(2, 9, 9, 4), struct(3, 3, 4, 6)
CONVS = [
    # Each output position reads 3 x 3 positions of 4 features.
    (conv(), KERNEL, 2 * (2 * 7 * 7 * 6) * 36),
    (conv(strides=(2, 2)), KERNEL, 2 * (2 * 4 * 4 * 6) * 36),
    (conv(rhs_dilation=(2, 2)), KERNEL, 2 * (2 * 5 * 5 * 6) * 36),
    # In groups it reads 2 features, and depthwise one.
    (conv(feature_group_count=2), struct(3, 3, 2, 6), 2 * (2 * 7 * 7 * 6) * 18),
    (conv(feature_group_count=4), struct(3, 3, 1, 8), 2 * (2 * 7 * 7 * 8) * 9),
    (conv(batch_group_count=2), KERNEL, 2 * (1 * 7 * 7 * 6) * 36),
]


@pytest.mark.parametrize(("fn", "kernel", "flops"), CONVS)
def test_a_convolution_counts_what_each_result_reads(fn, kernel, flops):
    assert forward(fn, IMAGE, kernel) == flops


@pytest.mark.parametrize(("fn", "kernel", "flops"), CONVS)
def test_the_gradients_of_a_convolution_cost_its_forward_each(fn, kernel, flops):
    # Zeros of the padding and between dilated elements are no work.
    assert backward(fn, IMAGE, kernel) == 2 * flops


ROWS, WEIGHTS = struct(12, 4), struct(3, 4, 5)
SIZES = jnp.array([3, 5, 4])


def test_a_ragged_product_counts_each_row_with_one_group():
    fn = lambda x, w: lax.ragged_dot(x, w, SIZES)  # noqa: E731
    assert forward(fn, ROWS, WEIGHTS) == 2 * 12 * 4 * 5
    # Each gradient contracts or multiplies each row once, too.
    assert backward(fn, ROWS, WEIGHTS) == 2 * (2 * 12 * 4 * 5)


def test_each_gradient_of_a_ragged_product_costs_its_forward():
    for argnum in (0, 1):
        loss = lambda x, w: lax.ragged_dot(x, w, SIZES).sum()  # noqa: E731
        gradient = jax.make_jaxpr(jax.grad(loss, argnum))(ROWS, WEIGHTS)
        assert matmul_flops(gradient) == 2 * (2 * 12 * 4 * 5)


def test_a_ragged_batch_multiplies_every_batch_member():
    numbers = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), (0,), ())
    fn = lambda x, w: lax.ragged_dot_general(x, w, SIZES, numbers)  # noqa: E731
    args = struct(12, 2, 4), struct(12, 4, 5)
    assert jax.eval_shape(fn, *args).shape == (12, 2, 5)
    assert forward(fn, *args) == 2 * 12 * 2 * 4 * 5


@pytest.mark.parametrize(("layout", "shape"), [(0, (2, 6, 3, 8)), (1, (2, 3, 6, 8))])
@pytest.mark.parametrize(("way", "products"), [("fwd", 2), ("bwd", 5)])
def test_fused_attention_counts_its_products(layout, shape, way, products):
    # 2 sequences of 6 queries, 3 heads of 8; 10 keys of one shared head.
    query = struct(*shape)
    key = struct(2, 10, 1, 8) if layout == 0 else struct(2, 1, 10, 8)
    entry = find_matmul(f"dot_product_attention_{way}")
    flops = entry.flops([query, key, key], [query], {"layout": layout})
    assert flops == products * 2 * 2 * 3 * 6 * 10 * 8


def test_a_scaled_product_counts_as_a_plain_one():
    entry = find_matmul("scaled_matmul")
    ins = [struct(2, 3, 64), struct(2, 5, 64), struct(2, 3, 2), struct(2, 5, 2)]
    assert entry.flops(ins, [struct(2, 3, 5)], {}) == 2 * 2 * 3 * 5 * 64
    assert entry.batched(ins, {})
    assert not entry.batched([struct(1, 3, 64)], {})


@pytest.mark.parametrize(
    ("fn", "args", "batched"),
    [
        (jnp.matmul, [struct(2, 3, 5), struct(5, 7)], False),
        (jnp.matmul, [struct(2, 3, 5), struct(2, 5, 7)], True),
        (jax.vmap(jnp.matmul), [struct(2, 3, 5), struct(2, 5, 7)], True),
        (jax.vmap(jnp.matmul, (0, None)), [struct(2, 3, 5), struct(5, 7)], False),
        (conv(), [IMAGE, KERNEL], False),
        (conv(feature_group_count=2), [IMAGE, struct(3, 3, 2, 6)], False),
        (lambda x, w: lax.ragged_dot(x, w, SIZES), [ROWS, WEIGHTS], False),
    ],
)
def test_a_product_is_batched_where_it_pairs_matrices(fn, args, batched):
    eqns = _jax.open_jaxpr(jax.make_jaxpr(fn)(*args)).eqns
    found = [(find_matmul(e.primitive.name), e) for e in eqns]
    kinds = [m.batched([v.aval for v in e.invars], e.params) for m, e in found if m]
    assert kinds == [batched]


def test_a_primitive_of_ones_own_is_counted_everywhere(monkeypatch):
    monkeypatch.setattr(matmul, "_MATMULS", dict(matmul._MATMULS))
    assert find_matmul("tanh") is None
    never = lambda avals, params: False  # noqa: E731
    register_matmul(Matmul("tanh", never, lambda ins, outs, params: 100 * outs[0].size))
    assert forward(jnp.tanh, struct(3)) == 300
