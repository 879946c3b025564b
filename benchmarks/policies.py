"""What does each policy cost one workload on one device, present or not?

python -m benchmarks.policies models/gpt.py:gpt2_xl --set batch=4 --device h100-80gb
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

from rich.console import Console

from jaxckpt.devices import get_device
from jaxckpt.loading import load_workload
from jaxckpt.policy import parse_policy
from jaxckpt.report import policy_table
from jaxckpt.xla.measure import measure_workload

POLICIES = "none", "full", "dots", "dots_no_batch", "save(out_proj)"


def measure_policies(
    workload: str, settings: Sequence[str], *, device: str, policies: Sequence[str]
) -> list[dict]:
    """Return one measurement a policy, as `jaxckpt measure --json` prints it."""
    rows = []
    console = Console(stderr=True)
    for text in policies:
        policy = parse_policy(text)
        with console.status(f"compiling {workload} for {device}, policy {text}"):
            measured = measure_workload(
                functools.partial(load_workload, workload, settings, policy=policy),
                device=get_device(device),
                policy=policy,
                policy_text=text,
                label=workload,
            )
        rows.append(measured.as_json())
    return rows


def show_policies(
    workload: str,
    settings: Sequence[str],
    *,
    device: str,
    policies: Sequence[str] = POLICIES,
) -> None:
    """Measure and print the table."""
    rows = measure_policies(workload, settings, device=device, policies=policies)
    print(
        f"{workload} {' '.join(settings)} on {device}, attention {rows[0]['attention']}"
    )
    Console().print(policy_table(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", metavar="FILE:WORKLOAD")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--device", required=True)
    parser.add_argument("--policy", action="append", help=f"instead of {POLICIES}")
    given = parser.parse_args()
    policies = given.policy or POLICIES
    show_policies(
        given.workload, given.settings, device=given.device, policies=policies
    )


if __name__ == "__main__":
    main()
