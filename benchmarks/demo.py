"""`make demo`: fit a step into a budget of an absent GPU, and train under a plan."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rich.console import Console

from jaxckpt.devices import Device, get_device, use
from jaxckpt.loading import load_workload
from jaxckpt.plan import Plan
from jaxckpt.plan_file import PlanFile
from jaxckpt.planner.fit import fit_workload
from jaxckpt.progress import status
from jaxckpt.report import train_table
from jaxckpt.report.fit import fit_parts
from jaxckpt.training import train

FITTED, SETTINGS, BUDGET = "models/gpt.py:gpt2_xl", ["batch=4", "seq=1024"], "26GiB"
TRAINED, STEPS, TRAINED_BUDGET = "models/gpt.py:tiny", 100, "60MiB"
DEVICE = "h100-80gb"


def main() -> None:
    chip = get_device(DEVICE)
    show_fit(FITTED, SETTINGS, BUDGET, chip)
    plan = show_fit(TRAINED, [], TRAINED_BUDGET, chip)
    if not train_below_entropy(plan):
        sys.exit("The model has learned no more than how often each byte occurs.")


def show_fit(spec: str, settings: list[str], budget: str, device: Device) -> Plan:
    """Fit a workload and print the plan."""
    print(f"jaxckpt fit {' '.join([spec, *settings])}, {budget} on {device.name}")
    with use(device):
        workload = load_workload(spec, settings)
    result = fit_workload(workload, budget=budget, device=device, progress=status())
    for part in fit_parts(result, device):
        Console().print(part, soft_wrap=True, highlight=False)
    return result.plan


def train_below_entropy(plan: Plan) -> bool:
    """Train under a plan; say if the model beats one that knows bytes' frequencies."""
    print(f"\nTraining {TRAINED} under it, {STEPS} steps on Python's own library")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        loaded = PlanFile(str(path), Plan.load(path))
    with use(get_device("attached")):
        result = train(loaded.ruled(load_workload(TRAINED)), steps=STEPS)
    Console().print(train_table(result))
    assert result.unigram_entropy is not None
    return result.validation_loss < result.unigram_entropy


if __name__ == "__main__":
    main()
