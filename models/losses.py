"""The loss of a language model, whole or in chunks of the sequence."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxckpt.errors import WorkloadError


def cross_entropy(
    hidden: Float[Array, "batch seq embed"],
    table: Float[Array, "vocab embed"],
    targets: Int[Array, "batch seq"],
    *,
    chunks: int = 0,
) -> Float[Array, ""]:
    """Return the mean of `-log softmax(hidden table^T)[target]`, in nats per token.

    Products run in the dtype of `hidden`; logits and everything after are float32.

    Args:
        hidden: What the last layer says of each position.
        table: The output embedding.
        targets: The token that follows each position.
        chunks: 0 computes all logits at once: `batch * seq * vocab` floats, kept for
            the backward pass. `n > 0` cuts the sequence in `n` parts, one after the
            other; where a gradient is taken, each part's is made beside its loss, so
            that an `n`-th of the bytes is alive and no product runs again. There is no
            forward mode through it then.

    Raises:
        WorkloadError: `chunks` is negative or does not divide the sequence.

    Example:
        >>> hidden, table = jnp.ones((1, 4, 8)), jnp.zeros((16, 8))
        >>> targets = jnp.zeros((1, 4), int)
        >>> float(jnp.exp(cross_entropy(hidden, table, targets, chunks=2))).__round__(3)
        16.0
    """
    check_chunks(chunks, targets.shape[1])
    if chunks == 0:
        return _sum_of_losses(hidden, table, targets) / targets.size
    return _chunked(hidden, table, targets, chunks) / targets.size


def check_chunks(chunks: int, seq: int) -> None:
    """Raise `WorkloadError` unless the sequence can be cut in `chunks` equal parts."""
    if chunks < 0 or (chunks > 0 and seq % chunks):
        valid = ", ".join(str(n) for n in range(1, seq + 1) if seq % n == 0)
        raise WorkloadError(
            f"`loss_chunks={chunks}` does not divide the sequence of {seq}. "
            f"Use 0 (unchunked) or one of {valid}."
        )


def _sum_of_losses(hidden: Array, table: Array, targets: Array) -> Float[Array, ""]:
    logits = jnp.einsum(
        "bse,ve->bsv",
        hidden,
        table.astype(hidden.dtype),
        preferred_element_type=jnp.float32,
    )
    of_target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - of_target)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _chunked(hidden: Array, table: Array, targets: Array, chunks: int) -> Array:
    """Return the sum of the losses, one part of the sequence after the other.

    A loss is where the backward pass turns round: its gradient can be made while the
    logits are there, up to the factor that comes from behind it.
    """

    def add_chunk(total, hidden_targets):
        hidden_chunk, target_chunk = hidden_targets
        return total + _sum_of_losses(hidden_chunk, table, target_chunk), None

    parts = _split(hidden, chunks), _split(targets, chunks)
    return jax.lax.scan(add_chunk, jnp.float32(0), parts)[0]


def _chunked_forward(hidden, table, targets, chunks):
    trains_table = table.perturbed
    hidden, table, targets = hidden.value, table.value, targets.value

    def add_chunk(totals, hidden_targets):
        total, d_table = totals
        hidden_chunk, target_chunk = hidden_targets
        cast_table = table.astype(hidden.dtype)
        logits = _product("bse,ve->bsv", hidden_chunk, cast_table)
        lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        is_target = jnp.arange(logits.shape[-1]) == target_chunk[..., None]
        total += jnp.sum(lse) - jnp.sum(jnp.where(is_target, logits, 0.0))
        d_logits = (jnp.exp(logits - lse) - is_target).astype(hidden.dtype)
        d_chunk = _product("bsv,ve->bse", d_logits, cast_table)
        if trains_table:
            # The parts add up in the table's own dtype, not in that of `hidden`.
            d_table += _product("bsv,bse->ve", d_logits, hidden_chunk)
        return (total, d_table), d_chunk.astype(hidden.dtype)

    parts = _split(hidden, chunks), _split(targets, chunks)
    zeros = jnp.zeros_like(table) if trains_table else None
    totals = jnp.float32(0), zeros
    (total, d_table), d_hidden = jax.lax.scan(add_chunk, totals, parts)
    return total, (_joined(d_hidden), d_table)


def _chunked_backward(chunks, gradients, d_total):
    d_hidden, d_table = gradients
    scaled = [
        None if x is None else (d_total * x).astype(x.dtype)
        for x in (d_hidden, d_table)
    ]
    return (*scaled, None)


_chunked.defvjp(_chunked_forward, _chunked_backward, symbolic_zeros=True)

_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _split(x: Array, chunks: int) -> Array:
    batch, seq, *rest = x.shape
    return jnp.moveaxis(x.reshape(batch, chunks, seq // chunks, *rest), 1, 0)


def _joined(x: Array) -> Array:
    """Put the parts of `_split` side by side again."""
    chunks, batch, size, *rest = x.shape
    return jnp.moveaxis(x, 0, 1).reshape(batch, chunks * size, *rest)
