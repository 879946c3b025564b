"""Bytes as data: two splits that share nothing, in an order that a seed fixes."""

import itertools
import math

import numpy as np
import pytest

from jaxckpt.errors import WorkloadError
from jaxckpt.training import byte_batches, read_bytes, unigram_entropy


@pytest.fixture
def folder(tmp_path):
    """Hold two texts whose bytes say which split they fall in, and one binary file."""
    (tmp_path / "b.txt").write_bytes(b"a" * 90 + b"z" * 10)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.txt").write_bytes(b"b" * 180 + b"y" * 20)
    (tmp_path / "binary").write_bytes(b"\0" * 500)
    return tmp_path


def _take(number, **settings):
    batches = byte_batches(batch=4, length=9, **settings)
    return [batch["tokens"] for batch in itertools.islice(batches, number)]


def test_splits_share_no_byte_and_lose_none(folder):
    train, validation = (
        bytes(read_bytes(s, str(folder))) for s in ("train", "validation")
    )
    assert train == b"a" * 90 + b"b" * 180
    assert validation == b"z" * 10 + b"y" * 20


def test_batches_come_from_their_split_alone(folder):
    train = np.concatenate(_take(20, split="train", path=str(folder)))
    validation = np.concatenate(_take(20, split="validation", path=str(folder)))
    assert set(np.unique(train)) == set(b"ab")
    assert set(np.unique(validation)) == set(b"yz")


def test_batches_are_windows_of_the_text(tmp_path):
    (tmp_path / "count").write_bytes(bytes(range(1, 251)))
    (batch,) = _take(1, split="train", path=str(tmp_path / "count"))
    assert batch.dtype == np.int32 and batch.shape == (4, 9)
    assert (np.diff(batch, axis=1) == 1).all()
    assert len(np.unique(batch[:, 0])) > 1


def test_order_follows_the_seed_and_resumes():
    first = _take(5, split="train")
    np.testing.assert_array_equal(first, _take(5, split="train"))
    assert not np.array_equal(first, _take(5, split="train", seed=1))
    np.testing.assert_array_equal(first[3:], _take(2, split="train", start=3))


def test_default_text_is_the_standard_library():
    text = bytes(read_bytes("train"))
    assert len(text) > 5_000_000
    assert b"def namedtuple(" in text
    assert b"site-packages" not in text[:1000]


def test_unigram_entropy_of_known_frequencies():
    assert unigram_entropy(np.full(10, 7)) == 0
    assert unigram_entropy(np.arange(256)) == pytest.approx(math.log(256))
    quarter = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert unigram_entropy(np.array([[3, 3], [3, 9]])) == pytest.approx(quarter)


def test_bad_input_raises_with_the_reason(tmp_path):
    (tmp_path / "short").write_bytes(b"x" * 20)
    with pytest.raises(WorkloadError, match="`nowhere` does not exist"):
        read_bytes("train", "nowhere")
    with pytest.raises(WorkloadError, match=r"`split=test`.*train or validation"):
        read_bytes("test")
    with pytest.raises(WorkloadError, match="validation text has 2 bytes, too few.* 9"):
        _take(1, split="validation", path=str(tmp_path / "short"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(WorkloadError, match="holds no text"):
        read_bytes("train", str(tmp_path / "empty"))
