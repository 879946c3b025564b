"""Programs that are not ours: other libraries, other shapes of model, other habits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

BATCH, SEQ, WIDTH, HEADS = 2, 3, 4, 2
DEPTH = 4


@dataclass(frozen=True)
class Foreign:
    """A program, and what a plan finds in it.

    Attributes:
        fn: The function; its first output leaf is differentiated.
        args: Its arguments; the first is differentiated.
        depths: The number of layers of each of its stacks.
        unread: How many products at the end of a layer no backward pass reads.
        has_aux: Whether it returns more than the loss.
        names: A policy of names for its layers, and how many products of a layer run
            again under it.
        one_by_one: Whether its operations can be run one by one, outside of meshes.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    depths: tuple[int, ...] = (DEPTH,)
    unread: int = 1
    has_aux: bool = False
    names: tuple[str, int] | None = None
    one_by_one: bool = True


def normal(seed, *shape):
    """Return random numbers of the size that weights have."""
    return jax.random.normal(jax.random.key(seed), shape) / 2


def inputs(seed=9):
    """Return a batch of sequences."""
    return normal(seed, BATCH, SEQ, WIDTH)


def scalar(x):
    """Return a number that depends on each of `x`."""
    return jnp.sum(jnp.cos(x) * x)


# --- equinox -------------------------------------------------------------------------


class EquinoxBlock(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norm: eqx.nn.LayerNorm

    def __init__(self, key):
        one, two = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=one)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, jax.nn.gelu, key=two)
        self.norm = eqx.nn.LayerNorm(WIDTH)

    def __call__(self, x):
        h = jax.vmap(self.norm)(x)
        x = x + self.attention(h, h, h)
        return x + jax.vmap(self.mlp)(x)


class EquinoxTransformer(eqx.Module):
    embedding: eqx.nn.Linear
    blocks: list[EquinoxBlock]

    def __init__(self, key):
        keys = jax.random.split(key, DEPTH + 1)
        self.embedding = eqx.nn.Linear(WIDTH, WIDTH, key=keys[0])
        self.blocks = [EquinoxBlock(key) for key in keys[1:]]

    def __call__(self, x):
        x = jax.vmap(self.embedding)(x)
        for block in self.blocks:
            x = block(x)
        return x


def equinox_loss(model, x):
    """Take a Module that holds functions beside its arrays."""
    return scalar(jax.vmap(model)(x))


def equinox_transformer():
    """Layers of equinox, one after another, for a batch by `vmap`."""
    params, static = eqx.partition(EquinoxTransformer(jax.random.key(0)), eqx.is_array)

    def loss(params, x):
        return equinox_loss(eqx.combine(params, static), x)

    return Foreign(loss, (params, inputs()))


def equinox_mlp():
    """An MLP: its first and last layers differ in shape from those between."""
    model = eqx.nn.MLP(3, 2, WIDTH, DEPTH + 1, jnp.tanh, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_array)

    def loss(params, x):
        return scalar(jax.vmap(eqx.combine(params, static))(x))

    return Foreign(loss, (params, normal(1, BATCH, 3)))


# --- nnx -----------------------------------------------------------------------------


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, decode=False, rngs=rngs, deterministic=True
        )
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        up = checkpoint_name(self.up(x), "up")
        return x + self.down(nnx.gelu(up))


class NNXTransformer(nnx.Module):
    def __init__(self, rngs):
        self.embedding = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List(NNXBlock(rngs) for _ in range(DEPTH))

    def __call__(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x


def nnx_loss(model, x):
    """Take an nnx Module."""
    return scalar(model(x))


def nnx_transformer():
    """Layers of nnx, one after another."""
    graphdef, state = nnx.split(NNXTransformer(nnx.Rngs(0)))

    def loss(state, x):
        return nnx_loss(nnx.merge(graphdef, state), x)

    return Foreign(loss, (state, inputs()), names=("save(up)", 6))


# --- Functions of nested dicts -------------------------------------------------------


def _attention(w, x, memory):
    q, k, v = (a @ b for a, b in ((x, w["q"]), (memory, w["k"]), (memory, w["v"])))
    probs = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
    context = checkpoint_name(jnp.einsum("bqk,bkd->bqd", probs, v), "context")
    return context @ w["o"]


def _mlp(w, x):
    return jnp.tanh(x @ w["up"]) @ w["down"]


def _attention_weights(seed, *lead):
    return {n: normal(seed + i, *lead, WIDTH, WIDTH) for i, n in enumerate("qkvo")}


def _mlp_weights(seed, *lead):
    return {
        "up": normal(seed, *lead, WIDTH, 2 * WIDTH),
        "down": normal(seed + 1, *lead, 2 * WIDTH, WIDTH),
    }


def encoder_decoder():
    """A scanned encoder; a decoder of other layers that all read what it returns."""
    params = {
        "encoder": {"self": _attention_weights(0, 3), "mlp": _mlp_weights(5, 3)},
        "decoder": {
            f"layer_{i}": {
                "self": _attention_weights(10 + i),
                "cross": _attention_weights(20 + i),
                "mlp": _mlp_weights(30 + i),
            }
            for i in range(DEPTH)
        },
        "embedding": normal(41, WIDTH, WIDTH),
        "head": normal(40, WIDTH, 5),
    }

    def encode(x, w):
        x = x + _attention(w["self"], x, x)
        return x + _mlp(w["mlp"], x), None

    def loss(params, source, target):
        source, x = source @ params["embedding"], target @ params["embedding"]
        memory, _ = jax.lax.scan(encode, source, params["encoder"])
        for i in range(DEPTH):
            w = params["decoder"][f"layer_{i}"]
            x = x + _attention(w["self"], x, x)
            x = x + _attention(w["cross"], x, memory)
            x = x + _mlp(w["mlp"], x)
        return scalar(x @ params["head"])

    args = params, inputs(), inputs(8)[:, :2]
    return Foreign(loss, args, depths=(3, DEPTH))


def u_net():
    """Layers down, and layers up that read what those down returned, last first."""
    params = {
        "in": normal(50, WIDTH, WIDTH),
        "down": [_mlp_weights(i) for i in range(DEPTH)],
        "up": [
            {"skip": normal(20 + i, WIDTH, WIDTH), **_mlp_weights(30 + i)}
            for i in range(DEPTH)
        ],
    }

    def loss(params, x):
        skips, x = [], x @ params["in"]
        for w in params["down"]:
            x = x + _mlp(w, x)
            skips.append(x)
        for w in params["up"]:
            x = jnp.sin(x) + skips.pop() @ w["skip"]
            x = x + _mlp(w, x)
        return scalar(x)

    # The lowest layer is one of both ways.
    return Foreign(loss, (params, inputs()), depths=(DEPTH - 1, DEPTH))


def res_net():
    """Convolutions; batch statistics come out as aux; the width changes half way."""

    def block(seed, width):
        return {
            "a": normal(seed, 3, width, width),
            "b": normal(seed + 1, 3, width, width),
        }

    def norm(x, mean):
        batch = jnp.mean(x, axis=(0, 1))
        scale = jax.lax.rsqrt(jnp.var(x, axis=(0, 1)) + 1e-3)
        return (x - batch) * scale, 0.9 * mean + 0.1 * batch

    def conv(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
        )

    groups = (WIDTH, DEPTH), (2 * WIDTH, 3)
    params = {
        "groups": [[block(i, width) for i in range(n)] for width, n in groups],
        "in": normal(51, 3, WIDTH, WIDTH),
        "widen": normal(50, 1, WIDTH, 2 * WIDTH),
    }
    stats = [[jnp.zeros(width)] * n for width, n in groups]

    def loss(params, stats, x):
        after = []
        for number, (blocks, means) in enumerate(
            zip(params["groups"], stats, strict=True)
        ):
            if number:
                x = conv(x, params["widen"])
            after.append([])
            for w, mean in zip(blocks, means, strict=True):
                h, mean = norm(conv(x, w["a"]), mean)
                after[-1].append(mean)
                x = x + conv(jnp.tanh(h), w["b"])
        return scalar(x), after

    args = params, stats, normal(7, BATCH, 5, WIDTH)
    return Foreign(loss, args, depths=(DEPTH, 3), has_aux=True)


def mamba():
    """Scanned layers, each with a loop over time inside."""
    params = {
        "embedding": normal(3, WIDTH, WIDTH),
        "layers": {
            "in": normal(0, DEPTH, WIDTH, 2 * WIDTH),
            "decay": normal(1, DEPTH, WIDTH),
            "out": normal(2, DEPTH, WIDTH, WIDTH),
        },
    }

    def layer(x, w):
        u, gate = jnp.split(x @ w["in"], 2, axis=-1)
        decay = jax.nn.sigmoid(w["decay"])

        def step(state, u):
            state = decay * state + u
            return state, state

        _, states = jax.lax.scan(step, jnp.zeros_like(u[:, 0]), u.swapaxes(0, 1))
        return x + (states.swapaxes(0, 1) * jax.nn.silu(gate)) @ w["out"], None

    def loss(params, x):
        x, _ = jax.lax.scan(layer, x @ params["embedding"], params["layers"])
        return scalar(x)

    return Foreign(loss, (params, inputs()))


def lora():
    """Adapters beside a frozen base, which is an argument without a gradient."""
    base = [_mlp_weights(i) for i in range(DEPTH)]
    adapters = [
        {"a": normal(20 + i, WIDTH, 1), "b": normal(30 + i, 1, 2 * WIDTH)}
        for i in range(DEPTH)
    ]

    def loss(adapters, base, x):
        for w, own in zip(base, adapters, strict=True):
            up = x @ w["up"] + (x @ own["a"]) @ own["b"]
            x = x + jnp.tanh(up) @ w["down"]
        return scalar(x)

    return Foreign(loss, (adapters, base, inputs()))


# --- linen ---------------------------------------------------------------------------


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        up = checkpoint_name(nn.Dense(2 * WIDTH)(h), "up")
        return x + nn.Dense(WIDTH)(jnp.tanh(up))


class ScannedBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return LinenBlock()(x), jnp.mean(x)


class LinenLoop(nn.Module):
    """Each layer under `nn.remat` with a policy of its own, in a Python loop."""

    @nn.compact
    def __call__(self, x):
        policy = jax.checkpoint_policies.save_only_these_names("up")
        x = nn.Dense(WIDTH)(x)
        for i in range(DEPTH):
            x = nn.remat(LinenBlock, policy=policy)(name=f"block_{i}")(x)
        return x


class LinenScan(nn.Module):
    """`nn.scan` of `nn.remat`."""

    @nn.compact
    def __call__(self, x):
        stack = nn.scan(
            nn.remat(ScannedBlock, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=DEPTH,
        )
        x, means = stack()(nn.Dense(WIDTH)(x), None)
        return x, jnp.sum(means)


def linen_loop():
    """Layers under `nn.remat`, with names."""
    module, x = LinenLoop(), inputs()
    params = module.init(jax.random.key(0), x)
    loss = lambda params, x: scalar(module.apply(params, x))  # noqa: E731
    return Foreign(loss, (params, x), names=("save(up)", 0))


def linen_scan():
    """A loop over layers under `nn.remat`; what they return besides is aux."""
    module, x = LinenScan(), inputs()
    params = module.init(jax.random.key(0), x)

    def loss(params, x):
        x, means = module.apply(params, x)
        return scalar(x), means

    return Foreign(loss, (params, x), has_aux=True, names=("save(up)", 0))


# --- What stands around the layers ---------------------------------------------------


def layer(x, w):
    """One layer with two products, as the body of a loop."""
    return x + jnp.sin(_mlp(w, x)), None


def stacked_loss(params, x):
    """Return the loss of a loop over layers."""
    x, _ = jax.lax.scan(layer, x @ params["embedding"], params["layers"])
    return scalar(x)


def stacked_params():
    """Return what `stacked_loss` takes."""
    return {"embedding": normal(9, WIDTH, WIDTH), "layers": _mlp_weights(0, DEPTH)}


def microbatches():
    """A loss that adds up over microbatches in a loop around the layers."""

    def loss(params, batches):
        def step(total, x):
            return total + stacked_loss(params, x), None

        return jax.lax.scan(step, 0.0, batches)[0]

    batches = normal(5, 3, BATCH, SEQ, WIDTH)
    return Foreign(loss, (stacked_params(), batches), unread=0)


def data_parallel():
    """A loss inside `shard_map`: each device has some of the batch."""
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    everywhere, batch = PartitionSpec(), PartitionSpec("data")

    def local_loss(params, x):
        return jax.lax.psum(stacked_loss(params, x), "data")

    loss = jax.shard_map(
        local_loss, mesh=mesh, in_specs=(everywhere, batch), out_specs=everywhere
    )
    return Foreign(loss, (stacked_params(), inputs()), unread=0, one_by_one=False)


def remat_outside():
    """Remat round the whole loop over layers, where it saves nothing."""
    loss = jax.checkpoint(stacked_loss)
    return Foreign(loss, (stacked_params(), inputs()), unread=0)


PROGRAMS = {
    make.__name__: make
    for make in (
        equinox_transformer,
        equinox_mlp,
        nnx_transformer,
        encoder_decoder,
        u_net,
        res_net,
        mamba,
        lora,
        linen_loop,
        linen_scan,
        microbatches,
        data_parallel,
        remat_outside,
    )
}
