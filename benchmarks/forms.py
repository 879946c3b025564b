"""Which form of a stack takes the least memory? The table behind `run_layers`' rule.

python -m benchmarks.forms [--workload models/llama.py:llama3_1b] [--device h100-80gb]
"""

from __future__ import annotations

import argparse
import functools
import sys

from rich.console import Console

from jaxckpt.devices import get_device
from jaxckpt.errors import JaxckptError
from jaxckpt.layers import FORMS
from jaxckpt.loading import load_workload
from jaxckpt.stack import use
from jaxckpt.xla.measure import Measurement, measure_workload

LIGHT = "query_proj, key_proj, value_proj, context, context_lse, out_proj"
HEAVY = f"{LIGHT}, mlpwi_0, mlpwi_1"
SCHEDULES = {
    "none": "none",
    "full": "full",
    "every(4)": "every(4)",
    "nested(4, 2)": "nested(4, 2)",
    "remat_every(2)": "remat_every(2)",
    "A": f"uniform(save({LIGHT}))",
    "12 x A, 4 x B": f"Remat(save({LIGHT}), 12), Remat(save({HEAVY}), 4)",
    "4 x B, 12 x A": f"Remat(save({HEAVY}), 4), Remat(save({LIGHT}), 12)",
}


def measure_form(
    workload: str, settings: list[str], device: str, schedule: str, form: str | None
) -> Measurement:
    """Measure 16 layers under a schedule, in a form or the default one."""
    extra = [*settings, "scan=False"] if form == "unrolled" else settings
    load = functools.partial(load_workload, workload, extra)
    with use(schedule, form=form):
        return measure_workload(load, device=get_device(device), schedule=schedule)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", default="models/llama.py:llama3_1b")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--device", default="h100-80gb")
    parser.add_argument("--form", action="append", choices=FORMS, dest="forms")
    given = parser.parse_args()
    forms = [None, *(given.forms or FORMS)]
    console = Console(stderr=True)
    print(f"{given.workload} {' '.join(given.settings)} on {given.device}, peak GiB")
    print(f"A keeps {LIGHT};\nB keeps mlpwi_0 and mlpwi_1 too.\n")
    print("| schedule | " + " | ".join(form or "by default" for form in forms) + " |")
    print("|---" + "|---:" * len(forms) + "|")
    for name, schedule in SCHEDULES.items():
        cells = []
        for form in forms:
            with console.status(f"compiling {name}, {form or 'by default'}"):
                found = measure_form(
                    given.workload, given.settings, given.device, schedule, form
                )
            cells.append(f"{found.peak_bytes / 2**30:.2f}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    try:
        main()
    except JaxckptError as error:
        sys.exit(f"error: {error}")
