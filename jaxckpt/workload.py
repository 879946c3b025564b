"""What is planned, measured and trained: a loss function with its abstract inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import optax

PyTree = Any


@dataclass(frozen=True)
class Workload:
    """A training problem, described without allocating anything.

    Attributes:
        name: Short label for tables and logs.
        loss_fn: `loss_fn(params, batch, rng=None) -> loss` or `(loss, aux)`; `loss` is
            a scalar.
        params: Tree of `jax.ShapeDtypeStruct` (or arrays), the first argument.
        batch: Tree of `jax.ShapeDtypeStruct` (or arrays), the second argument.
        optimizer: The optax transformation that one step applies.
        init: `init(rng) -> params`; needed to train, and to measure here.
        data: `data(split) -> iterator of batches`, `split` in `"train"`,
            `"validation"`; needed to train. A data set given by `--data` reaches it
            through the workload function's `data_path` keyword.
        make_step: `make_step(loss_fn) -> step` for users whose training step is
            special; replaces `optimizer`.
        layers: Number of repeated layers, if the program has them (for reports).
    """

    name: str
    loss_fn: Callable[..., Any]
    params: PyTree
    batch: PyTree
    optimizer: optax.GradientTransformation | None = None
    init: Callable[[Any], PyTree] | None = None
    data: Callable[[str], Iterator[PyTree]] | None = None
    make_step: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    layers: int | None = None
