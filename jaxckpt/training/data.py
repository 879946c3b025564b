"""Batches of bytes from text files: no tokenizer, no download."""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxckpt.errors import WorkloadError

SPLITS = ("train", "validation")
_VALIDATION_SHARE = 0.1
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests"}  # vary by machine


def byte_batches(
    split: str,
    *,
    batch: int,
    length: int,
    path: str | None = None,
    seed: int = 0,
    start: int = 0,
) -> Iterator[dict[str, np.ndarray]]:
    """Yield `{"tokens": int32[batch, length]}` without end: bytes at random places.

    Batch `i` depends on `(split, seed, i)` alone, so that a run resumes with
    `start=steps_done` where it stopped.

    Args:
        split: `"train"` or `"validation"`, which share no byte.
        batch: Sequences in a batch.
        length: Bytes in a sequence.
        path: See `read_bytes`.
        seed: Of the order.
        start: Number of the first batch.

    Raises:
        WorkloadError: An unknown split, or too little text for one sequence.

    Example:
        >>> batches = byte_batches("train", batch=2, length=5)
        >>> next(batches)["tokens"].shape
        (2, 5)
    """
    text = read_bytes(split, path)
    if len(text) < length:
        raise WorkloadError(
            f"The {split} text has {len(text)} bytes, too few for a sequence of "
            f"{length}. Give more text, or use a smaller `seq`."
        )
    return _windows(text, batch, length, (SPLITS.index(split), seed), start)


def read_bytes(split: str, path: str | None = None) -> np.ndarray:
    """Return the bytes of a split, uint8: the last tenth of each file is validation.

    Args:
        split: `"train"` or `"validation"`.
        path: A file; or a folder, of which all files count that hold no zero byte, by
            sorted path; None for the sources of Python's standard library.

    Raises:
        WorkloadError: An unknown split, no such path, or no text there.
    """
    if split not in SPLITS:
        raise WorkloadError(f"`split={split}` is not known. Use {' or '.join(SPLITS)}.")
    return _read_splits(path)[SPLITS.index(split)]


def unigram_entropy(tokens: np.ndarray) -> float:
    """Return `-sum_x p(x) log p(x)` in nats over the frequencies `p` of the tokens.

    The mean loss of the best model that ignores what came before, on these tokens.

    Args:
        tokens: Non-negative integers, at least one.

    Example:
        >>> round(unigram_entropy(np.array([0, 1, 0, 1])), 4)
        0.6931
    """
    counts = np.bincount(np.ravel(tokens))
    frequencies = counts[counts > 0] / np.size(tokens)
    return float(-np.sum(frequencies * np.log(frequencies)))


def _windows(
    text: np.ndarray, batch: int, length: int, seed: tuple[int, int], start: int
) -> Iterator[dict[str, np.ndarray]]:
    number = start
    while True:
        rng = np.random.default_rng((*seed, number))
        at = rng.integers(len(text) - length + 1, size=batch)
        yield {"tokens": text[at[:, None] + np.arange(length)].astype(np.int32)}
        number += 1


@functools.lru_cache(maxsize=2)
def _read_splits(path: str | None) -> tuple[np.ndarray, np.ndarray]:
    train, validation = [], []
    for file in _text_files(path):
        content = file.read_bytes()
        if path is not None and b"\0" in content:
            continue
        cut = len(content) - int(len(content) * _VALIDATION_SHARE)
        train.append(content[:cut])
        validation.append(content[cut:])
    if not any(train):
        raise WorkloadError(f"`{path}` holds no text to train on.")
    return _join(train), _join(validation)


def _join(parts: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(parts), np.uint8)


def _text_files(path: str | None) -> list[Path]:
    if path is None:
        library = Path(sysconfig.get_path("stdlib"))
        found = sorted(library.rglob("*.py"))
        return [f for f in found if not _NOT_LIBRARY & {*f.relative_to(library).parts}]
    root = Path(path)
    if not root.exists():
        raise WorkloadError(
            f"`{path}` does not exist. Give a file or a folder of text, or nothing for "
            "the sources of Python's standard library."
        )
    return (
        sorted(f for f in root.rglob("*") if f.is_file()) if root.is_dir() else [root]
    )
