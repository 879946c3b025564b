"""The training loop: a progress bar, a log, and a validation loss at the end."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from jaxckpt.devices import active_device, get_device
from jaxckpt.errors import WorkloadError
from jaxckpt.training.data import unigram_entropy
from jaxckpt.training.state import TrainState
from jaxckpt.training.step import call_loss, make_train_step
from jaxckpt.workload import Workload

PyTree = Any
Line = dict[str, int | float]
Report = Callable[[Line], None]


@dataclass(frozen=True)
class TrainResult:
    """What a run came to.

    Attributes:
        state: The last train state.
        steps: Steps done.
        final_loss: Training loss of the last step.
        validation_loss: Mean loss over the validation batches, without dropout.
        unigram_entropy: Of the tokens of those batches, in nats: the loss of a model
            that knows their frequencies and nothing else. None without `tokens`.
        compile_seconds: Tracing and compiling the step.
        train_seconds: All steps, without compiling.
        tokens_per_second: Over all steps; examples where the batch has no `tokens`.
        mfu: Model FLOPs utilisation, `3 * forward_flops * steps / (train_seconds *
            peak FLOP/s)`; None unless the FLOPs and the device's peak are known.
    """

    state: TrainState
    steps: int
    final_loss: float
    validation_loss: float
    unigram_entropy: float | None
    compile_seconds: float
    train_seconds: float
    tokens_per_second: float
    mfu: float | None


def train(
    workload: Workload,
    *,
    steps: int,
    out: str | Path | None = None,
    seed: int = 0,
    eval_batches: int = 8,
    log_every: int = 1,
    accumulate: int = 1,
    clip_norm: float | None = 1.0,
    forward_flops: float | None = None,
) -> TrainResult:
    """Train a workload from its initial parameters on its own data.

    Args:
        workload: With `init`, `data` and `optimizer`.
        steps: Number of optimizer steps, at least 1.
        out: Folder for `log.jsonl`, made if missing; an old log there is replaced. One
            object a line, written at once: `step loss grad_norm tokens_per_second
            seconds`, the last counted from the first step, compiling left out.
        seed: Of the parameters and of dropout.
        eval_batches: Validation batches, at least 1.
        log_every: Steps from one line of the log to the next.
        accumulate: See `train_step_fn`.
        clip_norm: See `train_step_fn`.
        forward_flops: FLOPs of one batch's forward pass; gives the MFU where the peak
            of the attached device is known.

    Raises:
        WorkloadError: Something the loop needs is missing or out of range.
    """
    _check_positive(steps=steps, eval_batches=eval_batches, log_every=log_every)
    optimizer, data = _needed(workload, "optimizer"), _needed(workload, "data")
    # Before the long compile: there may be no text, or no way to write there.
    batches, log_file = data("train"), _log_file(out)
    state = jax.jit(functools.partial(_first_state, workload))(jax.random.key(seed))
    step = make_train_step(
        workload.loss_fn,
        optimizer,
        accumulate=accumulate,
        clip_norm=clip_norm,
    )
    began = time.perf_counter()
    compiled = step.lower(state, workload.batch).compile()
    compile_seconds = time.perf_counter() - began

    with _open_log(log_file) as log, _progress(workload.name, steps) as show:

        def report(line: Line) -> None:
            log(line)
            show(line)

        state, last = _run_steps(compiled, state, batches, steps, log_every, report)
    validation, entropy = evaluate(workload, state.params, batches=eval_batches)
    seconds = last["seconds"]
    return TrainResult(
        state=state,
        steps=steps,
        final_loss=last["loss"],
        validation_loss=validation,
        unigram_entropy=entropy,
        compile_seconds=compile_seconds,
        train_seconds=seconds,
        tokens_per_second=steps * tokens_in(workload.batch) / seconds,
        mfu=_utilisation(forward_flops, seconds / steps),
    )


def evaluate(
    workload: Workload, params: PyTree, *, batches: int
) -> tuple[float, float | None]:
    """Return the mean validation loss, and the unigram entropy of the same tokens.

    Args:
        workload: With `data`.
        params: Parameters; they stay usable.
        batches: How many validation batches to read.
    """
    loss_of = jax.jit(lambda p, batch: call_loss(workload.loss_fn, p, batch, None)[0])
    read = list(itertools.islice(_needed(workload, "data")("validation"), batches))
    loss = np.mean([float(loss_of(params, batch)) for batch in read])
    if not _has_tokens(workload.batch):
        return float(loss), None
    targets = np.concatenate([np.ravel(batch["tokens"][:, 1:]) for batch in read])
    return float(loss), unigram_entropy(targets)


def tokens_in(batch: PyTree) -> int:
    """Return how many tokens a batch predicts; without `tokens`, its leading axis.

    Example:
        >>> tokens_in({"tokens": np.zeros((4, 9), int)}), tokens_in({"x": np.zeros(3)})
        (32, 3)
    """
    if _has_tokens(batch):
        rows, length = batch["tokens"].shape
        return rows * (length - 1)
    return jax.tree.leaves(batch)[0].shape[0]


def _has_tokens(batch: PyTree) -> bool:
    return (
        isinstance(batch, dict) and len(getattr(batch.get("tokens"), "shape", ())) == 2
    )


def _first_state(workload: Workload, rng: jax.Array) -> TrainState:
    params_rng, state_rng = jax.random.split(rng)
    params = _needed(workload, "init")(params_rng)
    return TrainState.create(params, _needed(workload, "optimizer"), state_rng)


def _run_steps(
    step: Callable[..., Any],
    state: TrainState,
    batches: Iterator[PyTree],
    steps: int,
    log_every: int,
    report: Report,
) -> tuple[TrainState, Line]:
    """Return the last state and the last line reported."""
    line: Line = {}
    began = previous = time.perf_counter()
    for number in range(1, steps + 1):
        batch = next(batches)
        state, metrics = step(state, batch)
        if number % log_every and number != steps:
            continue
        loss, grad_norm = float(metrics["loss"]), float(metrics["grad_norm"])
        now = time.perf_counter()
        since = number - line.get("step", 0)
        line = {
            "step": number,
            "loss": loss,
            "grad_norm": grad_norm,
            "tokens_per_second": since * tokens_in(batch) / (now - previous),
            "seconds": now - began,
        }
        previous = now
        report(line)
    return state, line


def _utilisation(forward_flops: float | None, step_seconds: float) -> float | None:
    """Return the share of the device's peak that the model's own FLOPs come to.

    The backward pass takes two products for each of the forward; recomputed ones are
    not the model's (Chowdhery et al., arXiv:2204.02311, appendix B).
    """
    peak = (active_device() or get_device("attached")).peak_flops_per_second
    if forward_flops is None or peak is None:
        return None
    return 3 * forward_flops / (step_seconds * peak)


def _log_file(out: str | Path | None) -> Path | None:
    """Return `out/log.jsonl`, made empty; None without `out`."""
    if out is None:
        return None
    path = Path(out) / "log.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    except OSError as error:
        raise WorkloadError(
            f"`out={out}` cannot be written: {error.strerror}. Give a folder, which is "
            "made if it is missing."
        ) from None
    return path


@contextlib.contextmanager
def _open_log(path: Path | None) -> Iterator[Report]:
    """Give a function that writes one line of the log, at once."""
    if path is None:
        yield lambda line: None
        return
    with path.open("w", encoding="utf-8", buffering=1) as file:
        yield lambda line: print(json.dumps(line), file=file)


@contextlib.contextmanager
def _progress(name: str, steps: int) -> Iterator[Report]:
    """Give a function that moves a bar on stderr; silent without a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    with bar:
        task = bar.add_task(name, total=steps, loss=float("nan"), rate=0.0)

        def show(line: Line) -> None:
            bar.update(
                task,
                completed=line["step"],
                loss=line["loss"],
                rate=line["tokens_per_second"],
            )

        yield show


def _check_positive(**settings: int) -> None:
    for name, value in settings.items():
        if value < 1:
            raise WorkloadError(f"`{name}={value}` must be at least 1.")


def _needed(workload: Workload, name: str) -> Any:
    """Return a field of the workload that `train` cannot do without."""
    value = getattr(workload, name)
    if value is None:
        raise WorkloadError(
            f"Workload `{workload.name}` has no `{name}`; `train` needs `init`, `data` "
            "and `optimizer`. One with its own `make_step` needs its own loop."
        )
    return value
