"""The loop: it learns, writes a log that survives, and says what it measured."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxckpt import devices
from jaxckpt.errors import WorkloadError
from jaxckpt.training import evaluate, train, unigram_entropy
from jaxckpt.workload import Workload

VOCAB = 5


def _loss(params, batch, rng=None):
    """Predict each token from the one before, by a table."""
    logits = jax.nn.log_softmax(params["table"][batch["tokens"][:, :-1]])
    noise = 0.0 if rng is None else 100 * jax.random.uniform(rng)
    losses = jnp.take_along_axis(logits, batch["tokens"][:, 1:, None], axis=-1)
    return noise - jnp.mean(losses)


def _counting(split):
    """Yield rows that count up modulo `VOCAB` from anywhere."""
    rng = np.random.default_rng(split == "train")
    while True:
        first = rng.integers(VOCAB, size=(4, 1))
        yield {"tokens": ((first + np.arange(7)) % VOCAB).astype(np.int32)}


def _workload(**changes):
    plain = Workload(
        name="counting",
        loss_fn=lambda params, batch: _loss(params, batch),
        params={"table": jax.ShapeDtypeStruct((VOCAB, VOCAB), jnp.float32)},
        batch={"tokens": jax.ShapeDtypeStruct((4, 7), jnp.int32)},
        optimizer=optax.adam(0.3),
        init=lambda rng: {"table": 0.01 * jax.random.normal(rng, (VOCAB, VOCAB))},
        data=_counting,
    )
    return dataclasses.replace(plain, **changes)


def _read_log(folder):
    text = (folder / "log.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_train_learns_and_says_so(tmp_path):
    result = train(_workload(), steps=30, out=tmp_path)
    assert result.validation_loss < 0.2 < 1.5 < result.unigram_entropy
    assert result.steps == int(result.state.step) == 30
    assert result.tokens_per_second == pytest.approx(30 * 24 / result.train_seconds)


def test_log_has_one_object_a_step(tmp_path):
    result = train(_workload(), steps=6, out=tmp_path / "new")
    lines = _read_log(tmp_path / "new")
    keys = {"step", "loss", "grad_norm", "tokens_per_second", "seconds"}
    assert all(set(line) == keys for line in lines)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["loss"] == result.final_loss
    assert lines[0]["loss"] > lines[-1]["loss"]
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds) and result.train_seconds == seconds[-1]


def test_log_every_keeps_the_last_step(tmp_path):
    train(_workload(), steps=7, out=tmp_path, log_every=3)
    assert [line["step"] for line in _read_log(tmp_path)] == [3, 6, 7]


def test_interrupt_leaves_a_valid_log(tmp_path):
    def until_interrupted(split):
        yield from itertools.islice(_counting(split), 4)
        # Before the file is closed: what was written must be on disk already.
        assert len(_read_log(tmp_path)) == 4
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(_workload(data=until_interrupted), steps=9, out=tmp_path)
    assert [line["step"] for line in _read_log(tmp_path)] == [1, 2, 3, 4]


def test_same_seed_same_run_and_another_seed_another():
    losses = [train(_workload(), steps=3, seed=s).final_loss for s in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


def test_accumulated_run_follows_the_whole_batch():
    whole = train(_workload(), steps=5)
    cut = train(_workload(), steps=5, accumulate=2)
    assert cut.final_loss == pytest.approx(whole.final_loss, rel=1e-4)


def test_validation_sees_no_rng():
    result = train(_workload(loss_fn=_loss), steps=20)
    assert result.final_loss != pytest.approx(result.validation_loss, abs=0.5)
    assert result.validation_loss < 1


def test_evaluate_gives_the_mean_and_the_entropy_of_the_targets():
    params = {"table": jnp.zeros((VOCAB, VOCAB))}
    loss, entropy = evaluate(_workload(), params, batches=3)
    assert loss == pytest.approx(np.log(VOCAB))
    read = itertools.islice(_counting("validation"), 3)
    tokens = np.concatenate([batch["tokens"][:, 1:] for batch in read])
    assert entropy == unigram_entropy(tokens)


def test_mfu_needs_the_flops_and_a_known_peak():
    assert train(_workload(), steps=2).mfu is None
    with devices.use("h100-80gb") as device:
        result = train(_workload(), steps=2, forward_flops=1e9)
    step_seconds = result.train_seconds / 2
    wanted = 3e9 / (step_seconds * device.peak_flops_per_second)
    assert result.mfu == pytest.approx(wanted)


def test_train_prints_nothing_without_a_terminal(capfd):
    train(_workload(), steps=2)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_what_is_missing_or_out_of_range_raises():
    with pytest.raises(WorkloadError, match="`steps=0` must be at least 1"):
        train(_workload(), steps=0)
    with pytest.raises(WorkloadError, match="`eval_batches=0`"):
        train(_workload(), steps=1, eval_batches=0)
    with pytest.raises(WorkloadError, match="`counting` has no `data`"):
        train(_workload(init=None, data=None), steps=1)


def test_an_unwritable_folder_is_refused_before_anything_compiles(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(WorkloadError, match="cannot be written: File exists"):
        train(_workload(), steps=1, out=blocked)
