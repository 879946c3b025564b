"""Causal self-attention in three implementations, one of them chosen by the target.

All take queries, keys and values as `[batch, seq, heads, head_dim]` and return the
same shape. `H` is heads, `S` sequence length, `D` head dimension, `C` a chunk:

    implementation   float32 score bytes alive   needs
    xla              4 * batch * H * S * S        nothing
    chunked          4 * batch * H * C * S        nothing
    cudnn            none                         a CUDA target, bf16 or f16, the wheels
    flash            resolves to cudnn where it can run, else to chunked

Why our own chunked form: tokamax's `xla_chunked` (0.0.12) is quadratic in `seq` once a
gradient is taken (so say its own tests), and it brings a dozen packages. Temporary MiB
for batch 4, 2048 positions, 16 heads of 128 in bf16, compiled for an absent H100 with
jax 0.10.2:

                          xla     tokamax     ours
    forward              1536         285      192
    forward + backward   2592         905      389
"""

from __future__ import annotations

import functools
import math
from typing import Literal, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxckpt.devices import active_device, get_device, has_cudnn_wheels
from jaxckpt.errors import WorkloadError, did_you_mean

IMPLEMENTATIONS = ("cudnn", "xla", "chunked", "flash")
Resolved = Literal["cudnn", "xla", "chunked"]
CHUNK = 128  # queries per step: 128 x S scores fill a GPU and stay small

Heads = Float[Array, "batch seq heads head_dim"]
Keys = Float[Array, "batch keys heads head_dim"]  # of the queries' shape, once checked


def attention(q: Heads, k: Keys, v: Keys, *, implementation: str = "flash") -> Heads:
    """Attend causally: position `t` reads the values of positions `0..t`.

    `softmax(q k^T / sqrt(D), over s <= t) v`, scores and softmax in float32. The result
    carries the value name `context`; the chunked form's log-sum-exp, which its
    backward pass reads too, is `context_lse`.

    Args:
        q: Queries.
        k: Keys, of the same shape.
        v: Values, of the same shape.
        implementation: One of `IMPLEMENTATIONS`.

    Raises:
        WorkloadError: The name is unknown, the shapes differ, or `cudnn` was asked for
            where it cannot run.

    Example:
        >>> x = jnp.ones((1, 3, 2, 4))
        >>> attention(x, x, x, implementation="chunked").shape
        (1, 3, 2, 4)
    """
    if not q.shape == k.shape == v.shape:
        raise WorkloadError(
            f"Self-attention needs `q`, `k`, `v` of one shape [batch, seq, heads, "
            f"head_dim]; got {q.shape}, {k.shape}, {v.shape}."
        )
    chosen = resolve(implementation, dtype=q.dtype, head_dim=q.shape[-1])
    with jax.named_scope(f"attention[{chosen}]"):
        if chosen == "chunked":
            return _chunked(q, k, v)
        out = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation=chosen
        )
    return checkpoint_name(out, "context")


def resolve(
    implementation: str, *, dtype: jax.typing.DTypeLike, head_dim: int
) -> Resolved:
    """Return the implementation that runs: `flash` decided, `cudnn` checked.

    Example:
        >>> resolve("flash", dtype="float32", head_dim=64)
        'chunked'
    """
    if implementation not in IMPLEMENTATIONS:
        hint = did_you_mean(implementation, IMPLEMENTATIONS)
        raise WorkloadError(f"`attention={implementation}` is not known. {hint}")
    if implementation not in ("flash", "cudnn"):
        return cast(Resolved, implementation)
    obstacle = _cudnn_obstacle(jnp.dtype(dtype), head_dim)
    if implementation == "flash":
        return "chunked" if obstacle else "cudnn"
    if obstacle:
        raise WorkloadError(
            f"`attention=cudnn` cannot run: {obstacle}. Or use `attention=flash`, "
            "which takes cuDNN where it can and the chunked form elsewhere."
        )
    return "cudnn"


def _cudnn_obstacle(dtype: jnp.dtype, head_dim: int) -> str | None:
    """Say why cuDNN's fused attention cannot be used here, or None if it can."""
    platform = (active_device() or get_device("attached")).platform
    if platform != "cuda":
        return f"it needs a CUDA target and this one is `{platform}`"
    if not has_cudnn_wheels():
        return (
            "the cuDNN wheels are missing; `pip install 'jaxckpt[cudnn]'` brings them"
        )
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16 or float16 and got `dtype={dtype}`"
    if head_dim % 8 or head_dim > 128:
        return f"it needs a head size of 8, 16, ... 128 and got {head_dim}"
    return None


@jax.custom_vjp
def _chunked(q: Heads, k: Heads, v: Heads) -> Heads:
    """Attend `CHUNK` queries at a time, so that scores are linear in `seq`.

    Each chunk of queries sees all keys, so its softmax is exact at once. The backward
    pass keeps q, k, v, the result and the log-sum-exp of each row, and computes the
    scores again chunk by chunk (Rabe and Staats, arXiv:2112.05682; the gradient from
    the log-sum-exp is that of FlashAttention, arXiv:2205.14135, algorithm 4).
    """
    return _chunked_forward(q, k, v)[0]


def _chunked_forward(q: Heads, k: Heads, v: Heads):
    chunks, size = _chunking(q.shape[1])
    padded_q = _pad(q, chunks * size)

    def one_chunk(_, start):
        scores = _scores(_rows(padded_q, start, size), k, start)
        lse = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.exp(scores - lse[..., None]).astype(v.dtype)
        return None, (_product("bhqs,bshd->bqhd", weights, v).astype(v.dtype), lse)

    _, (out, lse) = jax.lax.scan(one_chunk, None, size * jnp.arange(chunks))
    # The names stand inside the forward rule: only there can a policy reach what the
    # backward rule reads. Outside, attention would be stored and run again.
    out = checkpoint_name(_join(out, q.shape[1]), "context")
    lse = checkpoint_name(lse, "context_lse")
    return out, (q, k, v, out, lse)


def _chunked_backward(residuals, d_out):
    q, k, v, out, lse = residuals
    seq = q.shape[1]
    chunks, size = _chunking(seq)
    # The softmax's own gradient needs sum_s(weights * d_weights) = d_out . out per row.
    row_sums = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    q, d_out, row_sums = (_pad(x, chunks * size) for x in (q, d_out, row_sums))

    def one_chunk(carry, start_lse):
        d_k, d_v = carry
        start, lse_chunk = start_lse
        q_chunk, d_chunk, sums = (_rows(x, start, size) for x in (q, d_out, row_sums))
        weights = jnp.exp(_scores(q_chunk, k, start) - lse_chunk[..., None])
        d_weights = _product("bqhd,bshd->bhqs", d_chunk, v)
        d_scores = weights * (d_weights - jnp.moveaxis(sums, 1, 2)[..., None])
        d_scores = (d_scores / math.sqrt(q.shape[-1])).astype(q.dtype)
        d_v += _product("bhqs,bqhd->bshd", weights.astype(v.dtype), d_chunk)
        d_k += _product("bhqs,bqhd->bshd", d_scores, q_chunk)
        return (d_k, d_v), _product("bhqs,bshd->bqhd", d_scores, k).astype(q.dtype)

    zeros = jnp.zeros(k.shape, jnp.float32)
    starts = size * jnp.arange(chunks)
    (d_k, d_v), d_q = jax.lax.scan(one_chunk, (zeros, zeros), (starts, lse))
    return _join(d_q, seq), d_k.astype(k.dtype), d_v.astype(v.dtype)


_chunked.defvjp(_chunked_forward, _chunked_backward)

_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _chunking(seq: int) -> tuple[int, int]:
    """Return how many chunks, and of how many queries, with the least padding.

    Example:
        >>> _chunking(1024), _chunking(129), _chunking(5)
        ((8, 128), (2, 65), (1, 5))
    """
    chunks = -(-seq // CHUNK)
    return chunks, -(-seq // chunks)


def _scores(
    q_chunk: Float[Array, "batch rows heads head_dim"], k: Heads, start: Array
) -> Float[Array, "batch heads rows seq"]:
    """Return the masked float32 scores of the queries that begin at `start`."""
    scores = _product("bqhd,bshd->bhqs", q_chunk, k) / math.sqrt(k.shape[-1])
    rows = start + jnp.arange(q_chunk.shape[1])[:, None]
    return jnp.where(rows >= jnp.arange(k.shape[1]), scores, -jnp.inf)


def _pad(x: Array, rows: int) -> Array:
    """Extend the sequence axis with zeros to `rows`; their gradient is zero."""
    return jnp.pad(x, [(0, 0), (0, rows - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


def _rows(x: Array, start: Array, size: int) -> Array:
    """Return `size` positions from `start`, without a rearranged copy of all of `x`."""
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)


def _join(
    x: Float[Array, "chunks batch size heads head_dim"], seq: int
) -> Float[Array, "batch {seq} heads head_dim"]:
    """Put the chunks of a scan side by side again and drop the padding."""
    chunks, batch, size, *rest = x.shape
    return jnp.moveaxis(x, 0, 1).reshape(batch, chunks * size, *rest)[:, :seq]
