"""What a chain is made of, and what can become of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """One way to keep something of a stage.

    Attributes:
        bytes: What is kept, its input with it where that is read again.
        seconds: What runs again for its backward pass.
        work_bytes: What that and the backward pass hold besides, the gradients of the
            stage's own parameters with it.
    """

    bytes: int
    seconds: float
    work_bytes: int = 0


@dataclass(frozen=True)
class Link:
    """One stage of a chain.

    Attributes:
        input_bytes: Of its input.
        forward_seconds: What one forward run takes.
        work_bytes: What its backward pass holds where it is reversed right after its
            forward run: its residuals, its input with them, scratch, and the gradients
            of its own parameters.
        run_bytes: What a forward run holds besides.
        options: What can be kept of it besides its input alone.
        gradient_bytes: Of its parameters' gradients, which stay to the end once the
            stage has been reversed. Its own work counts as no less than that.
    """

    input_bytes: int
    forward_seconds: float
    work_bytes: int
    run_bytes: int = 0
    options: tuple[Option, ...] = ()
    gradient_bytes: int = 0

    @property
    def backward_bytes(self) -> int:
        """What being reversed right after its forward run takes."""
        return max(self.work_bytes, self.gradient_bytes)

    def option_backward_bytes(self, option: Option) -> int:
        """Return what being reversed from an option takes besides what it keeps."""
        return max(option.work_bytes, self.gradient_bytes)


@dataclass(frozen=True)
class KeepOption:
    """A stage that keeps what an option says.

    Attributes:
        stage: Its number.
        option: The number of the option.
    """

    stage: int
    option: int


@dataclass(frozen=True)
class ReverseNow:
    """A stage that is reversed right after its forward run.

    Attributes:
        stage: Its number.
    """

    stage: int


@dataclass(frozen=True)
class RunAgain:
    """Stages of which the first one's input stays; they run again as `children` say.

    Attributes:
        start: The first stage.
        stop: The stage behind the last.
        children: What becomes of them in the second run.
    """

    start: int
    stop: int
    children: tuple[Decision, ...]


Decision = KeepOption | ReverseNow | RunAgain


def peak_bytes(links: Sequence[Link], decisions: Sequence[Decision]) -> int:
    """Return the most bytes that decisions hold at once, to the byte.

    Example:
        >>> link = Link(4, 1.0, 6, options=(Option(5, 0.0, work_bytes=2),))
        >>> peak_bytes([link, link], [KeepOption(0, 0), ReverseNow(1)])
        11
    """
    peak = gradients = 0
    # The backward pass meets them last to first; what those before keep comes on top.
    for one in reversed(decisions):
        if isinstance(one, RunAgain):
            part = links[one.start : one.stop]
            running = max(link.run_bytes for link in part)
            again = gradients + peak_bytes(links, one.children)
            peak = max(part[0].input_bytes + max(peak, running), again)
            gradients += sum(link.gradient_bytes for link in part)
            continue
        link = links[one.stage]
        if isinstance(one, KeepOption):
            option = link.options[one.option]
            backward = gradients + link.option_backward_bytes(option)
            peak = option.bytes + max(peak, link.run_bytes, backward)
        else:
            peak = link.backward_bytes
        gradients += link.gradient_bytes
    return peak
