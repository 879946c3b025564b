"""ViT: a Transformer encoder over patches of an image, up to ViT-H/14.

A convolution makes an embedding of each patch, positions are learned, layers normalise
before each half, attention sees all patches, and a head classifies what a class token
has gathered, or the mean over the patches (Dosovitskiy et al., "An Image is Worth 16x16
Words", arXiv:2010.11929). It computes in `dtype` (bfloat16) over float32 parameters;
the head in float32.

A policy chooses among the values that a layer names, in the order of the computation;
they are those of GPT's layer, so that one policy suits both:

    decoder_layer_input -> query_proj, key_proj, value_proj -> context (and context_lse
    under chunked attention) -> out_proj -> mlpwi -> mlpwo

The layers are one `jaxckpt.Stack` under a schedule, scanned, or unrolled by
`scan=False`. Workloads stand at the end: `tiny`, `vit_l16` and `vit_h14`. They train on
images of waves that are made as they are read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxckpt.schedule import Schedule
from jaxckpt.stack import Stack
from models.attention import attention
from models.images import workload_function

Hidden = Float[Array, "batch positions width"]
Images = Float[Array, "batch rows columns channels"]


@dataclass(frozen=True)
class ViTConfig:
    """The sizes and settings of one model; the defaults are those of ViT-L/16.

    Attributes:
        num_layers: Number of layers.
        width: Size of the residual stream, `num_heads` times the head size.
        num_heads: Attention heads.
        mlp: Size of the MLP's hidden layer.
        image_size: Pixels of a side of an image.
        patch: Pixels of a side of a patch; it divides `image_size`.
        channels: Numbers of a pixel.
        classes: How many classes the head tells apart.
        pooling: What the head reads: `"class"`, a token of its own beside the patches;
            or `"mean"`, the mean over the patches.
        dropout: Rate after the embedding, the attention and the MLP.
        dtype: What the layers compute in; parameters are float32.
        attention: One of `models.attention.IMPLEMENTATIONS`.
        scan: Equal layers run in a loop, or all layers one by one.
        schedule: Which layers are rematerialised, and how; None for no remat.
    """

    num_layers: int = 24
    width: int = 1024
    num_heads: int = 16
    mlp: int = 4096
    image_size: int = 224
    patch: int = 16
    channels: int = 3
    classes: int = 1000
    pooling: str = "class"
    dropout: float = 0.0
    dtype: str = "bfloat16"
    attention: str = "flash"
    scan: bool = True
    schedule: Schedule | None = None

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.width // self.num_heads

    @property
    def patches(self) -> int:
        """How many patches an image has."""
        return (self.image_size // self.patch) ** 2

    @property
    def positions(self) -> int:
        """How many positions the layers see: the patches, and the class token."""
        return self.patches + (self.pooling == "class")


class Block(nn.Module):
    """One layer: `x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    config: ViTConfig

    @nn.compact
    def __call__(self, x: Hidden, deterministic: bool = True) -> Hidden:
        """Return the layer's output."""
        # Named here, at the top: a name on what a layer returns has no effect.
        x = checkpoint_name(x, "decoder_layer_input")
        drop = nn.Dropout(self.config.dropout, deterministic=deterministic)
        x = x + drop(self._attention(_norm(self.config, "attention_norm")(x)))
        return x + drop(self._mlp(_norm(self.config, "mlp_norm")(x)))

    def _attention(self, x: Hidden) -> Hidden:
        config = self.config
        heads = (*x.shape[:2], config.num_heads, config.head_dim)
        q, k, v = (
            self._project(x, config.width, name).reshape(heads)
            for name in ("query_proj", "key_proj", "value_proj")
        )
        context = attention(
            q, k, v, implementation=config.attention, causal=False
        ).reshape(x.shape)
        return self._project(context, config.width, "out_proj")

    def _mlp(self, x: Hidden) -> Hidden:
        up = self._project(x, self.config.mlp, "mlpwi")
        return self._project(nn.gelu(up), self.config.width, "mlpwo")

    def _project(
        self, x: Float[Array, "batch positions _"], features: int, name: str
    ) -> Float[Array, "batch positions {features}"]:
        """Multiply by a kernel, add a bias, and give the result the kernel's name."""
        init = nn.initializers.xavier_uniform()
        dense = nn.Dense(features, dtype=self.config.dtype, kernel_init=init, name=name)
        return checkpoint_name(dense(x), name)


def _norm(config: ViTConfig, name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=1e-6, dtype=config.dtype, name=name)


class ViT(nn.Module):
    """Images in, float32 logits of the classes out."""

    config: ViTConfig

    @nn.compact
    def __call__(
        self, images: Images, deterministic: bool = True
    ) -> Float[Array, "batch classes"]:
        """Return the logits of each image."""
        config = self.config
        x = self._embed(images)
        x = nn.Dropout(config.dropout, deterministic=deterministic)(x)
        layers = Stack(
            functools.partial(Block, config),
            config.num_layers,
            schedule=config.schedule,
            scan=config.scan,
            name="layers",
        )
        x = _norm(config, "final_norm")(layers(x, deterministic))
        x = x[:, 0] if config.pooling == "class" else jnp.mean(x, axis=1)
        head = nn.Dense(
            config.classes,
            dtype=jnp.float32,
            kernel_init=nn.initializers.normal(0.02),
            name="head",
        )
        return head(x)

    def _embed(self, images: Images) -> Hidden:
        config = self.config
        square = (config.patch, config.patch)
        x = nn.Conv(
            config.width,
            square,
            strides=square,
            padding="VALID",
            dtype=config.dtype,
            name="patch_embedding",
        )(images)
        x = x.reshape(len(x), config.patches, config.width)
        if config.pooling == "class":
            token = self.param("class_token", nn.initializers.zeros, (config.width,))
            token = jnp.broadcast_to(token, (len(x), 1, config.width))
            x = jnp.concatenate([token.astype(x.dtype), x], axis=1)
        table = (config.positions, config.width)
        init = nn.initializers.normal(0.02)
        positions = self.param("position_embedding", init, table)
        return x + positions.astype(x.dtype)


def forward_flops(config: ViTConfig, *, batch: int) -> int:
    """Return the exact FLOPs of the forward pass's matrix products, `2 m n k` each.

    With batch `B`, `N` patches of `P` pixels a side and `C` channels, `S` positions
    (`N`, and one for a class token), `T = B S`, width `W` and MLP size `M`:

        patches:    2 B N (P^2 C) W
        layer:      2 T W (3 W)  q, k, v      2 T W W      out
                    2 T W M      mlpwi        2 T M W      mlpwo
        attention:  2 T S W      q k^T        2 T S W      weights v
        head:       2 B W classes

    The chunked form of attention has the same products where its `ceil(S / 128)` chunks
    divide `S`, else a few rows more.

    Example:
        >>> vit_l16 = ViTConfig()
        >>> forward_flops(vit_l16, batch=1) / 1e9
        123.109425152
    """
    width, positions = config.width, config.positions
    layer = positions * width * (8 * width + 4 * config.mlp + 4 * positions)
    pixels = config.patch**2 * config.channels
    ends = 2 * width * (config.patches * pixels + config.classes)
    return batch * (config.num_layers * layer + ends)


def make_loss(config: ViTConfig) -> Callable[..., Float[Array, ""]]:
    """Return `loss_fn(params, batch, rng=None)`: mean cross-entropy, nats per image.

    `batch` is `{"images": float32[batch, rows, columns, channels], "labels":
    int32[batch]}`. Dropout acts when there is an `rng`.
    """
    model = ViT(config)

    def loss_fn(params: Any, batch: dict[str, Array], rng: Array | None = None):
        logits: Any = model.apply(
            {"params": params},
            batch["images"],
            deterministic=rng is None,
            rngs=None if rng is None else {"dropout": rng},
        )
        labels = batch["labels"][:, None]
        of_label = jnp.take_along_axis(logits, labels, axis=-1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - of_label)

    return loss_fn


def init_params(config: ViTConfig, rng: Array) -> Any:
    """Return initial parameters; with `jax.eval_shape` only their shapes."""
    size = config.image_size
    images = jnp.zeros((1, size, size, config.channels))
    return ViT(config).init(rng, images)["params"]


_workload = functools.partial(
    workload_function, make_loss=make_loss, init_params=init_params
)

tiny = _workload(
    "tiny",
    "a ViT of 4 layers of width 128",
    ViTConfig(
        num_layers=4,
        width=128,
        num_heads=4,
        mlp=512,
        image_size=32,
        patch=8,
        classes=8,
    ),
    batch=64,
    learning_rate=1e-3,
)
vit_l16 = _workload(
    "vit_l16", "ViT-L/16 (304M)", ViTConfig(), batch=64, learning_rate=1e-3
)
vit_h14 = _workload(
    "vit_h14",
    "ViT-H/14 (632M)",
    ViTConfig(num_layers=32, width=1280, mlp=5120, patch=14),
    batch=64,
    learning_rate=1e-3,
)
