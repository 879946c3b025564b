"""What image models share: pictures to learn from, and workload functions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxckpt.errors import WorkloadError
from jaxckpt.policy import Policy
from jaxckpt.schedule import Schedule, combine
from jaxckpt.training import adamw
from jaxckpt.training.data import SPLITS
from jaxckpt.workload import Workload
from models.attention import IMPLEMENTATIONS
from models.language import DTYPES, check_choice, check_shared

POOLINGS = ("class", "mean")


def grating_batches(
    split: str,
    *,
    batch: int,
    size: int,
    channels: int,
    classes: int,
    seed: int = 0,
    start: int = 0,
) -> Iterator[dict[str, np.ndarray]]:
    """Yield images of waves, without end; their direction is the class.

    `{"images": float32[batch, size, size, channels], "labels": int32[batch]}`. With the
    angle `t = pi c / classes`, an image of class `c` is

        a cos(2 pi f (x cos t + y sin t) + p) + noise

    at a random frequency `f` of 2 to 4 waves a side, a random phase `p`, an amplitude
    `a` of each channel and normal noise of 0.3. Nothing is downloaded, and no pixel by
    itself tells the class. Batch `i` depends on `(split, seed, i)` alone.

    Args:
        split: `"train"` or `"validation"`.
        batch: Images in a batch.
        size: Pixels of a side.
        channels: Of a pixel.
        classes: How many directions there are.
        seed: Of the order.
        start: Number of the first batch.

    Raises:
        WorkloadError: An unknown split.

    Example:
        >>> batches = grating_batches("train", batch=2, size=8, channels=3, classes=4)
        >>> next(batches)["images"].shape
        (2, 8, 8, 3)
    """
    check_choice("split", split, SPLITS)
    sides = np.arange(size) / size
    number = start
    while True:
        rng = np.random.default_rng((SPLITS.index(split), seed, number))
        labels = rng.integers(classes, size=batch)
        angle = np.pi * labels / classes
        frequency, phase = rng.uniform(2, 4, batch), rng.uniform(0, 2 * np.pi, batch)
        rows = np.multiply.outer(np.sin(angle), sides)[:, :, None]
        along = np.multiply.outer(np.cos(angle), sides)[:, None, :] + rows
        turns = along * frequency[:, None, None]
        wave = np.cos(2 * np.pi * turns + phase[:, None, None])
        images = wave[..., None] * rng.uniform(0.5, 1, (batch, 1, 1, channels))
        images += 0.3 * rng.normal(size=images.shape)
        yield {"images": images.astype(np.float32), "labels": labels.astype(np.int32)}
        number += 1


def check_settings(config: Any, *, batch: int) -> None:
    """Raise `WorkloadError` for settings that make no model, before anything traces.

    Args:
        config: A model's config, with `num_layers`, `image_size`, `patch`, `pooling`,
            `dtype`, `attention` and `dropout`.
        batch: Images a step.
    """
    check_shared(config, batch=batch, image_size=config.image_size)
    check_choice("pooling", config.pooling, POOLINGS)
    if config.image_size % config.patch:
        raise WorkloadError(
            f"`image_size={config.image_size}` is not cut in patches of "
            f"{config.patch}. Use a multiple of {config.patch}."
        )


def workload_function(
    name: str,
    about: str,
    sizes: Any,
    *,
    make_loss: Callable[[Any], Callable[..., Any]],
    init_params: Callable[..., Any],
    batch: int,
    learning_rate: float,
) -> Callable[..., Workload]:
    """Return the workload function of one size; the numbers given are its defaults.

    Args:
        name: Its name.
        about: What it trains, for its docstring.
        sizes: The model's config, with `channels` and `classes` too.
        make_loss: Makes a loss function of a config.
        init_params: `init_params(config, rng)` makes initial parameters.
        batch: Images a step.
        learning_rate: Its peak.
    """

    def workload(
        *,
        batch: int = batch,
        image_size: int = sizes.image_size,
        num_layers: int = sizes.num_layers,
        dtype: str = "bfloat16",
        attention: str = "flash",
        pooling: str = sizes.pooling,
        dropout: float = 0.0,
        policy: Policy | str | None = None,
        schedule: Schedule | str | None = None,
        scan: bool = True,
        seed: int = 0,
        learning_rate: float = learning_rate,
        warmup_steps: int = 20,
        decay_steps: int = 2000,
    ) -> Workload:
        config = dataclasses.replace(
            sizes,
            image_size=image_size,
            num_layers=num_layers,
            dtype=dtype,
            attention=attention,
            pooling=pooling,
            dropout=dropout,
            schedule=combine(policy, schedule),
            scan=scan,
        )
        check_settings(config, batch=batch)
        init = functools.partial(init_params, config)
        shape = (batch, image_size, image_size, config.channels)
        return Workload(
            name=name,
            loss_fn=make_loss(config),
            params=jax.eval_shape(init, jax.random.key(0)),
            batch={
                "images": jax.ShapeDtypeStruct(shape, jnp.float32),
                "labels": jax.ShapeDtypeStruct((batch,), jnp.int32),
            },
            optimizer=adamw(
                learning_rate, warmup_steps=warmup_steps, decay_steps=decay_steps
            ),
            init=init,
            data=functools.partial(
                grating_batches,
                batch=batch,
                size=image_size,
                channels=config.channels,
                classes=config.classes,
                seed=seed,
            ),
            layers=num_layers,
        )

    workload.__name__ = workload.__qualname__ = name
    workload.__doc__ = f"""Train {about} on images of waves (`grating_batches`).

    Args:
        batch: Images a step.
        image_size: Pixels of a side, a multiple of {sizes.patch}.
        num_layers: Depth.
        dtype: What the layers compute in: {", ".join(DTYPES)}.
        attention: One of {", ".join(IMPLEMENTATIONS)}.
        pooling: What the head reads, one of {", ".join(POOLINGS)}: a token of its own,
            or the mean over all patches.
        dropout: Rate; 0 for none.
        policy: What stays of each layer, or its text form; None for no remat. Beside a
            schedule it fills the layers that this leaves open.
        schedule: Which layers are rematerialised, or its text form.
        scan: Equal layers run in a loop, or all layers one by one.
        seed: Of the order of the training data.
        learning_rate: Its peak, reached after the warm-up.
        warmup_steps: Steps of linear warm-up.
        decay_steps: Step at which the cosine has decayed to a tenth of the peak.
    """
    return workload
