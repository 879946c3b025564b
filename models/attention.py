"""Self-attention in four implementations, one of them chosen by the target.

All take queries as `[batch, seq, heads, head_dim]` and return the same shape. Keys and
values may have fewer heads, a divisor of the queries' (grouped-query attention): query
head `h` reads key head `h // (heads / kv_heads)`, and no form repeats the keys in
memory. `H` is heads, `S` sequence length, `D` head dimension, `C` a chunk:

    implementation   float32 score bytes alive   needs
    xla              4 * batch * H * S * S        nothing
    xla_remat        the same, of one layer       nothing
    chunked          4 * batch * H * C * S        nothing
    cudnn            none                         a CUDA target, bf16 or f16, the wheels
    flash            resolves to cudnn where it can run, else to chunked

`xla` keeps its scores for the backward pass. The others are attention alone under
remat, beside layers that keep everything else: `xla_remat` keeps q, k, v and the result
and computes the scores again (Korthikanti et al., "Reducing Activation Recomputation",
arXiv:2205.05198, call it selective); `chunked` and `cudnn` do so in their own backward
rule, which reads the log-sum-exp too, so that a remat around them has nothing to free.

Why our own chunked form: tokamax's `xla_chunked` (0.0.12) is quadratic in `seq` once a
gradient is taken (so say its own tests), and it brings a dozen packages. Temporary MiB
for batch 4, 2048 positions, 16 heads of 128 in bf16, compiled for an absent H100 with
jax 0.10.2:

                          xla     tokamax     ours
    forward              1536         285      192
    forward + backward   2592         905      389

With 4 key heads ours takes 144 and 333, and 451 if they are repeated first.
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
from jaxckpt.policy import save_nothing
from jaxckpt.remat import remat

IMPLEMENTATIONS = ("cudnn", "xla", "xla_remat", "chunked", "flash")
Resolved = Literal["cudnn", "xla", "xla_remat", "chunked"]
CHUNK = 128  # queries per step: 128 x S scores fill a GPU and stay small

Heads = Float[Array, "batch seq heads head_dim"]
Keys = Float[Array, "batch keys kv_heads head_dim"]  # `keys` is `seq`, once checked
Grouped = Float[Array, "batch rows kv_heads group head_dim"]


def attention(
    q: Heads, k: Keys, v: Keys, *, implementation: str = "flash", causal: bool = True
) -> Heads:
    """Attend: position `t` reads the values of positions `0..t`, or of all.

    `softmax(q k^T / sqrt(D), over s <= t) v`, scores and softmax in float32. The result
    carries the value name `context`; the chunked form's log-sum-exp, which its
    backward pass reads too, is `context_lse`.

    Args:
        q: Queries.
        k: Keys, of the same shape, or with fewer heads that divide the queries'.
        v: Values, of the keys' shape.
        implementation: One of `IMPLEMENTATIONS`.
        causal: Whether a position reads no later one.

    Raises:
        WorkloadError: The name is unknown, the shapes do not fit, or `cudnn` was asked
            for where it cannot run.

    Example:
        >>> q, k = jnp.ones((1, 3, 4, 8)), jnp.ones((1, 3, 2, 8))
        >>> attention(q, k, k, implementation="chunked").shape
        (1, 3, 4, 8)
        >>> import jaxckpt
        >>> attend = functools.partial(attention, implementation="xla_remat")
        >>> [r.name for r in jaxckpt.trace(attend, q, k, k, argnums=(0, 1, 2)).residuals
        ...  if r.held]
        []
    """
    _check_shapes(q, k, v)
    chosen = resolve(implementation, dtype=q.dtype, head_dim=q.shape[-1])
    with jax.named_scope(f"attention[{chosen}]"):
        if chosen == "chunked":
            return _chunked(q, k, v, causal)
        attend = functools.partial(
            jax.nn.dot_product_attention,
            is_causal=causal,
            implementation="cudnn" if chosen == "cudnn" else "xla",
        )
        if chosen == "xla_remat":
            attend = remat(attend, policy=save_nothing())
        out = attend(q, k, v)
    return checkpoint_name(out, "context")


def _check_shapes(q: Heads, k: Keys, v: Keys) -> None:
    batch, seq, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    if not k.shape == v.shape == (batch, seq, kv_heads, head_dim):
        raise WorkloadError(
            f"Self-attention needs `q`, `k`, `v` of one shape [batch, seq, heads, "
            f"head_dim], but for the heads of `k` and `v`, which may be fewer; got "
            f"{q.shape}, {k.shape}, {v.shape}."
        )
    if kv_heads < 1 or heads % kv_heads:
        valid = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise WorkloadError(
            f"`kv_heads={kv_heads}` does not divide the {heads} heads of the queries. "
            f"Use one of {valid}."
        )


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _chunked(q: Heads, k: Keys, v: Keys, causal: bool) -> Heads:
    """Attend `CHUNK` queries at a time, so that scores are linear in `seq`.

    Each chunk of queries sees all keys, so its softmax is exact at once. The backward
    pass keeps q, k, v, the result and the log-sum-exp of each row, and computes the
    scores again chunk by chunk (Rabe and Staats, arXiv:2112.05682; the gradient from
    the log-sum-exp is that of FlashAttention, arXiv:2205.14135, algorithm 4). Inside a
    chunk the query heads stand as `[kv_heads, group]`, so that a key serves its group
    in one product and its gradient is that product's sum.
    """
    return _chunked_forward(q, k, v, causal)[0]


def _chunked_forward(q: Heads, k: Keys, v: Keys, causal: bool):
    chunks, size = _chunking(q.shape[1])
    padded_q = _pad(_group(q, k.shape[2]), chunks * size)

    def one_chunk(_, start):
        scores = _scores(_rows(padded_q, start, size), k, start, causal)
        lse = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.exp(scores - lse[..., None]).astype(v.dtype)
        return None, (_product("bkgqs,bskd->bqkgd", weights, v).astype(v.dtype), lse)

    _, (out, lse) = jax.lax.scan(one_chunk, None, size * jnp.arange(chunks))
    # The names stand inside the forward rule: only there can a policy reach what the
    # backward rule reads. Outside, attention would be stored and run again.
    out = checkpoint_name(_join(out, q.shape[1]).reshape(q.shape), "context")
    lse = lse.reshape(chunks, q.shape[0], q.shape[2], size)
    lse = checkpoint_name(lse, "context_lse")
    return out, (q, k, v, out, lse)


def _chunked_backward(causal, residuals, d_out):
    q, k, v, out, lse = residuals
    seq = q.shape[1]
    chunks, size = _chunking(seq)
    # The softmax's own gradient needs sum_s(weights * d_weights) = d_out . out per row.
    row_sums = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    padded_q, d_out, row_sums = (
        _pad(_group(x, k.shape[2]), chunks * size) for x in (q, d_out, row_sums)
    )

    def one_chunk(carry, start_lse):
        d_k, d_v = carry
        start, lse_chunk = start_lse
        q_chunk, d_chunk, sums = (
            _rows(x, start, size) for x in (padded_q, d_out, row_sums)
        )
        scores = _scores(q_chunk, k, start, causal)
        weights = jnp.exp(scores - lse_chunk[..., None])
        d_weights = _product("bqkgd,bskd->bkgqs", d_chunk, v)
        d_scores = weights * (d_weights - jnp.moveaxis(sums, 1, -1)[..., None])
        d_scores = (d_scores / math.sqrt(q.shape[-1])).astype(q.dtype)
        d_v += _product("bkgqs,bqkgd->bskd", weights.astype(v.dtype), d_chunk)
        d_k += _product("bkgqs,bqkgd->bskd", d_scores, q_chunk)
        return (d_k, d_v), _product("bkgqs,bskd->bqkgd", d_scores, k).astype(q.dtype)

    zeros = jnp.zeros(k.shape, jnp.float32)
    starts = size * jnp.arange(chunks)
    starts_lse = starts, _group(lse, k.shape[2])
    (d_k, d_v), d_q = jax.lax.scan(one_chunk, (zeros, zeros), starts_lse)
    d_q = _join(d_q, seq).reshape(q.shape)
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype)


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


def _group(x: Array, kv_heads: int) -> Array:
    """Split the heads, axis 2, in `[kv_heads, group]`; the same bytes.

    Example:
        >>> _group(jnp.ones((2, 5, 6, 8)), 3).shape
        (2, 5, 3, 2, 8)
    """
    batch, seq, heads, *rest = x.shape
    return x.reshape(batch, seq, kv_heads, heads // kv_heads, *rest)


def _scores(
    q_chunk: Grouped, k: Keys, start: Array, causal: bool
) -> Float[Array, "batch kv_heads group rows keys"]:
    """Return the float32 scores of the queries that begin at `start`, masked."""
    scores = _product("bqkgd,bskd->bkgqs", q_chunk, k) / math.sqrt(k.shape[-1])
    if not causal:
        return scores
    rows = start + jnp.arange(q_chunk.shape[1])[:, None]
    return jnp.where(rows >= jnp.arange(k.shape[1]), scores, -jnp.inf)


def _pad(x: Array, rows: int) -> Array:
    """Extend the sequence axis with zeros to `rows`; their gradient is zero."""
    return jnp.pad(x, [(0, 0), (0, rows - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


def _rows(x: Array, start: Array, size: int) -> Array:
    """Return `size` positions from `start`, without a rearranged copy of all of `x`."""
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)


def _join(
    x: Float[Array, "chunks batch size kv_heads group head_dim"], seq: int
) -> Float[Array, "batch {seq} kv_heads group head_dim"]:
    """Put the chunks of a scan side by side again and drop the padding."""
    chunks, batch, size, *rest = x.shape
    return jnp.moveaxis(x, 0, 1).reshape(batch, chunks * size, *rest)[:, :seq]
