"""`make demo`: train on real text, then compare policies on a GPU that is not here."""

from __future__ import annotations

import sys

from rich.console import Console

from benchmarks.policies import show_policies
from jaxckpt.devices import get_device, use
from jaxckpt.loading import load_workload
from jaxckpt.policy import parse_policy
from jaxckpt.report import train_table
from jaxckpt.training import train

TRAINED, STEPS, POLICY = "models/gpt.py:tiny", 100, "save(query_proj, mlpwi)"
COMPARED, SETTINGS = "models/gpt.py:gpt2_xl", ["batch=4", "seq=1024"]
DEVICE = "h100-80gb"


def main() -> None:
    if not train_below_entropy():
        sys.exit("The model has learned no more than how often each byte occurs.")
    show_policies(COMPARED, SETTINGS, device=DEVICE)


def train_below_entropy() -> bool:
    """Train; return whether the model beats one that knows the bytes' frequencies."""
    print(f"Training {TRAINED} for {STEPS} steps on Python's own library, {POLICY}")
    with use(get_device("attached")):
        workload = load_workload(TRAINED, policy=parse_policy(POLICY))
        result = train(workload, steps=STEPS)
    Console().print(train_table(result))
    assert result.unigram_entropy is not None
    return result.validation_loss < result.unigram_entropy


if __name__ == "__main__":
    main()
