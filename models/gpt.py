"""GPT-2: a Transformer decoder from 4 layers of width 128 to the XL of 48 by 1600.

Learned positions, layer normalisation before each half of a layer, a GELU MLP and one
embedding table for input and output (Radford et al., "Language Models are Unsupervised
Multitask Learners", 2019). It computes in `dtype` (bfloat16) over float32 parameters.

A policy chooses among the values that a layer names, in the order of the computation:

    decoder_layer_input -> query_proj, key_proj, value_proj -> context (and context_lse
    under chunked attention) -> out_proj -> mlpwi -> mlpwo

The layers are one `jaxckpt.Stack` under a schedule, over stacked parameters; scanned,
or unrolled by `scan=False`. Workloads stand at the end: `tiny`, `gpt2`, `gpt2_medium`,
`gpt2_large` and `gpt2_xl`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxckpt.errors import WorkloadError, did_you_mean
from jaxckpt.policy import Policy
from jaxckpt.schedule import Schedule, combine, none
from jaxckpt.stack import Stack
from jaxckpt.training import adamw, byte_batches
from jaxckpt.workload import Workload
from models.attention import IMPLEMENTATIONS, attention
from models.losses import check_chunks, cross_entropy

DTYPES = ("bfloat16", "float16", "float32")

Hidden = Float[Array, "batch seq width"]


@dataclass(frozen=True)
class GPTConfig:
    """The sizes and settings of one model.

    Attributes:
        num_layers: Number of layers.
        width: Size of the residual stream, `num_heads` times the head size.
        num_heads: Attention heads.
        vocab_size: Rows of the embedding table. GPT-2's 50257 tokens are padded to
            50304, a multiple of 128, which suits tensor cores; the padding is never a
            target.
        positions: Longest sequence.
        dropout: Rate after the embedding, the attention and the MLP.
        dtype: What the layers compute in; parameters are float32.
        attention: One of `models.attention.IMPLEMENTATIONS`.
        loss_chunks: 0, or in how many parts the loss cuts the sequence.
        scan: Equal layers run in a loop, or all layers one by one.
        schedule: Which layers are rematerialised, and how.
    """

    num_layers: int = 12
    width: int = 768
    num_heads: int = 12
    vocab_size: int = 50304
    positions: int = 1024
    dropout: float = 0.0
    dtype: str = "bfloat16"
    attention: str = "flash"
    loss_chunks: int = 0
    scan: bool = True
    schedule: Schedule = dataclasses.field(default_factory=none)

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.width // self.num_heads


class Block(nn.Module):
    """One layer: `x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: Hidden, deterministic: bool = True) -> Hidden:
        """Return the layer's output."""
        # Named here, at the top: a name on what a layer returns has no effect.
        x = checkpoint_name(x, "decoder_layer_input")
        drop = nn.Dropout(self.config.dropout, deterministic=deterministic)
        x = x + drop(self._attention(self._norm("attention_norm")(x)))
        x = x + drop(self._mlp(self._norm("mlp_norm")(x)))
        return x

    def _attention(self, x: Hidden) -> Hidden:
        config = self.config
        heads = (*x.shape[:2], config.num_heads, config.head_dim)
        q = self._project(x, config.width, "query_proj").reshape(heads)
        k = self._project(x, config.width, "key_proj").reshape(heads)
        v = self._project(x, config.width, "value_proj").reshape(heads)
        context = attention(q, k, v, implementation=config.attention)
        return self._project(context.reshape(x.shape), config.width, "out_proj")

    def _mlp(self, x: Hidden) -> Hidden:
        up = self._project(x, 4 * self.config.width, "mlpwi")
        return self._project(nn.gelu(up), self.config.width, "mlpwo")

    def _project(
        self, x: Float[Array, "batch seq _"], features: int, name: str
    ) -> Float[Array, "batch seq {features}"]:
        """Multiply by a kernel, add a bias, and give the result the kernel's name."""
        into_residual = name in ("out_proj", "mlpwo")
        shrink = math.sqrt(2 * self.config.num_layers) if into_residual else 1.0
        kernel_init = nn.initializers.normal(0.02 / shrink)
        dense = nn.Dense(
            features, dtype=self.config.dtype, kernel_init=kernel_init, name=name
        )
        return checkpoint_name(dense(x), name)

    def _norm(self, name: str) -> nn.LayerNorm:
        return nn.LayerNorm(epsilon=1e-5, dtype=self.config.dtype, name=name)


class GPT(nn.Module):
    """Tokens in, the last hidden states out; the loss makes logits of them."""

    config: GPTConfig

    @nn.compact
    def __call__(
        self, tokens: Int[Array, "batch seq"], deterministic: bool = True
    ) -> Hidden:
        """Return the normalised hidden state at each position."""
        config = self.config
        x = self._embed(config.vocab_size, "token_embedding")(tokens)
        x += self._embed(config.positions, "position_embedding")(
            jnp.arange(tokens.shape[1])
        )
        x = nn.Dropout(config.dropout, deterministic=deterministic)(x)
        x = self._layers(x, deterministic)
        return nn.LayerNorm(epsilon=1e-5, dtype=config.dtype, name="final_norm")(x)

    def _layers(self, x: Hidden, deterministic: bool) -> Hidden:
        config = self.config
        layers = Stack(
            functools.partial(Block, config),
            config.num_layers,
            schedule=config.schedule,
            scan=config.scan,
            name="layers",
        )
        return layers(x, deterministic)

    def _embed(self, rows: int, name: str) -> nn.Embed:
        return nn.Embed(
            rows,
            self.config.width,
            dtype=self.config.dtype,
            embedding_init=nn.initializers.normal(0.02),
            name=name,
        )


def forward_flops(config: GPTConfig, *, batch: int, seq: int) -> int:
    """Return the exact FLOPs of the forward pass's matrix products, `2 m n k` each.

    With `T = batch * seq` tokens, width `W` and vocabulary `V`:

        layer:      2 T W (3 W)  q, k, v      2 T W W    out
                    2 T W (4 W)  mlpwi        2 T (4 W) W  mlpwo
        attention:  2 T seq W    q k^T        2 T seq W  weights v
        head:       2 T W V

    together `T (L (24 W^2 + 4 seq W) + 2 W V)`. Attention counts every score, also
    those that the causal mask hides: all implementations but cuDNN compute them. The
    chunked form has the same products where its `ceil(seq / 128)` chunks divide `seq`,
    else a few rows more. A chunked loss has the same forward.

    Example:
        >>> gpt2_124m = GPTConfig()
        >>> forward_flops(gpt2_124m, batch=1, seq=1024) / 1e9
        291.722231808
    """
    width, tokens = config.width, batch * seq
    layer = 24 * width**2 + 4 * seq * width
    return tokens * (config.num_layers * layer + 2 * width * config.vocab_size)


def make_loss(config: GPTConfig) -> Callable[..., Float[Array, ""]]:
    """Return `loss_fn(params, batch, rng=None)`: mean nats per token.

    `batch` is `{"tokens": int32[batch, seq + 1]}`: position `t` reads tokens `0..t` and
    predicts token `t + 1`. Dropout acts when there is an `rng`.
    """
    model = GPT(config)

    def loss_fn(params: Any, batch: dict[str, Array], rng: Array | None = None):
        tokens = batch["tokens"]
        hidden: Any = model.apply(
            {"params": params},
            tokens[:, :-1],
            deterministic=rng is None,
            rngs=None if rng is None else {"dropout": rng},
        )
        table = params["token_embedding"]["embedding"]
        return cross_entropy(hidden, table, tokens[:, 1:], chunks=config.loss_chunks)

    return loss_fn


def init_params(config: GPTConfig, rng: Array) -> Any:
    """Return initial parameters; with `jax.eval_shape` only their shapes."""
    tokens = jnp.zeros((1, 1), jnp.int32)  # no parameter depends on their number
    return GPT(config).init(rng, tokens)["params"]


def _check(config: GPTConfig, *, batch: int, seq: int) -> None:
    """Raise `WorkloadError` for settings that make no model, before anything traces."""
    for name, value in (("batch", batch), ("seq", seq), ("layers", config.num_layers)):
        if value < 1:
            name = "num_layers" if name == "layers" else name
            raise WorkloadError(f"`{name}={value}` must be at least 1.")
        if value >= 2**31:
            raise WorkloadError(f"`{name}={value}` must be below 2**31.")
    if seq > config.positions:
        raise WorkloadError(
            f"`seq={seq}` is longer than the {config.positions} positions that the "
            "model has an embedding for. Use at most that many."
        )
    for name, value, valid in (
        ("dtype", config.dtype, DTYPES),
        ("attention", config.attention, IMPLEMENTATIONS),
    ):
        if value not in valid:
            hint = did_you_mean(value, valid)
            raise WorkloadError(f"`{name}={value}` is not known. {hint}")
    if not 0 <= config.dropout < 1:
        raise WorkloadError(
            f"`dropout={config.dropout}` is not a rate. Use 0 (none) up to below 1."
        )
    check_chunks(config.loss_chunks, seq)


def _workload_function(
    name: str, sizes: GPTConfig, *, batch: int, seq: int, learning_rate: float
) -> Callable[..., Workload]:
    """Return the workload function of one size; what is given are its defaults."""
    num_layers = sizes.num_layers

    def workload(
        *,
        batch: int = batch,
        seq: int = seq,
        num_layers: int = num_layers,
        dtype: str = "bfloat16",
        attention: str = "flash",
        loss_chunks: int = 0,
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
        _check(config, batch=batch, seq=seq)
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
    workload.__doc__ = f"""Train {name} ({sizes.width} wide) on the bytes of text files.

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


tiny = _workload_function(
    "tiny",
    GPTConfig(num_layers=4, width=128, num_heads=4, vocab_size=256),
    batch=16,
    seq=128,
    learning_rate=3e-3,
)
gpt2 = _workload_function("gpt2", GPTConfig(), batch=8, seq=1024, learning_rate=6e-4)
gpt2_medium = _workload_function(
    "gpt2_medium",
    GPTConfig(num_layers=24, width=1024, num_heads=16),
    batch=8,
    seq=1024,
    learning_rate=3e-4,
)
gpt2_large = _workload_function(
    "gpt2_large",
    GPTConfig(num_layers=36, width=1280, num_heads=20),
    batch=8,
    seq=1024,
    learning_rate=2.5e-4,
)
gpt2_xl = _workload_function(
    "gpt2_xl",
    GPTConfig(num_layers=48, width=1600, num_heads=25),
    batch=4,
    seq=1024,
    learning_rate=2e-4,
)
