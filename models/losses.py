"""The loss of a language model, whole or in chunks of the sequence."""

from __future__ import annotations

import functools
from typing import Any

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
            other. Where a gradient is taken, each part's is made beside its loss: an
            `n`-th of the bytes is alive, and no product runs again. Then `jax.jvp` of
            the loss itself is not there, as of any `custom_vjp`; Hessian-vector
            products (`jax.jvp` of the gradient) are.

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
    # The table is float32 in there, so that the parts of its gradient add up in that.
    table = table.astype(jnp.float32)
    total: Any = _sum_in_chunks(hidden, table, targets, chunks)
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
    logits = _logits(hidden, table)
    of_target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - of_target)


def _logits(hidden: Array, table: Array) -> Float[Array, "batch seq vocab"]:
    return _product("bse,ve->bsv", hidden, table.astype(hidden.dtype))


def _product(axes: str, x: Array, y: Array) -> Array:
    return jnp.einsum(axes, x, y, preferred_element_type=jnp.float32)


# --- In chunks -----------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _sum_in_chunks(hidden: Array, table: Array, targets: Array, chunks: int) -> Array:
    """Return the sum of the losses, one part of the sequence after the other.

    A loss is where the backward pass turns round: its gradient can be made while the
    logits are there, up to the factor that comes from behind it.
    """

    def add_chunk(total, hidden_targets):
        hidden_chunk, target_chunk = hidden_targets
        return total + _sum_of_losses(hidden_chunk, table, target_chunk), None

    parts = _split(hidden, chunks), _split(targets, chunks)
    return jax.lax.scan(add_chunk, jnp.float32(0), parts)[0]


def _forward_in_chunks(hidden, table, targets, chunks):
    """Return the sum, and its gradients of `hidden` and `table`: None for a frozen one.

    Each argument has a `value`, and is `perturbed` where its gradient is wanted.
    """
    trains_hidden, trains_table = hidden.perturbed, table.perturbed
    hidden, table, targets = hidden.value, table.value, targets.value

    def add_chunk(totals, hidden_targets):
        total, d_table = totals
        hidden_chunk, target_chunk = hidden_targets
        loss, d_logits = _loss_and_gradient(_logits(hidden_chunk, table), target_chunk)
        d_logits = d_logits.astype(hidden.dtype)
        d_hidden = _gradient_of_hidden(d_logits, table) if trains_hidden else None
        if trains_table:
            d_table += _product("bsv,bse->ve", d_logits, hidden_chunk)
        return (total + loss, d_table), d_hidden

    d_table = jnp.zeros(table.shape, jnp.float32) if trains_table else None
    parts = _split(hidden, chunks), _split(targets, chunks)
    zeros = jnp.float32(0), d_table
    (total, d_table), d_hidden = jax.lax.scan(add_chunk, zeros, parts)
    return total, (jax.tree.map(_joined, d_hidden), d_table)


def _backward_in_chunks(chunks, gradients, d_total):
    scaled = [x if x is None else (d_total * x).astype(x.dtype) for x in gradients]
    return (*scaled, None)


_sum_in_chunks.defvjp(_forward_in_chunks, _backward_in_chunks, symbolic_zeros=True)


def _loss_and_gradient(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Return the sum of the losses and its gradient of the logits."""
    lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    of_target = jnp.sum(logits, axis=-1, keepdims=True, where=is_target)
    return jnp.sum(lse - of_target), jnp.exp(logits - lse) - is_target


def _gradient_of_hidden(d_logits: Array, table: Array) -> Array:
    d_hidden = _product("bsv,ve->bse", d_logits, table.astype(d_logits.dtype))
    return d_hidden.astype(d_logits.dtype)


def _split(x: Array, chunks: int) -> Array:
    batch, seq, *rest = x.shape
    return jnp.moveaxis(x.reshape(batch, chunks, seq // chunks, *rest), 1, 0)


def _joined(x: Array) -> Array:
    """Put the parts of `_split` side by side again."""
    chunks, batch, size, *rest = x.shape
    return jnp.moveaxis(x, 0, 1).reshape(batch, chunks * size, *rest)
