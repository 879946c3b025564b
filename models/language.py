"""What the language models share: their settings, checked, and workload functions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxckpt.errors import WorkloadError, did_you_mean
from jaxckpt.policy import Decision, Policy, save_everything
from jaxckpt.policy_algebra import Candidate
from jaxckpt.schedule import Keep, Node, Remat, Schedule, combine
from jaxckpt.training import adamw, byte_batches
from jaxckpt.workload import Workload
from models.attention import IMPLEMENTATIONS
from models.losses import check_chunks, cross_entropy

DTYPES = ("bfloat16", "float16", "float32")


def make_language_loss(
    model: nn.Module, table_of: Callable[[Any], Array], *, chunks: int
) -> Callable[..., Float[Array, ""]]:
    """Return `loss_fn(params, batch, rng=None)`: mean nats per token.

    `batch` is `{"tokens": int32[batch, seq + 1]}`: position `t` reads tokens `0..t` and
    predicts token `t + 1`. Dropout acts when there is an `rng`.

    Args:
        model: Makes hidden states of tokens.
        table_of: Returns the output embedding `[vocab, width]` of the parameters.
        chunks: 0, or in how many parts the loss cuts the sequence.
    """

    def loss_fn(params: Any, batch: dict[str, Array], rng: Array | None = None):
        tokens = batch["tokens"]
        hidden: Any = model.apply(
            {"params": params},
            tokens[:, :-1],
            deterministic=rng is None,
            rngs=None if rng is None else {"dropout": rng},
        )
        return cross_entropy(hidden, table_of(params), tokens[:, 1:], chunks=chunks)

    return loss_fn


def init_model(model: nn.Module, rng: Array) -> Any:
    """Return initial parameters; with `jax.eval_shape` only their shapes."""
    tokens = jnp.zeros((1, 1), jnp.int32)  # no parameter depends on their number
    return model.init(rng, tokens)["params"]


def check_settings(config: Any, *, batch: int, seq: int) -> None:
    """Raise `WorkloadError` for settings that make no model, before anything traces.

    Args:
        config: A model's config, with `num_layers`, `positions`, `dtype`, `attention`,
            `dropout` and `loss_chunks`.
        batch: Sequences a step.
        seq: Tokens of a sequence.
    """
    check_shared(config, batch=batch, seq=seq)
    if seq > config.positions:
        raise WorkloadError(
            f"`seq={seq}` is longer than the {config.positions} positions that the "
            "model is made for. Use at most that many."
        )
    check_chunks(config.loss_chunks, seq)


def check_shared(config: Any, **counts: int) -> None:
    """Check what all models have: counts, `dtype`, `attention` and `dropout`."""
    for name, value in (counts | {"num_layers": config.num_layers}).items():
        if value < 1:
            raise WorkloadError(f"`{name}={value}` must be at least 1.")
        if value >= 2**31:
            raise WorkloadError(f"`{name}={value}` must be below 2**31.")
    check_choice("dtype", config.dtype, DTYPES)
    check_choice("attention", config.attention, IMPLEMENTATIONS)
    if not 0 <= config.dropout < 1:
        raise WorkloadError(
            f"`dropout={config.dropout}` is not a rate. Use 0 (none) up to below 1."
        )
    if config.attention == "xla_remat" and config.schedule is not None:
        _check_attention_remat(config.schedule, config.num_layers)


def _check_attention_remat(schedule: Schedule, num_layers: int) -> None:
    """Raise where `xla_remat` would run attention three times, or never again.

    Under remat of the whole layer attention runs for the forward pass, once more for
    what the layer computes again from it, and in its own remat for its gradient; unless
    the layer keeps `context`. A layer that keeps everything keeps the scores too.
    """
    if all(map(_suits_attention_remat, schedule.nodes(num_layers))):
        return
    raise WorkloadError(
        f"`attention=xla_remat` and the schedule `{schedule}` contradict each other: a "
        "layer under a policy has to keep `context`, else attention runs three times, "
        "and not everything, else it keeps the scores. Use a policy like "
        "`save(context)`, or `attention=xla`, of which the policy keeps what it says."
    )


def _suits_attention_remat(node: Node) -> bool:
    if isinstance(node, Keep):
        return True
    if not isinstance(node, Remat) or node.policy in (None, save_everything()):
        return False
    context = Candidate("context", dot=None, bytes=0)
    return node.policy.decide(context) is not Decision.RECOMPUTE


def check_choice(name: str, value: str, valid: tuple[str, ...]) -> None:
    """Raise `WorkloadError` unless a setting is one of its valid values."""
    if value not in valid:
        hint = did_you_mean(value, valid)
        raise WorkloadError(f"`{name}={value}` is not known. {hint}")


def workload_function(
    name: str,
    about: str,
    sizes: Any,
    *,
    make_loss: Callable[[Any], Callable[..., Any]],
    init_params: Callable[..., Any],
    batch: int,
    seq: int,
    learning_rate: float,
    loss_chunks: int = 0,
) -> Callable[..., Workload]:
    """Return the workload function of one size; the numbers given are its defaults.

    Args:
        name: Its name.
        about: What it trains, for its docstring.
        sizes: The model's config.
        make_loss: Makes a loss function of a config.
        init_params: `init_params(config, rng)` makes initial parameters.
        batch: Sequences a step.
        seq: Tokens of a sequence.
        learning_rate: Its peak.
        loss_chunks: In how many parts the loss is computed.
    """
    num_layers = sizes.num_layers

    def workload(
        *,
        batch: int = batch,
        seq: int = seq,
        num_layers: int = num_layers,
        dtype: str = "bfloat16",
        attention: str = "flash",
        loss_chunks: int = loss_chunks,
        dropout: float = 0.0,
        policy: Policy | str | None = None,
        schedule: Schedule | str | None = None,
        scan: bool = True,
        data_path: str | None = None,
        seed: int = 0,
        learning_rate: float = learning_rate,
        warmup_steps: int = 20,
        decay_steps: int = 2000,
    ) -> Workload:
        config = dataclasses.replace(
            sizes,
            num_layers=num_layers,
            dtype=dtype,
            attention=attention,
            loss_chunks=loss_chunks,
            dropout=dropout,
            schedule=combine(policy, schedule),
            scan=scan,
        )
        check_settings(config, batch=batch, seq=seq)
        init = functools.partial(init_params, config)
        return Workload(
            name=name,
            loss_fn=make_loss(config),
            params=jax.eval_shape(init, jax.random.key(0)),
            batch={"tokens": jax.ShapeDtypeStruct((batch, seq + 1), jnp.int32)},
            optimizer=adamw(
                learning_rate, warmup_steps=warmup_steps, decay_steps=decay_steps
            ),
            init=init,
            data=functools.partial(
                byte_batches, path=data_path, batch=batch, length=seq + 1, seed=seed
            ),
            layers=num_layers,
        )

    workload.__name__ = workload.__qualname__ = name
    workload.__doc__ = f"""Train {about} on the bytes of text files.

    Args:
        batch: Sequences a step.
        seq: Tokens of a sequence that predict the next one; at most {sizes.positions}.
        num_layers: Depth.
        dtype: What the layers compute in: {", ".join(DTYPES)}.
        attention: One of {", ".join(IMPLEMENTATIONS)}.
        loss_chunks: 0, or a divisor of `seq`: in how many parts the loss is computed.
        dropout: Rate; 0 for none.
        policy: What stays of each layer, or its text form; None for no remat. Beside a
            schedule it fills the layers that this leaves open.
        schedule: Which layers are rematerialised, or its text form.
        scan: Equal layers run in a loop, or all layers one by one.
        data_path: A file or folder of text; None for Python's own library.
        seed: Of the order of the training data.
        learning_rate: Its peak, reached after the warm-up.
        warmup_steps: Steps of linear warm-up.
        decay_steps: Step at which the cosine has decayed to a tenth of the peak.
    """
    return workload
