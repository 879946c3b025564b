"""What does each policy cost, for several models and devices, present or not?

python -m benchmarks.policies models/gpt.py:gpt2_xl --set batch=4 --device h100-80gb
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from jaxckpt.devices import get_device
from jaxckpt.errors import JaxckptError
from jaxckpt.loading import load_workload
from jaxckpt.progress import status
from jaxckpt.report import comparison_parts, policy_markdown
from jaxckpt.report.compare import Comparison, chosen_rules, compare_policies

POLICIES = "none", "full", "dots", "dots_no_batch", "save(out_proj)"


def compare(
    workload: str,
    settings: Sequence[str],
    *,
    device: str,
    policies: Sequence[str] = (),
    schedules: Sequence[str] = (),
) -> Comparison:
    """Measure a workload under policies and schedules; by default, all known ones."""
    return compare_policies(
        lambda rule: load_workload(workload, settings, **rule.parsed()),
        chosen_rules(policies, schedules),
        get_device(device),
        label=workload,
        progress=status(),
    )


def show_policies(
    workload: str,
    settings: Sequence[str],
    *,
    device: str,
    policies: Sequence[str] = POLICIES,
    schedules: Sequence[str] = (),
    markdown: bool = False,
) -> None:
    """Measure and print the table."""
    found = compare(
        workload, settings, device=device, policies=policies, schedules=schedules
    )
    title = " ".join([workload, *settings])
    rows = found.as_json()["rows"]
    if markdown:
        print(f"\n{title} on {device}:\n\n{policy_markdown(rows)}")
    else:
        for part in comparison_parts(rows, title=title, device=get_device(device)):
            Console().print(part)
    for one in found.left_out:
        print(f"left out: {one.rule.label}: {one.reason}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", metavar="FILE:WORKLOAD", nargs="+")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--device", action="append", required=True, dest="devices")
    parser.add_argument("--policy", action="append", default=[], dest="policies")
    parser.add_argument("--schedule", action="append", default=[], dest="schedules")
    parser.add_argument("--markdown", action="store_true", help="for a README")
    given = parser.parse_args()
    for workload in given.workloads:
        for device in given.devices:
            show_policies(
                workload,
                given.settings,
                device=device,
                policies=given.policies,
                schedules=given.schedules,
                markdown=given.markdown,
            )


if __name__ == "__main__":
    try:
        main()
    except JaxckptError as error:
        sys.exit(f"error: {error}")
