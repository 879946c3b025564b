"""How long does it take to trace a model, cut it into stages and predict its step?

python -m benchmarks.tracing [--layers 12 --layers 96] [--workload models/gpt.py:tiny]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optax

from jaxckpt.errors import JaxckptError
from jaxckpt.graph.stages import stages
from jaxckpt.graph.trace import Graph, trace
from jaxckpt.loading import load_workload
from jaxckpt.memory import predict
from jaxckpt.stack import use

DEPTHS = 12, 24, 48, 96
STEPS: dict[str, Callable[[Graph], Any]] = {
    "trace": lambda graph: graph.jaxpr,
    "residuals": lambda graph: graph.residuals,
    "stages": stages,
    "predict": lambda graph: predict(graph, optimizer=optax.adamw(1e-3)),
}


def time_steps(workload: str, settings: Sequence[str]) -> dict[str, float]:
    """Return the processor seconds of each step, one after another.

    Args:
        workload: `FILE:WORKLOAD`.
        settings: `key=value` for the workload function.
    """
    loaded = load_workload(workload, settings)
    seconds = {}
    with use(None):
        graph = trace(loaded.loss_fn, loaded.params, loaded.batch)
        for name, step in STEPS.items():
            start = time.process_time()
            step(graph)
            seconds[name] = time.process_time() - start
    return seconds


def table(
    workload: str, depths: Sequence[int], settings: Sequence[str]
) -> Iterator[str]:
    """Yield the lines of a markdown table: processor seconds by depth."""
    yield "| layers | " + " | ".join(STEPS) + " |"
    yield "|---" + "|---:" * len(STEPS) + "|"
    for scan in (False, True):
        for depth in depths:
            own = [*settings, f"num_layers={depth}", f"scan={scan}"]
            seconds = time_steps(workload, own)
            cells = " | ".join(f"{seconds[name]:.2f}" for name in STEPS)
            yield f"| {depth}, {'scanned' if scan else 'unrolled'} | {cells} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", default="models/gpt.py:tiny")
    parser.add_argument("--layers", action="append", type=int, dest="depths")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    given = parser.parse_args()
    # The first trace of a process pays for what JAX loads.
    time_steps(given.workload, [*given.settings, "num_layers=1"])
    print(f"{given.workload} {' '.join(given.settings)}: processor seconds\n")
    for line in table(given.workload, given.depths or DEPTHS, given.settings):
        print(line, flush=True)


if __name__ == "__main__":
    try:
        main()
    except JaxckptError as error:
        sys.exit(f"error: {error}")
