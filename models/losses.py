"""The loss of a language model, whole or in chunks of the sequence."""

from __future__ import annotations

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
            other, each computed again in the backward pass: an `n`-th of the bytes for
            a second product with `table`.

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

    # `table` is cast inside each chunk, so that the chunks' gradients of it add up in
    # its own dtype and not in that of `hidden`.
    chunk_loss = jax.checkpoint(_sum_of_losses, prevent_cse=False)

    def add_chunk(total, hidden_targets):
        hidden_chunk, target_chunk = hidden_targets
        return total + chunk_loss(hidden_chunk, table, target_chunk), None

    parts = _split(hidden, chunks), _split(targets, chunks)
    total, _ = jax.lax.scan(add_chunk, jnp.float32(0), parts)
    return total / targets.size


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


def _split(x: Array, chunks: int) -> Array:
    batch, seq, *rest = x.shape
    return jnp.moveaxis(x.reshape(batch, chunks, seq // chunks, *rest), 1, 0)
