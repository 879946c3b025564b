"""`ManualCheckpoint`: gradients, memory, files, and errors of host-driven passes."""

import functools
import gc
import os
import pathlib
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxckpt
from jaxckpt.errors import ScheduleError, WorkloadError
from jaxckpt.executor.actions import ActionList, Advance, Drop, Keep, Load, Reverse
from jaxckpt.executor.manual import ManualCheckpoint, _checked_params
from jaxckpt.executor.revolve import binomial
from jaxckpt.executor.stage import as_stages, stage_key
from jaxckpt.executor.storage import DiskStore, HostStore
from jaxckpt.executor.updates import apply_updates_in_backward
from jaxckpt.policy import save, save_everything
from jaxckpt.training import TrainState, make_train_step
from models.gpt import Block, GPTConfig
from models.losses import cross_entropy

WIDTH, BATCH, DEPTH = 4, 3, 5
KEY = jax.random.key(0)


@dataclass
class Case:
    """A chain, and what it is given."""

    stages: list[Any]
    params: list[Any]
    x: Any
    rng: Any = None
    shared: dict[str, Any] = field(default_factory=dict)
    has_aux: bool = False

    def chain(self, **options):
        options = {"has_aux": self.has_aux} | options
        return ManualCheckpoint(self.stages, self.params, **options)

    def forward(self, chain):
        return chain.forward(self.x, rng=self.rng, **self.shared)

    def composed(self, params, x, shared):
        """Run the stages one after another, as one function."""
        aux = []
        for number, stage in enumerate(as_stages(self.stages)):
            x = stage(params[number], x, stage_key(self.rng, number), shared)
            if self.has_aux:
                x, extra = x
                aux.append(extra)
        return (x, aux) if self.has_aux else x


def dense(p, x):
    return jnp.tanh(jax.ad_checkpoint.checkpoint_name(x @ p["w"], "product") + p["b"])


def weights(number, rows=WIDTH, columns=WIDTH):
    key = jax.random.fold_in(KEY, number)
    w = jax.random.normal(key, (rows, columns)) / 2
    return {"w": w, "b": jnp.full(columns, 0.1)}


def inputs(width=WIDTH):
    return jax.random.normal(jax.random.key(7), (BATCH, width))


def plain(depth=DEPTH):
    return Case([dense] * depth, [weights(i) for i in range(depth)], inputs())


def heterogeneous():
    def pair(p, x):
        return {"a": x @ p, "whole": jnp.arange(3)}

    def joined(p, x):
        return x["a"][:, :2] * p + x["whole"].sum()

    params = [weights(0, WIDTH, 6), jnp.ones((6, 5)), jnp.full(2, 0.5)]
    return Case([dense, pair, joined], params, inputs())


class LinenLayer(nn.Module):
    rate: float = 0.0

    @nn.compact
    def __call__(self, x):
        x = x + jnp.tanh(nn.Dense(WIDTH)(x))
        return nn.Dropout(self.rate, deterministic=self.rate == 0)(x)


def linen(rate=0.0):
    keys = jax.random.split(KEY, DEPTH)
    params = [LinenLayer().init(key, inputs())["params"] for key in keys]
    rng = jax.random.key(3) if rate else None
    return Case([LinenLayer(rate)] * DEPTH, params, inputs(), rng)


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.dense(x))


def nnx_modules():
    layers = [NnxLayer(nnx.Rngs(i)) for i in range(DEPTH)]
    return Case(layers, [stage.params for stage in as_stages(layers)], inputs())


def tokens():
    def embed(p, x, *, table):
        return table[x] + p

    def masked(p, x, *, rng, mask):
        noise = jax.random.bernoulli(rng, 0.7, x.shape)
        return dense(p, x * noise) * mask[:, None]

    def head(p, x, *, table, mask):
        return jnp.mean((x @ table.T * p["scale"]) ** 2) + 0 * mask.sum()

    shared = {"table": weights(9, 6)["w"], "mask": jnp.array([1, 0, 1])}
    params = [jnp.zeros(WIDTH), weights(1), weights(2), {"scale": jnp.ones(())}]
    x = jnp.array([1, 5, 2])
    return Case([embed, masked, masked, head], params, x, jax.random.key(5), shared)


def with_aux():
    def layer(p, x):
        y = dense(p, x)
        return y, {"norm": jnp.sum(y**2), "count": jnp.int32(1)}

    case = plain()
    return Case([layer] * DEPTH, case.params, case.x, has_aux=True)


CASES = {
    "plain": plain,
    "heterogeneous": heterogeneous,
    "linen": linen,
    "dropout": lambda: linen(0.5),
    "nnx": nnx_modules,
    "tokens": tokens,
    "aux": with_aux,
}


def random_like(tree):
    """Return cotangents: None for integers."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(11), len(leaves))
    is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
    values = [
        jax.random.normal(k, x.shape, x.dtype) if f else None
        for k, x, f in zip(keys, leaves, is_float, strict=True)
    ]
    return structure.unflatten(values)


def floats(tree):
    """Return the leaves that have gradients: not None, not `float0`."""
    return [x for x in jax.tree.leaves(tree) if x.dtype != jax.dtypes.float0]


def reference(case):
    """Return a cotangent, and the composition's results and gradients for it."""
    arrays = case.params, case.x, case.shared
    cotangent = random_like(jax.eval_shape(case.composed, *arrays))

    @jax.jit
    def run(*arrays):
        result, vjp = jax.vjp(case.composed, *arrays)
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), result)
        full = jax.tree.map(
            lambda c, z: z if c is None else c, cotangent, zeros, is_leaf=_is_none
        )
        d_params, d_x, d_shared = vjp(full)
        return result, list(map(floats, d_params)), floats((d_x, d_shared))

    return cotangent, run(*arrays)


def folder(storage, path):
    return {"directory": path} if storage == "disk" else {}


def check(case, **options):
    """Compare a chain's results and all its gradients with the composition's."""
    cotangent, (expected, d_params, d_rest) = reference(case)
    chain = case.chain(**options)
    found = case.forward(chain)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)
    cotangents = cotangent if case.has_aux else (cotangent, None)
    numbers = []
    for number, gradient in chain.backward(*cotangents):
        numbers.append(number)
        chex.assert_trees_all_close(
            floats(gradient), d_params[number], rtol=1e-5, atol=1e-6
        )
    assert numbers == list(range(len(case.stages)))[::-1]
    rest = floats((chain.input_cotangent, chain.shared_gradients))
    chex.assert_trees_all_close(rest, d_rest, rtol=1e-5, atol=1e-6)


def _is_none(value):
    return value is None


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_those_of_the_composition(name):
    check(CASES[name]())


@pytest.mark.parametrize("storage", ["host", "disk"])
@pytest.mark.parametrize("name", ["heterogeneous", "tokens", "dropout"])
def test_gradients_are_the_same_from_another_storage(name, storage, tmp_path):
    check(CASES[name](), storage=storage, **folder(storage, tmp_path))
    assert not list(tmp_path.iterdir())


# What is kept, and the states among it: the last segment of numbers keeps its tapes.
KEEPS = {
    "1": (1, [0, 1, 2, 3]),
    "2": (2, [0, 2]),
    "9": (9, []),
    "numbers": ([3], [0]),
    "tuple": ((0, 1), [0]),
    "text": ("every(3)", [0, 3]),
    "full": ("full", [0, 1, 2, 3, 4]),
    "schedule": (jaxckpt.nested(2, 2), None),
    "policy": (jaxckpt.uniform(save("product")), None),
    "list": (binomial(DEPTH, 2), None),
    "bare list": ([Keep(0), Advance(0, 1), *[Reverse(1), Load(0), Reverse(0)]], None),
}


@pytest.mark.parametrize("name", KEEPS)
def test_every_form_of_keep_gives_the_gradients(name):
    keep, _ = KEEPS[name]
    check(plain(2 if name == "bare list" else DEPTH), keep=keep)


@pytest.mark.parametrize("name", [n for n, (_, k) in KEEPS.items() if k is not None])
def test_keep_says_whose_inputs_are_kept_and_storage_where(name):
    keep, kept = KEEPS[name]
    actions = plain().chain(keep=keep, storage="host").actions
    forward = actions[: actions.forward_length]
    states = [a for a in forward if isinstance(a, Keep) and a.policy is None]
    assert [a.index for a in states] == kept
    assert {a.storage for a in states} <= {"host"}


def test_a_kept_index_moves_only_until_it_is_dropped():
    chain = plain(6).chain(keep=jaxckpt.nested(2, 3), storage="disk")
    assert {a.storage for a in chain.actions if hasattr(a, "storage")} == {
        "device",
        "disk",
    }
    check(plain(6), keep=jaxckpt.nested(2, 3), storage="disk")


def test_tapes_may_be_on_host_and_disk():
    actions = ActionList(
        [
            Keep(0, "disk", save("product")),
            Keep(1, "host", save_everything()),
            *(Reverse(2), Load(1, "host"), Drop(1, "host"), Reverse(1)),
            *(Load(0, "disk"), Drop(0, "disk"), Reverse(0)),
        ],
        steps=3,
    )
    check(plain(3), keep=actions)


def test_stages_that_are_equal_compile_once():
    case = plain(12)
    chain = case.chain(keep=4)
    with jax.log_compiles(), _compiled() as names:
        y = case.forward(chain)
        for _ in chain.backward(jnp.ones_like(y)):
            pass
        first = len(names)
        y = case.forward(chain)
        for _ in chain.backward(jnp.ones_like(y)):
            pass
    assert sum("_run_backward" in name for name in names) == 1
    assert sum("_run_forward" in name for name in names) == 1
    assert len(names) == first


class _compiled:  # noqa: N801
    """Collect the log's lines about compilations."""

    def __enter__(self):
        import logging

        self.names = []
        self.handler = logging.Handler()
        self.handler.emit = lambda record: self._note(record.getMessage())
        logging.getLogger("jax").addHandler(self.handler)
        return self.names

    def _note(self, message):
        if message.startswith("Compiling"):
            self.names.append(message)

    def __exit__(self, *error):
        import logging

        logging.getLogger("jax").removeHandler(self.handler)


def test_dropout_masks_are_the_same_again_and_differ_between_stages():
    def noise(p, x, *, rng):
        return x + p * jax.random.normal(rng, x.shape)

    chain = ManualCheckpoint([noise] * 3, [jnp.ones(())] * 3, keep=[0])
    x = jnp.zeros(4)
    y = chain.forward(x, rng=KEY)
    gradients = dict(chain.backward(jnp.ones_like(y)))
    assert len({float(g) for g in gradients.values()}) == 3
    np.testing.assert_allclose(sum(gradients.values()), y.sum(), rtol=1e-5)
    assert not np.allclose(chain.forward(x, rng=jax.random.key(1)), y)


@pytest.mark.parametrize("storage", ["device", "host", "disk"])
def test_a_state_may_carry_keys_masks_and_other_dtypes(storage):
    def step(p, x):
        noise = jax.random.normal(x["key"], x["h"].shape, x["h"].dtype)
        h = jnp.where(x["mask"], x["h"] * p + noise, 0)
        return x | {"h": h, "key": jax.random.fold_in(x["key"], 1)}

    x = {
        "h": jnp.ones(3, jnp.bfloat16),
        "mask": jnp.array([True, False, True]),
        "key": jax.random.key(4),
    }
    chain = ManualCheckpoint([step] * 3, [jnp.bfloat16(2)] * 3, storage=storage)
    y = chain.forward(x)
    assert chain.forward(x)["h"].tolist() == y["h"].tolist()
    ones = {"h": jnp.ones(3, jnp.bfloat16), "mask": None, "key": None}
    list(chain.backward(ones))
    found = chain.input_cotangent
    assert found["key"] is None and found["mask"] is None
    assert found["h"].tolist() == [8, 0, 8]


def test_integer_parameters_have_none_for_a_gradient():
    def shifted(p, x):
        return p["w"] * x + p["count"]

    params = {"w": jnp.float32(3), "count": jnp.int32(1), "key": jax.random.key(0)}
    chain = ManualCheckpoint([shifted], [params])
    chain.forward(jnp.float32(2))
    ((_, gradient),) = chain.backward()
    assert gradient["count"] is None and gradient["key"] is None
    assert gradient["w"] == 2 and chain.input_cotangent == 3


def test_parameters_may_be_replaced_and_gradients_are_of_those_the_forward_read():
    case = plain()
    chain = case.chain()
    y = case.forward(chain)
    expected = dict(chain.backward(jnp.ones_like(y)))
    case.forward(chain)
    chain.params[:] = [jax.tree.map(jnp.zeros_like, p) for p in case.params]
    chex.assert_trees_all_equal(dict(chain.backward(jnp.ones_like(y))), expected)
    assert not case.forward(chain).any()


def test_the_users_arrays_are_left_alone():
    case = plain()
    chain = case.chain()
    cotangent = jnp.ones((BATCH, WIDTH))
    y = case.forward(chain)
    gradients = list(chain.backward(cotangent))
    arrays = [case.x, case.params, cotangent, y, gradients, chain.input_cotangent]
    leaves = [x for x in jax.tree.leaves(arrays) if isinstance(x, jax.Array)]
    assert len(leaves) > 4 * DEPTH and not any(x.is_deleted() for x in leaves)


# Memory


def live_bytes():
    """Count what is referenced; no collection of cycles has to run for it."""
    return sum(a.nbytes for a in jax.live_arrays())


def size(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def test_a_backward_pass_holds_one_gradient_and_the_inputs_that_are_left():
    case, depth = plain(8), 8
    chain = case.chain()
    state = case.x.nbytes
    for turn in range(2):
        before = live_bytes() - turn * state  # the cotangent of the last turn's `x`
        y = case.forward(chain)
        assert live_bytes() == before + y.nbytes + (depth - 2) * state + last_tape(case)
        for number, gradient in chain.backward(jnp.ones_like(y)):
            kept = max(number - 1, 0) * state  # x0 is the user's
            flow = state
            expected = before + y.nbytes + kept + flow + size(gradient)
            assert live_bytes() == expected
            del gradient
        del y, number
    chain.forward(case.x)
    chain.close()
    assert live_bytes() == before


@pytest.mark.parametrize("storage", ["host", "disk"])
def test_other_storages_hold_no_state_on_the_device(storage):
    case = plain(8)
    chain = case.chain(storage=storage)
    y = case.forward(chain)
    list(chain.backward(jnp.ones_like(y)))
    del y
    before = device_bytes() - chain.input_cotangent.nbytes
    y = case.forward(chain)
    deadline = time.monotonic() + 10
    while device_bytes() != before + y.nbytes + last_tape(case):  # until it is written
        assert time.monotonic() < deadline


def last_tape(case):
    """Return the bytes of a dense stage's tape: its input and its residuals."""
    traced = jaxckpt.trace(dense, case.params[0], case.x, argnums=(0, 1))
    return case.x.nbytes * (1 + sum(not r.argument for r in traced.residuals))


def device_bytes():
    arrays = [a for a in jax.live_arrays() if a.sharding.memory_kind == "device"]
    return sum(a.nbytes for a in arrays)


# Training


CONFIG = GPTConfig(
    num_layers=12,
    width=16,
    num_heads=2,
    vocab_size=32,
    positions=6,
    dtype="float32",
    attention="xla",
)


def gpt_stages(config):
    def embed(p, x, *, table):
        return table[x] + p

    def head(p, x, *, table, targets):
        x = nn.LayerNorm(epsilon=1e-5).apply({"params": p}, x)
        return cross_entropy(x, table, targets)

    return [embed, *[Block(config)] * config.num_layers, head]


def gpt_params(config):
    """Return parameters of each stage, and the embedding table."""
    x = jnp.zeros((1, 1, config.width))
    layer = jax.eval_shape(Block(config).init, KEY, x)["params"]
    norm = dict.fromkeys(("scale", "bias"), x[0, 0])
    position = jnp.zeros((config.positions, config.width))
    shapes = [position, *[layer] * config.num_layers, norm]
    table = jnp.zeros((config.vocab_size, config.width))
    random = np.random.default_rng(0)
    return jax.tree.map(
        lambda t: jnp.asarray(random.normal(0, 0.2, t.shape), t.dtype), (shapes, table)
    )


def gpt_batches():
    size = 3, 2, CONFIG.positions + 1
    return jax.random.randint(jax.random.key(2), size, 0, CONFIG.vocab_size)


@functools.cache
def jitted_losses():
    """Return the losses of three steps under `jax.jit`."""
    optimizer, stages = optax.adam(1e-2), as_stages(gpt_stages(CONFIG))

    def loss_fn(params, batch):
        shared = {"table": params["table"], "targets": batch[:, 1:]}
        x = stages[0](params["first"], batch[:, :-1], None, shared)
        x, _ = jax.lax.scan(
            lambda x, p: (stages[1](p, x, None, {}), None), x, params["layers"]
        )
        return stages[-1](params["last"], x, None, shared)

    (first, *layers, last), table = gpt_params(CONFIG)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    params = {"first": first, "layers": stacked, "last": last, "table": table}
    step = make_train_step(loss_fn, optimizer)
    state = TrainState.create(params, optimizer, jax.random.key(0))
    losses = []
    for batch in gpt_batches():
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return losses


@pytest.mark.parametrize(
    "options", [{}, {"keep": 5, "storage": "disk"}], ids=["all", "every 5 on disk"]
)
def test_a_gpt_trains_as_under_jit(options):
    optimizer = optax.adam(1e-2)
    update = jax.jit(optimizer.update)
    params, table = gpt_params(CONFIG)
    chain = ManualCheckpoint(gpt_stages(CONFIG), params, **options)
    states, table_state = [optimizer.init(p) for p in params], optimizer.init(table)
    losses = []
    for batch in gpt_batches():
        targets = batch[:, 1:]
        losses.append(chain.forward(batch[:, :-1], table=table, targets=targets))
        states = apply_updates_in_backward(chain, optimizer, states)
        gradient = chain.shared_gradients["table"]
        updates, table_state = update(gradient, table_state)
        table = optax.apply_updates(table, updates)
    np.testing.assert_allclose(losses, jitted_losses(), rtol=2e-5)
    assert losses[-1] != losses[0] and list(chain.shared_gradients) == ["table"]


def test_updates_hold_one_gradient_and_use_up_what_they_replace():
    case, optimizer = plain(8), optax.adam(1e-3)
    chain = case.chain()
    states = [optimizer.init(p) for p in chain.params]
    seen = []

    def watched(gradient, state, params):
        jax.debug.callback(lambda: seen.append(live_bytes()))
        return optimizer.update(gradient, state, params)

    spy = optax.GradientTransformation(optimizer.init, watched)
    first, before = chain.params[3]["w"], live_bytes()
    for _ in range(2):
        y = case.forward(chain)
        states = apply_updates_in_backward(chain, spy, states, jnp.ones_like(y))
    jax.effects_barrier()
    assert first.is_deleted()
    one = size(chain.params[0])
    kept = 7 * case.x.nbytes
    # Old and new parameters and state of a stage, its gradient, and two cotangents.
    assert max(seen) <= before + 5 * one + kept + 4 * case.x.nbytes
    assert len(seen) == 16


def test_updates_refuse_tied_parameters_integers_and_missing_states():
    optimizer = optax.sgd(0.1)
    w = jnp.eye(WIDTH)
    chain = ManualCheckpoint([lambda p, x: x @ p] * 2, [w, w])
    chain.forward(inputs())
    with pytest.raises(WorkloadError, match="shared keyword") as error:
        apply_updates_in_backward(chain, optimizer, [None, None], inputs())
    assert "`params[0]` and `params[1]`" in str(error.value)
    chain.params = [jnp.eye(WIDTH), jnp.arange(3)]
    with pytest.raises(WorkloadError, match=r"`params\[1\]` is `int32\[3\]`"):
        apply_updates_in_backward(chain, optimizer, [None, None], inputs())
    with pytest.raises(WorkloadError, match="`states` has 1 items"):
        apply_updates_in_backward(chain, optimizer, [None], inputs())


# Files


def files(folder):
    return [path for path in pathlib.Path(folder).rglob("*") if path.is_file()]


def test_files_are_there_between_the_passes_and_gone_one_by_one(tmp_path):
    case = plain()
    chain = case.chain(storage="disk", directory=str(tmp_path))
    y = case.forward(chain)
    deadline = time.monotonic() + 10
    while len(files(tmp_path)) < DEPTH - 1:
        assert time.monotonic() < deadline
    counts = [len(files(tmp_path)) for _ in chain.backward(jnp.ones_like(y))]
    assert counts == [4, 3, 2, 1, 0]
    assert not list(tmp_path.iterdir())


def left_early(chain, y):
    iterator = chain.backward(jnp.ones_like(y))
    next(iterator)
    iterator.close()


def consumer_raises(chain, y):
    with pytest.raises(KeyError):
        for _ in chain.backward(jnp.ones_like(y)):
            raise KeyError


def closed(chain, y):
    chain.close()


def closed_in_between(chain, y):
    iterator = chain.backward(jnp.ones_like(y))
    next(iterator)
    chain.close()
    with pytest.raises(WorkloadError, match="was closed"):
        next(iterator)


def left_with(chain, y):
    with chain:
        pass


@pytest.mark.parametrize(
    "leave", [left_early, consumer_raises, closed, closed_in_between, left_with]
)
@pytest.mark.parametrize("storage", ["device", "disk"])
def test_a_pass_that_ends_early_frees_what_it_kept(leave, storage, tmp_path):
    case = plain()
    chain = case.chain(storage=storage, **folder(storage, tmp_path))
    y = case.forward(chain)
    list(chain.backward(jnp.ones_like(y)))
    del y
    before = live_bytes() - chain.input_cotangent.nbytes
    y = case.forward(chain)
    leave(chain, y)
    del y
    assert live_bytes() == before and not list(tmp_path.iterdir())
    with pytest.raises(WorkloadError, match="nothing to run backward"):
        chain.backward(case.x)
    with pytest.raises(WorkloadError, match="no cotangents"):
        _ = chain.input_cotangent


def test_a_stage_that_raises_frees_what_was_kept(tmp_path):
    def root(p, x):
        return jnp.sqrt(x) * p

    params = [jnp.float32(p) for p in (1, -1, 1)]
    chain = ManualCheckpoint([root] * 3, params, storage="disk", directory=tmp_path)
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError):
            chain.forward(jnp.float32(4))
        assert not list(tmp_path.iterdir())
        chain.params[1] = jnp.float32(0)
        chain.forward(jnp.float32(4))
        with pytest.raises(FloatingPointError):
            list(chain.backward(jnp.float32(0)))
    assert not list(tmp_path.iterdir())


def test_a_new_forward_frees_the_old_one_and_a_lost_chain_everything(tmp_path):
    case = plain()
    chain = case.chain(storage="disk", directory=tmp_path)
    case.forward(chain)
    case.forward(chain)
    assert len(list(tmp_path.iterdir())) == 1
    del chain
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_files_are_gone_after_the_interpreter(tmp_path):
    script = f"""
import jax.numpy as jnp
from jaxckpt.executor.manual import ManualCheckpoint
chain = ManualCheckpoint([lambda p, x: p * x] * 3, [1.0] * 3, storage="disk",
    directory={str(tmp_path)!r})
chain.forward(jnp.ones(3))
import pathlib
assert list(pathlib.Path({str(tmp_path)!r}).iterdir())
raise SystemExit(3)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == 3 and not list(tmp_path.iterdir())


def test_a_write_that_fails_is_one_error_and_cleans_up(tmp_path):
    case = plain(30)
    chain = case.chain(storage="disk", directory=tmp_path)
    y = case.forward(chain)
    (folder,) = tmp_path.iterdir()
    for path in files(folder):
        path.unlink()
    with pytest.raises(OSError, match="Keeping states on disk failed in") as error:
        list(chain.backward(jnp.ones_like(y)))
    assert 'use `storage="host"`' in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_store_raises_what_its_thread_met(tmp_path):
    store = DiskStore(tmp_path)
    store.folder.rmdir()
    held = store.put(jnp.ones(3))
    with pytest.raises(OSError, match="No such file"):
        store.get(held)
    with pytest.raises(OSError, match="No such file"):
        store.put(jnp.ones(3))
    store.close()


def test_a_full_disk_is_named(tmp_path):
    store = DiskStore(tmp_path)
    (store.folder / "0").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device. Give a `directory`"):
        store.get(store.put(jnp.ones(1000)))
    store.close()
    assert not list(tmp_path.iterdir())


DTYPES = "float32", "bfloat16", "float8_e4m3fn", "int32", "int8", "bool", "complex64"


@pytest.mark.parametrize("make", [HostStore, DiskStore])
def test_stores_return_every_type_exactly(make):
    value = {name: jnp.arange(6).reshape(2, 3).astype(name) for name in DTYPES}
    value |= {"key": jax.random.split(KEY, 2), "rbg": jax.random.key(0, impl="rbg")}
    value |= {"scalar": jnp.float32(2), "empty": jnp.zeros((0, 3))}
    store = make()
    found = store.get(store.put(value))
    chex.assert_trees_all_equal(*map(_data, (found, value)))
    types = [jax.tree.map(lambda x: (x.dtype, x.sharding), t) for t in (found, value)]
    assert types[0] == types[1]
    store.close()


def _data(tree):
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def test_sharded_states_keep_their_sharding():
    script = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxckpt.executor.manual import ManualCheckpoint
from jaxckpt.executor.storage import DiskStore, HostStore
mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.device_put(jnp.arange(32.0).reshape(8, 4), NamedSharding(mesh, P("d")))
copies = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, P()))
for store in HostStore(), DiskStore():
    a, b = store.get(store.put((x, copies)))
    assert a.sharding == x.sharding and b.sharding == copies.sharding
    assert {s.data.sharding.memory_kind for s in a.addressable_shards} == {"device"}
    assert (a == x).all() and (b == copies).all()
w = jax.device_put(jnp.eye(4), NamedSharding(mesh, P()))
found = []
for storage in "device", "host", "disk":
    chain = ManualCheckpoint([lambda p, x: jnp.tanh(x @ p)] * 4, [w] * 4,
        storage=storage)
    y = chain.forward(x)
    assert y.sharding.is_equivalent_to(x.sharding, 2)
    found.append([g for _, g in chain.backward(jnp.ones_like(y))])
for other in found[1:]:
    assert all((a == b).all() for a, b in zip(found[0], other))
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    environment = os.environ | flags
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


# Errors


def test_stages_that_do_not_fit_are_named_before_anything_runs():
    ran = []

    def first(p, x):
        jax.debug.callback(lambda: ran.append(1))
        return x @ p

    case = Case([first, dense], [jnp.ones((WIDTH, 3)), weights(0)], inputs())
    with pytest.raises(WorkloadError) as error:
        case.forward(case.chain())
    text = str(error.value)
    assert "stage 1 (`dense`)" in text and "float32[3,3]" in text
    jax.effects_barrier()
    assert not ran


def test_cotangents_of_another_type_are_refused_before_anything_runs():
    case = plain()
    chain = case.chain()
    y = case.forward(chain)
    for wrong, text in (
        (jnp.ones(3), r"`cotangent` holds `float32\[3\]` where"),
        (y.astype(jnp.bfloat16), r"holds `bfloat16\[3,4\]`"),
        ([y], "is the structure of `cotangent`"),
        (None, "left out for one scalar alone"),
    ):
        with pytest.raises(WorkloadError, match=text):
            chain.backward(wrong)
    with pytest.raises(WorkloadError, match="`aux_cotangents` has 1 items"):
        chain.backward(y, [None])
    assert len(list(chain.backward(y))) == DEPTH


WRONG_KEEPS = {
    "0": (0, "`keep=0` is not a whole number of at least 1"),
    "True": (True, "`keep=True` is not a whole number"),
    "5": ([0, 5], "`keep=[0, 5]` has `5`, which is no stage. Use numbers from 0 to 4"),
    "float": ([1.0], "has `1.0`, which is no stage"),
    "None": (None, "`keep=None` says of no stage"),
    "text": ("evry(2)", "evry"),
    "steps": (binomial(4, 2), "The list is made for 4 stages, and the chain has 5"),
    "illegal": ([Reverse(1), Keep(0)], "is illegal"),
}


@pytest.mark.parametrize("name", WRONG_KEEPS)
def test_a_wrong_keep_is_refused_at_once(name):
    keep, text = WRONG_KEEPS[name]
    with pytest.raises(ScheduleError) as error:
        plain().chain(keep=keep)
    assert text in str(error.value)


def test_other_wrong_settings_are_refused_at_once(tmp_path):
    with pytest.raises(ScheduleError, match="`storage='disc'` is not known"):
        plain().chain(storage="disc")
    with pytest.raises(ScheduleError, match="does not go with a list of actions"):
        plain().chain(keep=binomial(DEPTH, 2), storage="host")
    for wrong in (tmp_path / "none", __file__, 3):
        with pytest.raises(ScheduleError, match="is no folder"):
            plain().chain(storage="disk", directory=wrong)
    with pytest.raises(WorkloadError, match="`params` has 1 trees, and the chain 2"):
        ManualCheckpoint([dense] * 2, [weights(0)])
    with pytest.raises(WorkloadError, match=r"stage 0 \(`dense`\) brings none"):
        ManualCheckpoint([dense])
    with pytest.raises(WorkloadError, match="`params` is of type `dict`"):
        _checked_params(as_stages([dense]), weights(0))
    with pytest.raises(WorkloadError, match="`maks` is a keyword of no stage"):
        plain().chain().forward(inputs(), maks=jnp.ones(3))


def test_backward_needs_a_forward_each_time():
    case = plain()
    chain = case.chain()
    with pytest.raises(WorkloadError, match="nothing to run backward"):
        chain.backward(inputs())
    y = case.forward(chain)
    iterator = chain.backward(y)
    with pytest.raises(WorkloadError, match="nothing to run backward"):
        chain.backward(y)
    case.forward(chain)
    with pytest.raises(WorkloadError, match="This backward pass was closed"):
        next(iterator)
    assert len(list(chain.backward(y))) == DEPTH


def test_nnx_modules_bring_their_parameters():
    layers = [NnxLayer(nnx.Rngs(i)) for i in range(2)]
    chain = ManualCheckpoint(layers)
    y = chain.forward(inputs())
    for number, gradient in chain.backward(jnp.ones_like(y)):
        chex.assert_trees_all_equal_shapes(gradient, chain.params[number])


def test_arrays_that_an_update_would_use_up_twice_are_refused():
    weights, optimizer = [jnp.ones((2, 2))] * 1, optax.adam(0.1)
    stage = lambda w, x, *, t: jnp.sum(x @ w @ t)  # noqa: E731
    chain = ManualCheckpoint([stage], weights)
    chain.forward(jnp.ones((1, 2)), t=weights[0])
    with pytest.raises(WorkloadError, match="A shared keyword and `params"):
        apply_updates_in_backward(chain, optimizer, [optimizer.init(weights[0])])
    state = optimizer.init(jnp.ones((2, 2)))
    chain = ManualCheckpoint([lambda w, x: x @ w] * 2, [jnp.eye(2), jnp.ones((2, 2))])
    y = chain.forward(jnp.ones((1, 2)))
    with pytest.raises(WorkloadError, match="`states` holds one array twice"):
        apply_updates_in_backward(chain, optimizer, [state, state], y)


def test_inside_a_transformation_the_compiled_form_is_named():
    chain = ManualCheckpoint([lambda w, x: x * w], [jnp.ones(())])
    with pytest.raises(WorkloadError, match="Use `checkpoint_chain` there"):
        jax.jit(chain.forward)(jnp.ones(3))


def test_a_folder_without_anything_on_disk_is_refused(tmp_path):
    with pytest.raises(ScheduleError, match="nothing is kept on disk"):
        ManualCheckpoint([lambda w, x: x * w], [1.0], directory=tmp_path)
