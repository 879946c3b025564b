"""Attention: three implementations give one result, and the target picks among them."""

import chex
import jax
import jax.numpy as jnp
import pytest

from jaxckpt import devices
from jaxckpt._jax import remat3_enabled
from jaxckpt.errors import WorkloadError
from models import attention as module
from models.attention import attention, resolve


def _inputs(seq, *, dtype=jnp.float32, heads=2, head_dim=8, batch=2):
    keys = jax.random.split(jax.random.key(seq), 4)
    shape = (batch, seq, heads, head_dim)
    return [jax.random.normal(key, shape, dtype) for key in keys]


def _value_and_gradients(implementation, q, k, v, d_out):
    @jax.jit
    def both(q, k, v, d_out):
        out, vjp = jax.vjp(
            lambda *x: attention(*x, implementation=implementation), q, k, v
        )
        return out, vjp(d_out)

    return both(q, k, v, d_out)


@jax.jit
def _by_hand(q, k, v):
    """Return softmax attention, one position at a time."""
    rows = []
    for t in range(q.shape[1]):
        scores = jnp.einsum("bhd,bshd->bhs", q[:, t], k[:, : t + 1])
        weights = jax.nn.softmax(scores / q.shape[-1] ** 0.5, axis=-1)
        rows.append(jnp.einsum("bhs,bshd->bhd", weights, v[:, : t + 1]))
    return jnp.stack(rows, axis=1)


@pytest.mark.parametrize("implementation", ["xla", "chunked", "flash"])
def test_attention_equals_the_definition(implementation):
    q, k, v, _ = _inputs(7)
    out = attention(q, k, v, implementation=implementation)
    chex.assert_trees_all_close(out, _by_hand(q, k, v), rtol=1e-5, atol=1e-6)


# Parts of one chunk, then several chunks without and with padding.
@pytest.mark.parametrize("seq", [1, 5, 24, 19])
def test_chunked_value_and_gradients_equal_xla(seq, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 8)
    inputs = _inputs(seq)
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


def test_chunked_keeps_its_inputs_output_and_log_sum_exp_alone(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 8)
    q, k, v, _ = _inputs(24)

    def residuals(q, k, v):
        return jax.vjp(lambda *x: attention(*x, implementation="chunked"), q, k, v)[1]

    kept = jax.tree.leaves(jax.eval_shape(residuals, q, k, v))
    batch, _, heads, _ = q.shape
    kept_shapes = [x.shape for x in kept if x.size > 1]
    assert sorted(kept_shapes) == sorted([q.shape] * 4 + [(3, batch, heads, 8)])


def test_chunked_scores_never_exist_whole(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 8)
    q, k, v, d_out = _inputs(64)
    text = str(
        jax.make_jaxpr(lambda *x: _value_and_gradients("chunked", *x))(q, k, v, d_out)
    )
    assert "2,2,8,64]" in text
    assert "2,2,64,64]" not in text


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
