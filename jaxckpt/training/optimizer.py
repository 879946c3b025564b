"""The optimizer that our models train with."""

from __future__ import annotations

from typing import Any

import jax
import optax


def adamw(
    learning_rate: float,
    *,
    warmup_steps: int,
    decay_steps: int,
    weight_decay: float = 0.1,
) -> optax.GradientTransformation:
    """Return AdamW with a linear warm-up, then a cosine to a tenth of the peak.

    Args:
        learning_rate: The peak, reached after `warmup_steps`.
        warmup_steps: Steps from 0 to the peak.
        decay_steps: Step, warm-up included, from which a tenth of the peak stays.
        weight_decay: Acts on kernels and embeddings alone (see `decayed`).

    Example:
        >>> optimizer = adamw(1e-3, warmup_steps=10, decay_steps=100)
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=decay_steps,
        end_value=learning_rate / 10,
    )
    return optax.adamw(
        schedule, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=decayed
    )


def decayed(params: Any) -> Any:
    """Return the tree of which parameters weight decay acts on.

    Kernels and embeddings do, by name: biases and norms of scanned layers are matrices
    too, one row a layer, so that their rank does not tell them.

    Example:
        >>> decayed({"dense": {"kernel": 0, "bias": 0}})
        {'dense': {'bias': False, 'kernel': True}}
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: getattr(path[-1], "key", None) in ("kernel", "embedding"),
        params,
    )
