"""The errors that users see: each says what was given, the rule, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class JaxckptError(Exception):
    """Base of every error that jaxckpt raises about a user's input or program."""


class PolicyError(JaxckptError, ValueError):
    """A policy that cannot be parsed, expressed or matched to the program."""


class ScheduleError(JaxckptError, ValueError):
    """A schedule that cannot be parsed, or does not suit the number of layers."""


class PlanError(JaxckptError, ValueError):
    """A plan that does not suit the program it is made for or applied to."""


class WorkloadError(JaxckptError, ValueError):
    """A workload that cannot be found, called or traced."""


class BudgetError(JaxckptError, ValueError):
    """A byte budget that no plan fits, or an amount that is none.

    Attributes:
        least_feasible_bytes: The least budget that has a plan; None where the error is
            about the amount.
        holders: Who holds these bytes: (label, bytes), the largest first.
        remedies: What would lower them, one sentence each.
    """

    def __init__(
        self,
        message: str,
        *,
        least_feasible_bytes: int | None = None,
        holders: tuple[tuple[str, int], ...] = (),
        remedies: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.least_feasible_bytes = least_feasible_bytes
        self.holders = holders
        self.remedies = remedies


class DeviceError(JaxckptError, ValueError):
    """A device that is unknown, or cannot be compiled for here."""


class CompileError(JaxckptError, RuntimeError):
    """The compiler failed, crashed, hung or ran out of memory in its own process."""


def did_you_mean(given: object, valid: Iterable[str]) -> str:
    """Return the sentence part that helps after a wrong name: near matches, then all.

    Example:
        >>> did_you_mean("h1000", ["h100-80gb", "h200"])
        'Did you mean `h100-80gb` or `h200`? Valid: h100-80gb, h200.'
        >>> did_you_mean("zzz", ["full", "none"])
        'Valid: full, none.'
    """
    names = sorted(valid)
    close = difflib.get_close_matches(str(given), names, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(f'`{c}`' for c in close)}? " if close else ""
    return f"{hint}Valid: {', '.join(names) if names else '(none)'}."
