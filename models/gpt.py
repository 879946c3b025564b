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

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxckpt.schedule import Schedule
from jaxckpt.stack import Stack
from models.attention import attention
from models.language import init_model, make_language_loss, workload_function

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
        schedule: Which layers are rematerialised, and how; None for no remat.
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
    schedule: Schedule | None = None

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
        return x + drop(self._mlp(self._norm("mlp_norm")(x)))

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
    """Return the loss of a config's model (see `make_language_loss`)."""
    return make_language_loss(
        GPT(config),
        lambda params: params["token_embedding"]["embedding"],
        chunks=config.loss_chunks,
    )


def init_params(config: GPTConfig, rng: Array) -> Any:
    """Return initial parameters of a config's model (see `init_model`)."""
    return init_model(GPT(config), rng)


_workload = functools.partial(
    workload_function, make_loss=make_loss, init_params=init_params
)

tiny = _workload(
    "tiny",
    "a GPT of 4 layers of width 128",
    GPTConfig(num_layers=4, width=128, num_heads=4, vocab_size=256),
    batch=16,
    seq=128,
    learning_rate=1e-3,
)
gpt2 = _workload(
    "gpt2", "GPT-2 (124M)", GPTConfig(), batch=8, seq=1024, learning_rate=6e-4
)
gpt2_medium = _workload(
    "gpt2_medium",
    "GPT-2 medium (355M)",
    GPTConfig(num_layers=24, width=1024, num_heads=16),
    batch=8,
    seq=1024,
    learning_rate=3e-4,
)
gpt2_large = _workload(
    "gpt2_large",
    "GPT-2 large (774M)",
    GPTConfig(num_layers=36, width=1280, num_heads=20),
    batch=8,
    seq=1024,
    learning_rate=2.5e-4,
)
gpt2_xl = _workload(
    "gpt2_xl",
    "GPT-2 XL (1.6B)",
    GPTConfig(num_layers=48, width=1600, num_heads=25),
    batch=4,
    seq=1024,
    learning_rate=2e-4,
)
