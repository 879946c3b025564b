"""A plan file that was asked for: its path, its plan, and whether it was verified."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from jaxckpt.plan import Plan, rules_text
from jaxckpt.plan_json import load_plan
from jaxckpt.plan_verified import argument_shapes
from jaxckpt.workload import Workload


@dataclass(frozen=True)
class PlanFile:
    """A plan, and the path that it was given by.

    Attributes:
        path: The path as the user wrote it.
        plan: What the file holds.
    """

    path: str
    plan: Plan

    @property
    def schedule(self) -> str:
        """The plan's schedules as one text."""
        return rules_text(self.plan)

    def ruled(self, workload: Workload) -> Workload:
        """Return a workload whose loss function follows the plan."""
        loss_fn = self.plan.apply(workload.loss_fn)
        return dataclasses.replace(workload, loss_fn=loss_fn)

    def offloads(self) -> bool:
        """Return whether a policy in the plan moves values to the host."""
        return any(policy.offloads() for policy in self.plan.policies)

    def note(self, workload: Workload, device: str) -> str | None:
        """Return what to say where it was verified for something else, else None.

        Args:
            workload: What the plan is used for.
            device: Name of the device that it is used on.
        """
        verified = self.plan.verified
        if verified is None:
            return None
        shapes = argument_shapes(workload.params, workload.batch)
        then, now = verified.argument_shapes, shapes
        if (verified.device, then) == (device, now):
            return None
        same = then.batch == now.batch and verified.device == device
        other = " with other parameters" if same else ""
        return (
            f"`{self.path}` was verified for batch {', '.join(then.batch)} on "
            f"{verified.device}; here (batch {', '.join(now.batch)} on {device})"
            f"{other} nothing is verified."
        )


def read_plan_file(path: str | os.PathLike[str]) -> PlanFile:
    """Return the plan file at a path (see `load_plan`)."""
    return PlanFile(os.fspath(path), load_plan(path))
