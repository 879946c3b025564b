#!/usr/bin/env bash
# Predicted and real peak memory, and real step time, per policy, on the GPU of this
# machine: one table, and a JSON line for each measurement in the output folder.
#
#   benchmarks/on_gpu.sh [--out DIR] [--tiny] ...     (see `--help`)
#
# Runs from a plain checkout, without network, with JAX for CUDA, flax, optax, chex, rich
# and typer installed; it takes less than 6 minutes (`--limit` seconds).
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}"
exec "${PYTHON:-python3}" -m benchmarks.on_gpu "$@"
