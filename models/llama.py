"""Llama 3: a decoder from 4 layers of width 128 to the 80 of the 70B.

Rotary positions, RMS normalisation before each half of a layer, grouped-query attention
and a gated MLP, without biases (Grattafiori et al., "The Llama 3 Herd of Models",
arXiv:2407.21783). It computes in `dtype` (bfloat16) over float32 parameters.

A policy chooses among the values that a layer names, in the order of the computation:

    decoder_layer_input -> query_proj, key_proj, value_proj -> context (and context_lse
    under chunked attention) -> out_proj -> mlpwi_0 (gate), mlpwi_1 (up) -> mlpwo

`query_proj` and `key_proj` are the rotated ones, as in MaxText: those attention reads.
The layers are one `jaxckpt.Stack` under a schedule, scanned, or unrolled by
`scan=False`. Workloads stand at the end: `tiny`, `llama3_1b`, `llama3_8b` and
`llama3_70b`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxckpt.schedule import Schedule
from jaxckpt.stack import Stack
from models.attention import attention
from models.language import init_model, make_language_loss, workload_function

Hidden = Float[Array, "batch seq width"]
Heads = Float[Array, "batch seq heads head_dim"]
Rotation = tuple[Float[Array, "seq half"], Float[Array, "seq half"]]  # cosines, sines


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 and later stretch rotary positions beyond those of Llama 3.

    Attributes:
        factor: By how much the slow frequencies are divided.
        low: Frequencies of fewer turns than this over `positions` are slow.
        high: Frequencies of more turns stay; those between are blended.
        positions: Longest sequence before the stretching.
    """

    factor: float
    low: float = 1.0
    high: float = 4.0
    positions: int = 8192


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes and settings of one model; the defaults are those of the 8B.

    Attributes:
        num_layers: Number of layers.
        width: Size of the residual stream, `num_heads` times the head size.
        num_heads: Heads of the queries.
        kv_heads: Heads of keys and values; they divide `num_heads`.
        mlp: Size of the gate and of what it gates.
        vocab_size: Rows of the embedding table.
        positions: Longest sequence.
        rope_theta: Base of the rotary frequencies.
        rope_scaling: Their stretching; None for none.
        tied: One embedding table for input and output, or two.
        dropout: Rate after the embedding, the attention and the MLP. The released
            models have none.
        dtype: What the layers compute in; parameters are float32.
        attention: One of `models.attention.IMPLEMENTATIONS`.
        loss_chunks: 0, or in how many parts the loss cuts the sequence.
        scan: Equal layers run in a loop, or all layers one by one.
        schedule: Which layers are rematerialised, and under which policy; None for no
            remat.
    """

    num_layers: int = 32
    width: int = 4096
    num_heads: int = 32
    kv_heads: int = 8
    mlp: int = 14336
    vocab_size: int = 128256
    positions: int = 131072
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = RopeScaling(factor=8.0)
    tied: bool = False
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


def rope_frequencies(config: LlamaConfig) -> np.ndarray:
    """Return the radians per position of each pair of a head's features.

    `theta^(-2 i / D)` for `i < D / 2` (Su et al., arXiv:2104.09864). With scaling, a
    frequency `f` of `n = positions f / 2 pi` turns becomes `f (b + (1 - b) / factor)`,
    `b = (n - low) / (high - low)` cut to 0..1.

    Example:
        >>> rope_frequencies(LlamaConfig(width=8, num_heads=2, rope_theta=100.0))
        array([1. , 0.1])
    """
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.positions * frequencies / (2 * math.pi)
    blend = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    return frequencies * (blend + (1 - blend) / scaling.factor)


def rope_tables(config: LlamaConfig, seq: int) -> Rotation:
    """Return cosine and sine of every angle, float32, one row per position."""
    frequencies = jnp.asarray(rope_frequencies(config), jnp.float32)
    angles = jnp.arange(seq, dtype=jnp.float32)[:, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Heads, rotation: Rotation) -> Heads:
    """Turn the features of each head, in pairs, by the angles of their position.

    Feature `i` pairs with `i + D / 2`, as in Hugging Face's form of the released
    weights; Meta's own pairs neighbours, which is another order of the rows of the
    query and key kernels. It is computed in float32.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = (table[:, None, :] for table in rotation)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + 1e-5) * scale`, in float32 up to the scale.

    Linen's own multiplies scale and root first, so that the backward pass reads a
    float32 value of the size of `x` for their product.
    """

    dtype: str

    @nn.compact
    def __call__(self, x: Hidden) -> Hidden:
        """Return `x` normalised over its last axis."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normalised = (wide * jax.lax.rsqrt(mean + 1e-5)).astype(self.dtype)
        return normalised * scale.astype(self.dtype)


class Block(nn.Module):
    """One layer: `x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    config: LlamaConfig

    @nn.compact
    def __call__(
        self, x: Hidden, rotation: Rotation, deterministic: bool = True
    ) -> Hidden:
        """Return the layer's output."""
        # Named here, at the top: a name on the output of a scan body has no effect.
        x = checkpoint_name(x, "decoder_layer_input")
        drop = nn.Dropout(self.config.dropout, deterministic=deterministic)
        x = x + drop(self._attention(self._norm("attention_norm")(x), rotation))
        return x + drop(self._mlp(self._norm("mlp_norm")(x)))

    def _attention(self, x: Hidden, rotation: Rotation) -> Hidden:
        config = self.config
        q = rotate(self._heads(x, config.num_heads, "query_proj"), rotation)
        k = rotate(self._heads(x, config.kv_heads, "key_proj"), rotation)
        v = self._heads(x, config.kv_heads, "value_proj")
        # Named after the rotation: the backward pass of attention reads these.
        context = attention(
            checkpoint_name(q, "query_proj"),
            checkpoint_name(k, "key_proj"),
            checkpoint_name(v, "value_proj"),
            implementation=config.attention,
        )
        out = self._project(context.reshape(x.shape), config.width, "out_proj")
        return checkpoint_name(out, "out_proj")

    def _mlp(self, x: Hidden) -> Hidden:
        config = self.config
        gate = checkpoint_name(self._project(x, config.mlp, "mlpwi_0"), "mlpwi_0")
        up = checkpoint_name(self._project(x, config.mlp, "mlpwi_1"), "mlpwi_1")
        down = self._project(nn.silu(gate) * up, config.width, "mlpwo")
        return checkpoint_name(down, "mlpwo")

    def _heads(self, x: Hidden, heads: int, name: str) -> Heads:
        features = self._project(x, heads * self.config.head_dim, name)
        return features.reshape(*x.shape[:2], heads, self.config.head_dim)

    def _project(
        self, x: Float[Array, "batch seq _"], features: int, name: str
    ) -> Float[Array, "batch seq {features}"]:
        """Multiply by a kernel."""
        into_residual = name in ("out_proj", "mlpwo")
        shrink = math.sqrt(2 * self.config.num_layers) if into_residual else 1.0
        dense = nn.Dense(
            features,
            use_bias=False,
            dtype=self.config.dtype,
            kernel_init=nn.initializers.normal(0.02 / shrink),
            name=name,
        )
        return dense(x)

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.config.dtype, name=name)


class Llama(nn.Module):
    """Tokens in, the last hidden states out; the loss makes logits of them."""

    config: LlamaConfig

    @nn.compact
    def __call__(
        self, tokens: Int[Array, "batch seq"], deterministic: bool = True
    ) -> Hidden:
        """Return the normalised hidden state at each position."""
        x = self._embed(tokens, deterministic)
        rotation = rope_tables(self.config, tokens.shape[1])
        x = self._layers(Block)(x, rotation, deterministic)
        return RMSNorm(self.config.dtype, name="final_norm")(x)

    def _embed(self, tokens: Int[Array, "batch seq"], deterministic: bool) -> Hidden:
        config = self.config
        init, shape = nn.initializers.normal(0.02), (config.vocab_size, config.width)
        table = self.param("token_embedding", init, shape)
        if not config.tied:
            self.param("output_embedding", init, shape)  # read by the loss
        # Rows first and then their dtype: no copy of the table, and its gradient adds
        # up in float32.
        x = table[tokens].astype(config.dtype)
        return nn.Dropout(config.dropout, deterministic=deterministic)(x)

    def _layers(self, block: type[nn.Module]) -> Any:
        config = self.config
        return Stack(
            functools.partial(block, config),
            config.num_layers,
            schedule=config.schedule,
            scan=config.scan,
            name="layers",
        )


def forward_flops(config: LlamaConfig, *, batch: int, seq: int) -> int:
    """Return the exact FLOPs of the forward pass's matrix products, `2 m n k` each.

    With `T = batch * seq` tokens, width `W`, `K = kv_heads * head_dim`, MLP size `M`
    and vocabulary `V`:

        layer:      2 T W W      q            2 T W (2 K)  k, v     2 T W W  out
                    2 T W (2 M)  gate, up     2 T M W      mlpwo
        attention:  2 T seq W    q k^T        2 T seq W    weights v
        head:       2 T W V

    together `T (L (4 W^2 + 4 W K + 6 W M + 4 seq W) + 2 W V)`. Attention counts every
    score, also those that the causal mask hides: all implementations but cuDNN compute
    them. The chunked form has the same products where its `ceil(seq / 128)` chunks
    divide `seq`, else a few rows more. A chunked loss has the same forward.

    Example:
        >>> llama3_8b = LlamaConfig()
        >>> forward_flops(llama3_8b, batch=1, seq=8192) / 1e12
        158.14069583872
    """
    width, tokens = config.width, batch * seq
    kv_width = config.kv_heads * config.head_dim
    layer = width * (4 * width + 4 * kv_width + 6 * config.mlp + 4 * seq)
    return tokens * (config.num_layers * layer + 2 * width * config.vocab_size)


def make_loss(config: LlamaConfig) -> Callable[..., Float[Array, ""]]:
    """Return the loss of a config's model (see `make_language_loss`)."""
    table = "token_embedding" if config.tied else "output_embedding"
    return make_language_loss(
        Llama(config), lambda params: params[table], chunks=config.loss_chunks
    )


def init_params(config: LlamaConfig, rng: Array) -> Any:
    """Return initial parameters of a config's model (see `init_model`)."""
    return init_model(Llama(config), rng)


_workload = functools.partial(
    workload_function, make_loss=make_loss, init_params=init_params
)

tiny = _workload(
    "tiny",
    "a Llama of 4 layers of width 128",
    LlamaConfig(
        num_layers=4,
        width=128,
        num_heads=4,
        kv_heads=2,
        mlp=384,
        vocab_size=256,
        positions=8192,
        rope_scaling=None,
        tied=True,
    ),
    batch=16,
    seq=128,
    loss_chunks=0,
    learning_rate=1e-3,
)
llama3_1b = _workload(
    "llama3_1b",
    "Llama 3.2 1B",
    LlamaConfig(
        num_layers=16,
        width=2048,
        num_heads=32,
        mlp=8192,
        rope_scaling=RopeScaling(factor=32.0),
        tied=True,
    ),
    batch=4,
    seq=4096,
    loss_chunks=8,
    learning_rate=3e-4,
)
llama3_8b = _workload(
    "llama3_8b",
    "Llama 3.1 8B",
    LlamaConfig(),
    batch=1,
    seq=8192,
    loss_chunks=8,
    learning_rate=3e-4,
)
llama3_70b = _workload(
    "llama3_70b",
    "Llama 3.1 70B",
    LlamaConfig(num_layers=80, width=8192, num_heads=64, mlp=28672),
    batch=1,
    seq=8192,
    loss_chunks=8,
    learning_rate=1.5e-4,
)
