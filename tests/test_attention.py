"""Attention: three implementations give one result, and the target picks among them."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest

from jaxckpt import devices
from jaxckpt._jax import remat3_enabled
from jaxckpt.errors import WorkloadError
from jaxckpt.graph.flops import count_flops, equations
from models import attention as module
from models.attention import attention, resolve

# Compiling is what these tests spend their time on.
_jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


def _inputs(seq, *, heads=2, kv_heads=None, head_dim=8, batch=2):
    """Return q, k, v and the gradient of the result."""
    keys = jax.random.split(jax.random.key(seq), 4)
    numbers = heads, kv_heads or heads, kv_heads or heads, heads
    return [
        jax.random.normal(key, (batch, seq, n, head_dim))
        for key, n in zip(keys, numbers, strict=True)
    ]


def _value_and_gradients(implementation, *inputs, causal=True):
    return _jit(functools.partial(_vjp, _attend(implementation, causal)))(*inputs)


def _jaxpr_of_gradients(implementation, *inputs):
    return jax.make_jaxpr(functools.partial(_vjp, _attend(implementation)))(*inputs)


def _attend(implementation, causal=True):
    return functools.partial(attention, implementation=implementation, causal=causal)


def _vjp(fn, q, k, v, d_out):
    out, vjp = jax.vjp(fn, q, k, v)
    return out, vjp(d_out)


def _by_hand(q, k, v, causal=True):
    """Return softmax attention, one position at a time, with keys repeated."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    rows = []
    for t in range(q.shape[1]):
        seen = slice(t + 1 if causal else None)
        scores = jnp.einsum("bhd,bshd->bhs", q[:, t], k[:, seen])
        weights = jax.nn.softmax(scores / q.shape[-1] ** 0.5, axis=-1)
        rows.append(jnp.einsum("bhs,bshd->bhd", weights, v[:, seen]))
    return jnp.stack(rows, axis=1)


@pytest.mark.parametrize(
    ("implementation", "kv_heads"),
    [("xla", 2), ("xla", 4), ("chunked", 1), ("chunked", 2), ("flash", 4)],
)
def test_attention_equals_the_definition(implementation, kv_heads):
    inputs = _inputs(5, heads=4, kv_heads=kv_heads)
    got = _value_and_gradients(implementation, *inputs)
    wanted = _jit(functools.partial(_vjp, _by_hand))(*inputs)
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("implementation", ["xla", "chunked"])
def test_attention_that_is_not_causal_reads_all_positions(implementation, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 3)  # two chunks, the second one padded
    inputs = _inputs(5, heads=4, kv_heads=2)
    got = _value_and_gradients(implementation, *inputs, causal=False)
    by_hand = functools.partial(_by_hand, causal=False)
    wanted = _jit(functools.partial(_vjp, by_hand))(*inputs)
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=2e-6)


# Parts of one chunk, then several chunks without and with padding.
@pytest.mark.parametrize(
    ("seq", "kv_heads"), [(1, 6), (5, 6), (5, 2), (24, 6), (24, 2), (19, 3)]
)
def test_chunked_value_and_gradients_equal_xla(seq, kv_heads, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 8)
    inputs = _inputs(seq, heads=6, kv_heads=kv_heads)
    chunked = _value_and_gradients("chunked", *inputs)
    chex.assert_trees_all_close(
        chunked, _value_and_gradients("xla", *inputs), rtol=1e-5, atol=2e-6
    )


def test_chunked_at_its_real_chunk_size_equals_xla():
    inputs = _inputs(module.CHUNK * 2 + 1, heads=1, batch=1)
    chunked = _value_and_gradients("chunked", *inputs)
    chex.assert_trees_all_close(
        chunked, _value_and_gradients("xla", *inputs), rtol=1e-5, atol=2e-6
    )


def test_chunked_in_bfloat16_stays_near_float32():
    inputs = _inputs(24)
    low = [x.astype(jnp.bfloat16) for x in inputs]
    got = _value_and_gradients("chunked", *low)
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(jnp.bfloat16)}
    got = jax.tree.map(lambda x: x.astype(jnp.float32), got)
    wanted = _value_and_gradients("xla", *(x.astype(jnp.float32) for x in low))
    chex.assert_trees_all_close(got, wanted, rtol=0.05, atol=0.03)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_chunked_keeps_its_inputs_output_and_log_sum_exp_alone(kv_heads, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 8)
    q, k, v, _ = _inputs(24, kv_heads=kv_heads)

    def residuals(q, k, v):
        return jax.vjp(lambda *x: attention(*x, implementation="chunked"), q, k, v)[1]

    kept = jax.tree.leaves(jax.eval_shape(residuals, q, k, v))
    batch, _, heads, _ = q.shape
    kept_shapes = [x.shape for x in kept if x.size > 1]
    wanted = [x.shape for x in (q, k, v, q)] + [(3, batch, heads, 8)]
    assert sorted(kept_shapes) == sorted(wanted)


def test_chunked_scores_never_exist_whole(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 8)
    text = str(_jaxpr_of_gradients("chunked", *_inputs(64)))
    assert "[2,2,1,8,64]" in text
    assert "64,64]" not in text


# The chunked form computes its scores twice.
@pytest.mark.parametrize(("implementation", "reads"), [("xla", 4), ("chunked", 5)])
def test_keys_of_a_group_are_never_repeated(implementation, reads, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 8)
    inputs = _inputs(24, heads=6, kv_heads=2, batch=1)
    factors = [
        x.aval.shape
        for eqn, _ in equations(_jaxpr_of_gradients(implementation, *inputs))
        if eqn.primitive.name == "dot_general"
        for x in eqn.invars
    ]
    # Keys and values, 24 rows of 2 heads of 8, in the products that read them.
    assert sum(sorted(shape) == [1, 2, 8, 24] for shape in factors) == reads


@pytest.mark.parametrize("implementation", ["xla", "chunked"])
def test_fewer_key_heads_have_the_same_flops(implementation):
    inputs = _inputs(16, heads=6, kv_heads=2)
    forward = jax.make_jaxpr(_attend(implementation))(*inputs[:3])
    products = 2 * (2 * 2 * 16 * 16 * 6 * 8)  # q k^T and weights v
    assert count_flops(forward).matmul == products


@pytest.mark.skipif(
    remat3_enabled(), reason="JAX_REMAT3 sees no name inside a custom_vjp rule"
)
def test_chunked_saved_by_name_runs_attention_once_in_the_gradient():
    q, k, v, _ = _inputs(8)

    def layer(q, k, v):
        return jnp.sum(jnp.sin(attention(q, k, v, implementation="chunked")))

    def count_forwards(*names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        gradient = jax.grad(jax.checkpoint(layer, policy=policy))
        # The forward rule has a logarithm, that of the log-sum-exp; the backward none.
        return str(jax.make_jaxpr(gradient)(q, k, v)).count("= log ")

    assert count_forwards("context", "context_lse") == 1
    assert count_forwards("context") == 2


@pytest.mark.parametrize("implementation", ["xla", "chunked"])
def test_name_scope_says_which_implementation_ran(implementation):
    q, k, v, _ = _inputs(4)
    lowered = jax.jit(lambda *x: attention(*x, implementation=implementation))
    text = lowered.lower(q, k, v).as_text(debug_info=True)
    assert f"attention[{implementation}]" in text


def test_flash_takes_cudnn_where_it_can_run(monkeypatch):
    with devices.use("h100-80gb"):
        monkeypatch.setattr(module, "has_cudnn_wheels", lambda: True)
        assert resolve("flash", dtype="bfloat16", head_dim=64) == "cudnn"
        assert resolve("flash", dtype="float32", head_dim=64) == "chunked"
        assert resolve("flash", dtype="bfloat16", head_dim=136) == "chunked"
        monkeypatch.setattr(module, "has_cudnn_wheels", lambda: False)
        assert resolve("flash", dtype="bfloat16", head_dim=64) == "chunked"


def test_cudnn_that_cannot_run_raises_with_the_reason(monkeypatch):
    x = jnp.ones((1, 4, 1, 8), jnp.bfloat16)
    with devices.use("h100-80gb"):
        monkeypatch.setattr(module, "has_cudnn_wheels", lambda: False)
        with pytest.raises(
            WorkloadError, match=r"wheels are missing.*jaxckpt\[cudnn\]"
        ):
            attention(x, x, x, implementation="cudnn")
        monkeypatch.setattr(module, "has_cudnn_wheels", lambda: True)
        with pytest.raises(WorkloadError, match="got `dtype=float32`"):
            resolve("cudnn", dtype="float32", head_dim=8)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="cuDNN runs there")
def test_cudnn_without_a_cuda_target_raises():
    with pytest.raises(
        WorkloadError, match="needs a CUDA target and this one is `cpu`"
    ):
        resolve("cudnn", dtype="bfloat16", head_dim=64)


def test_unknown_implementation_and_unequal_shapes_raise():
    q, k, v, _ = _inputs(4)
    with pytest.raises(WorkloadError, match=r"`attention=flsh`.*Did you mean `flash`"):
        attention(q, k, v, implementation="flsh")
    with pytest.raises(WorkloadError, match="of one shape"):
        attention(q, k[:, :3], v[:, :3], implementation="xla")


@pytest.mark.parametrize("implementation", module.IMPLEMENTATIONS)
@pytest.mark.parametrize("kv_heads", [0, 4, 12])
def test_key_heads_that_do_not_divide_the_heads_raise(implementation, kv_heads):
    q, k = jnp.ones((1, 4, 6, 8)), jnp.ones((1, 4, kv_heads, 8))
    message = f"`kv_heads={kv_heads}` does not divide the 6 heads.*one of 1, 2, 3, 6"
    with pytest.raises(WorkloadError, match=message):
        attention(q, k, k, implementation=implementation)
