"""One step: the mean gradient however it is cut, clipped, donated, traced once."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxckpt.errors import WorkloadError
from jaxckpt.training import TrainState, abstract_state, make_train_step, train_step_fn

BATCH = {"x": np.arange(24.0, dtype=np.float32).reshape(8, 3) / 24, "y": np.ones(8)}


def _loss(params, batch):
    predicted = jnp.tanh(batch["x"] @ params["w"]) @ params["v"]
    return jnp.mean((predicted - batch["y"]) ** 2)


def _state(optimizer):
    keys = jax.random.split(jax.random.key(0))
    shapes = {"w": (3, 4), "v": (4,)}
    params = {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return TrainState.create(params, optimizer, jax.random.key(1))


def _one_step(loss_fn, **settings):
    optimizer = optax.sgd(1.0)
    return train_step_fn(loss_fn, optimizer, **settings)(_state(optimizer), BATCH)


def test_step_is_the_optimizer_applied_to_the_gradient():
    state = _state(optax.sgd(1.0))
    new, metrics = _one_step(_loss)
    loss, grads = jax.value_and_grad(_loss)(state.params, BATCH)
    expected = jax.tree.map(lambda p, g: p - g, state.params, grads)
    chex.assert_trees_all_close(new.params, expected, rtol=1e-6)
    assert float(metrics["loss"]) == pytest.approx(float(loss))
    assert int(new.step) == 1


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_accumulated_step_equals_the_whole_batch(parts):
    whole, whole_metrics = _one_step(_loss, clip_norm=0.1)
    cut, cut_metrics = _one_step(_loss, clip_norm=0.1, accumulate=parts)
    chex.assert_trees_all_close(cut.params, whole.params, rtol=1e-5)
    chex.assert_trees_all_close(cut_metrics, whole_metrics, rtol=1e-5)


def test_accumulated_aux_is_the_mean_over_the_parts():
    def loss_fn(params, batch):
        return _loss(params, batch), {"first": batch["x"][0, 0]}

    _, metrics = _one_step(loss_fn, accumulate=2)
    assert float(metrics["aux"]["first"]) == pytest.approx((0 + 12 / 24) / 2)


def test_clipping_limits_the_norm_of_the_update_and_reports_it_unclipped():
    state = _state(optax.sgd(1.0))
    grads = jax.grad(_loss)(state.params, BATCH)
    norm = float(optax.tree.norm(grads))
    for clip_norm, wanted in ((norm / 2, norm / 2), (norm * 2, norm)):
        new, metrics = _one_step(_loss, clip_norm=clip_norm)
        moved = jax.tree.map(jnp.subtract, state.params, new.params)
        assert float(optax.tree.norm(moved)) == pytest.approx(wanted, rel=1e-4)
        assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)


def test_rng_is_new_each_step_and_each_part():
    def loss_fn(params, batch, rng=None):
        return jnp.sum(params["v"]) * 0 + jax.random.uniform(rng)

    optimizer = optax.sgd(1.0)
    step = make_train_step(loss_fn, optimizer)
    state, first = step(_state(optimizer), BATCH)
    _, second = step(state, BATCH)
    _, parts = _one_step(loss_fn, accumulate=2)
    losses = {float(m["loss"]) for m in (first, second, parts)}
    assert len(losses) == 3


def test_loss_that_takes_no_rng_gets_none():
    new, _ = _one_step(lambda params, batch: _loss(params, batch))
    assert int(new.step) == 1


def test_jitted_step_uses_up_its_state_and_is_traced_once():
    traces = []

    def loss_fn(params, batch):
        traces.append(1)
        return _loss(params, batch)

    optimizer = optax.adam(1e-2)
    step = make_train_step(loss_fn, optimizer, accumulate=1)
    state = _state(optimizer)
    given = jax.tree.leaves(state)
    for _ in range(3):
        state, _ = step(state, BATCH)
    assert all(leaf.is_deleted() for leaf in given)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert len(traces) == 1


def test_live_arrays_are_constant_over_twenty_steps():
    optimizer = optax.adam(1e-2)
    step = make_train_step(_loss, optimizer, accumulate=2, clip_norm=1.0)
    state, metrics = step(_state(optimizer), BATCH)
    counts = []
    for _ in range(20):
        state, metrics = step(state, BATCH)
        jax.block_until_ready((state, metrics))
        counts.append(len(jax.live_arrays()))
    assert len(set(counts)) == 1


def test_step_exports_with_its_abstract_state():
    optimizer = optax.adam(1e-2)
    state = abstract_state(jax.eval_shape(lambda: _state(optimizer).params), optimizer)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, _state(optimizer))
    leaves, tree = jax.tree.flatten((state, BATCH))

    @jax.jit
    def flat_step(*leaves):
        return jax.tree.leaves(train_step_fn(_loss, optimizer)(*tree.unflatten(leaves)))

    # Plain arrays all: typed keys among them could not be written down.
    exported = jax.export.export(flat_step, platforms=["cuda"])(*leaves)
    again = jax.export.deserialize(exported.serialize())
    assert again.in_avals == exported.in_avals


def test_bad_settings_raise_with_the_reason():
    with pytest.raises(WorkloadError, match="`accumulate=0` is not a number of parts"):
        make_train_step(_loss, optax.sgd(1.0), accumulate=0)
    with pytest.raises(WorkloadError, match="`clip_norm=0.0` must be above 0"):
        make_train_step(_loss, optax.sgd(1.0), clip_norm=0.0)
    with pytest.raises(
        WorkloadError, match="`accumulate=3` does not divide.*axis of 8"
    ):
        _one_step(_loss, accumulate=3)
    with pytest.raises(WorkloadError, match=r"loss of shape \(8,\).*must be a scalar"):
        _one_step(lambda params, batch: batch["y"] * params["v"][0])
