"""Mixtral: a Llama whose MLPs are experts, of which a router picks a few per token.

Attention, normalisation and rotary positions are those of `models.llama`. In the place
of one MLP stand `E` of them, and each token goes through the `k` to which the router
gives the highest logits, their results weighed by a softmax over these `k` (Jiang et
al., "Mixtral of Experts", arXiv:2401.04088). No token is dropped: experts have no
capacity.

A policy chooses among the values that a layer names, in the order of the computation:

    decoder_layer_input -> query_proj, key_proj, value_proj -> context (and context_lse
    under chunked attention) -> out_proj -> router_logits -> router_indices ->
    moe_mlpwi_0 (gate), moe_mlpwi_1 (up) -> moe_mlpwo (of each expert, not yet weighed)

The experts are computed in one of two ways, `expert_matmul`, with equal results. For
`T` tokens, width `W` and MLP size `M`:

    ragged   tokens sorted by expert, `k T` rows, `jax.lax.ragged_dot`: 6 k T W M FLOPs
    dense    all experts on all tokens, then zero weights:              6 E T W M FLOPs

`dense` suits few experts; its last product is one of batches of matrices, an expert
each, which `dots_no_batch` passes over. FLOPs of `ragged` are those that have to be
done: where a target has no kernel for it (the CPU has none) JAX writes `ragged_dot` as
a product over all experts, with zeros for those that a token has not chosen.

The router computes in float32, whatever `dtype` is, from the rounded input. Two experts
may be nearly equal to it; a layer that is computed again then has to pick the same one,
else the gradient is of another function than the loss. All that follows the choice
reads `router_indices`, `4 k` bytes a token: a policy that keeps this name makes the
choice once. The others compute it again, by the same operations from the same input.

Workloads stand at the end: `tiny`, `moe_1b` and `mixtral_8x7b`. Their losses return
`(loss, aux)`.
"""

# A layer of experts returns more than Llama's, and its config holds more:
# pyright: reportIncompatibleMethodOverride=false
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxckpt.workload import Workload
from models import llama
from models.language import check_choice, init_model, workload_function
from models.llama import Hidden, RMSNorm, Rotation, rope_tables
from models.losses import cross_entropy

EXPERT_MATMULS = ("ragged", "dense")

Routed = Float[Array, "batch seq chosen"]  # one number for each chosen expert
Chosen = Int[Array, "batch seq chosen"]
PerExpert = Float[Array, "*layers experts"]
Weights = dict[str, Float[Array, "experts _ _"]]


@dataclass(frozen=True)
class MoEConfig(llama.LlamaConfig):
    """The sizes and settings of one model; the defaults are those of Mixtral 8x7B.

    Attributes:
        experts: Experts of a layer; `mlp` is the size of one.
        chosen: Through how many of them each token goes.
        expert_matmul: How they are computed, one of `EXPERT_MATMULS`.
        balance_weight: What the balance loss is multiplied by in the loss. It is 0.01
            in Fedus et al., "Switch Transformers", arXiv:2101.03961, section 2.2.
    """

    vocab_size: int = 32000
    positions: int = 32768
    rope_theta: float = 1e6
    rope_scaling: llama.RopeScaling | None = None
    experts: int = 8
    chosen: int = 2
    expert_matmul: str = "ragged"
    balance_weight: float = 0.01


class Block(llama.Block):
    """One layer: `x + attention(norm(x))`, then `x + experts(norm(x))`."""

    config: MoEConfig

    @nn.compact
    def __call__(
        self, x: Hidden, rotation: Rotation, deterministic: bool = True
    ) -> tuple[Hidden, dict[str, Array]]:
        """Return the layer's output, and how the router shares the tokens out."""
        x = checkpoint_name(x, "decoder_layer_input")
        drop = nn.Dropout(self.config.dropout, deterministic=deterministic)
        x = x + drop(self._attention(self._norm("attention_norm")(x), rotation))
        h = self._norm("mlp_norm")(x)
        logits, chosen = self._route(h)
        return x + drop(self._experts(h, logits, chosen)), _shares(logits, chosen)

    def _route(self, x: Hidden) -> tuple[Float[Array, "batch seq experts"], Chosen]:
        config = self.config
        router = nn.Dense(
            config.experts,
            use_bias=False,
            dtype=jnp.float32,
            kernel_init=nn.initializers.normal(0.02),
            name="router",
        )
        logits = checkpoint_name(router(_rounded(x)), "router_logits")
        _, chosen = jax.lax.top_k(logits, config.chosen)
        return logits, checkpoint_name(chosen, "router_indices")

    def _experts(
        self, x: Hidden, logits: Float[Array, "batch seq experts"], chosen: Chosen
    ) -> Hidden:
        config = self.config
        logits_of_chosen = jnp.take_along_axis(logits, chosen, axis=-1)
        shares = jax.nn.softmax(logits_of_chosen, axis=-1)
        compute = _ragged if config.expert_matmul == "ragged" else _dense
        return compute(x, self._weights(), shares, chosen)

    def _weights(self) -> Weights:
        config = self.config
        up, down = (config.width, config.mlp), (config.mlp, config.width)
        shapes = {"moe_mlpwi_0": up, "moe_mlpwi_1": up, "moe_mlpwo": down}
        shrink = (2 * config.num_layers) ** -0.5  # of what goes into the residual
        return {
            name: self.param(
                name,
                nn.initializers.normal(0.02 * (shrink if name == "moe_mlpwo" else 1)),
                (config.experts, *shape),
            ).astype(config.dtype)
            for name, shape in shapes.items()
        }


def _rounded(x: Array) -> Array:
    """Return `x` in float32, rounded to its own dtype by an operation that says so.

    XLA may leave out the two conversions between what makes `x` in float32 and what
    reads it so, in the forward pass or where it is computed again.
    """
    info = jnp.finfo(x.dtype)
    return jax.lax.reduce_precision(x.astype(jnp.float32), info.nexp, info.nmant)


def _shares(
    logits: Float[Array, "batch seq experts"], chosen: Chosen
) -> dict[str, Array]:
    """Return what share of the choices falls on each expert, and of the softmax."""
    experts = logits.shape[-1]
    load = jnp.mean(jax.nn.one_hot(chosen, experts), axis=(0, 1, 2))
    probability = jnp.mean(jax.nn.softmax(logits, axis=-1), axis=(0, 1))
    return {"load": load, "probability": probability}


def balance_loss(load: PerExpert, probability: PerExpert) -> Float[Array, ""]:
    """Return `E sum_e load_e probability_e`, the mean over layers.

    It is 1 where all experts have equal shares, and up to `E` where one has all; the
    gradient goes through the probability (Fedus et al. 2021, equation 4).

    Example:
        >>> even, one = jnp.full(4, 0.25), jnp.array([1.0, 0.0, 0.0, 0.0])
        >>> float(balance_loss(even, even)), float(balance_loss(one, one))
        (1.0, 4.0)
    """
    return load.shape[-1] * jnp.mean(jnp.sum(load * probability, axis=-1))


def _ragged(x: Hidden, weights: Weights, shares: Routed, chosen: Chosen) -> Hidden:
    """Sort a row for each choice by expert; each expert multiplies its own rows."""
    experts = len(weights["moe_mlpwo"])
    flat, count = chosen.reshape(-1), chosen.shape[-1]
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=experts).astype(jnp.int32)

    def multiply(rows: Array, name: str) -> Array:
        product = jax.lax.ragged_dot(rows, weights[name], sizes)
        return checkpoint_name(product, name)

    rows = x.reshape(-1, x.shape[-1])[order // count]
    gate, up = (multiply(rows, name) for name in ("moe_mlpwi_0", "moe_mlpwi_1"))
    down = multiply(nn.silu(gate) * up, "moe_mlpwo")
    unsorted = down[jnp.argsort(order)].reshape(*shares.shape, x.shape[-1])
    return jnp.sum(unsorted * shares[..., None].astype(x.dtype), axis=2)


def _dense(x: Hidden, weights: Weights, shares: Routed, chosen: Chosen) -> Hidden:
    """Run each expert on each token; those that were not chosen weigh nothing."""

    def multiply(spec: str, rows: Array, name: str) -> Array:
        return checkpoint_name(jnp.einsum(spec, rows, weights[name]), name)

    experts = len(weights["moe_mlpwo"])
    into = "bsw,ewm->ebsm"
    gate, up = (multiply(into, x, name) for name in ("moe_mlpwi_0", "moe_mlpwi_1"))
    down = multiply("ebsm,emw->ebsw", nn.silu(gate) * up, "moe_mlpwo")
    one_hot = jax.nn.one_hot(chosen, experts, axis=0)  # [experts, batch, seq, chosen]
    of_expert = jnp.sum(one_hot * shares, axis=-1)
    return jnp.sum(down * of_expert[..., None].astype(x.dtype), axis=0)


class MoE(llama.Llama):
    """Tokens in, the last hidden states out, and the routers' shares of each layer."""

    config: MoEConfig

    @nn.compact
    def __call__(
        self, tokens: Int[Array, "batch seq"], deterministic: bool = True
    ) -> tuple[Hidden, dict[str, Float[Array, "layers experts"]]]:
        """Return the normalised hidden state at each position, and the shares."""
        x = self._embed(tokens, deterministic)
        rotation = rope_tables(self.config, tokens.shape[1])
        x, shares = self._layers(Block)(x, rotation, deterministic)
        return RMSNorm(self.config.dtype, name="final_norm")(x), shares


def forward_flops(config: MoEConfig, *, batch: int, seq: int) -> int:
    """Return the exact FLOPs of the forward pass's matrix products, `2 m n k` each.

    They are Llama's, and of each layer, with `T = batch * seq` tokens, `n` of `E`
    experts computed for a token (`n = k` for ragged products, `n = E` for dense ones):

        router:   2 T W E
        experts:  n (2 T W (2 M) + 2 T M W)   in the place of one MLP

    Example:
        >>> mixtral_8x7b = MoEConfig()
        >>> forward_flops(mixtral_8x7b, batch=1, seq=4096) / 1e12
        113.232517791744
    """
    computed = config.chosen if config.expert_matmul == "ragged" else config.experts
    mlps = 6 * config.width * config.mlp * (computed - 1)
    router = 2 * config.width * config.experts
    extra = batch * seq * config.num_layers * (mlps + router)
    return extra + llama.forward_flops(config, batch=batch, seq=seq)


def make_loss(config: MoEConfig) -> Callable[..., tuple[Float[Array, ""], Any]]:
    """Return `loss_fn(params, batch, rng=None) -> (loss, aux)`.

    `batch` is that of `models.language.make_language_loss`. The loss is the mean nats
    per token and `balance_weight` times the balance loss; `aux` holds both, without
    weight, as `cross_entropy` and `balance`, and `load`, the share of each expert in
    the choices, `[layers, experts]`.
    """
    apply: Callable[..., Any] = MoE(config).apply
    table = "token_embedding" if config.tied else "output_embedding"

    def loss_fn(params: Any, batch: dict[str, Array], rng: Array | None = None):
        tokens = batch["tokens"]
        hidden, shares = apply(
            {"params": params},
            tokens[:, :-1],
            deterministic=rng is None,
            rngs=None if rng is None else {"dropout": rng},
        )
        nats = cross_entropy(
            hidden, params[table], tokens[:, 1:], chunks=config.loss_chunks
        )
        balance = balance_loss(shares["load"], shares["probability"])
        aux = {"cross_entropy": nats, "balance": balance, "load": shares["load"]}
        return nats + config.balance_weight * balance, aux

    return loss_fn


def init_params(config: MoEConfig, rng: Array) -> Any:
    """Return initial parameters of a config's model (see `init_model`)."""
    return init_model(MoE(config), rng)


def _workload(
    name: str, about: str, sizes: MoEConfig, **defaults: Any
) -> Callable[..., Workload]:
    """Return a language model's workload function with `expert_matmul` beside."""

    def plain(expert_matmul: str) -> Callable[..., Workload]:
        return workload_function(
            name,
            about,
            replace(sizes, expert_matmul=expert_matmul),
            make_loss=make_loss,
            init_params=init_params,
            **defaults,
        )

    def workload(*, expert_matmul: str = "ragged", **settings: Any) -> Workload:
        check_choice("expert_matmul", expert_matmul, EXPERT_MATMULS)
        return plain(expert_matmul)(**settings)

    shared = plain("ragged")
    known, own = (inspect.signature(f, eval_str=True) for f in (shared, workload))
    parameters = [*known.parameters.values(), own.parameters["expert_matmul"]]
    workload.__signature__ = own.replace(parameters=parameters)
    workload.__annotations__ = {p.name: p.annotation for p in parameters}
    workload.__annotations__["return"] = Workload
    workload.__name__ = workload.__qualname__ = name
    workload.__doc__ = f"""{(shared.__doc__ or "").rstrip()}
        expert_matmul: How experts are computed, one of {", ".join(EXPERT_MATMULS)}.
    """
    return workload


tiny = _workload(
    "tiny",
    "a Mixtral of 4 layers of width 128 and 4 experts",
    MoEConfig(
        num_layers=4,
        width=128,
        num_heads=4,
        kv_heads=2,
        mlp=192,
        vocab_size=256,
        positions=8192,
        tied=True,
        experts=4,
    ),
    batch=16,
    seq=128,
    learning_rate=1e-3,
)
moe_1b = _workload(
    "moe_1b",
    "a Mixtral of 1.1 billion parameters, 0.33 of them used by a token",
    MoEConfig(num_layers=12, width=1024, num_heads=16, kv_heads=4, mlp=3584, tied=True),
    batch=8,
    seq=2048,
    loss_chunks=8,
    learning_rate=3e-4,
)
mixtral_8x7b = _workload(
    "mixtral_8x7b",
    "Mixtral 8x7B",
    MoEConfig(),
    batch=1,
    seq=8192,
    loss_chunks=8,
    learning_rate=1.5e-4,
)
