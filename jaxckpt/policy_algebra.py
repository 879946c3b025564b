"""The records behind every policy, and their algebra.

`p | q` is associative with identity `save_nothing()`, and idempotent; `p - q` never
keeps more than p. The functions that users call to build policies are in `policy.py`.
"""

from __future__ import annotations

import enum
import fnmatch
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxckpt import _jax
from jaxckpt.errors import PolicyError
from jaxckpt.matmul import find_matmul


class Decision(enum.Enum):
    """What happens to a value between the forward and the backward pass."""

    SAVE = "save"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class Candidate:
    """What a policy is told about a value that could be kept.

    Attributes:
        name: The name that `checkpoint_name` gave it, if any.
        dot: `"batched"` or `"unbatched"` for the result of a matmul-like operation (or
            of a `custom_vjp` call that contains one, as fused attention), else None.
        bytes: Its size on one device.
        label: How it is called where it has no name: its module path (or function) and
            operation, `mlp/dot_general`. A pattern with a `/` in it matches labels too.
    """

    name: str | None
    dot: str | None
    bytes: int
    label: str | None = None

    def matches(self, pattern: str) -> bool:
        """Return whether a name pattern means this value."""
        if self.name is not None:
            return matches(pattern, self.name)
        return (
            "/" in pattern and self.label is not None and matches(pattern, self.label)
        )


Choice = dict[int, Decision]
SameData = Callable[[int], Iterable[int]]


@dataclass(frozen=True)
class Policy:
    """Base of all policies. Combine them with `|` and `-`; build them by functions.

    `p | q` is p's decision unless that is RECOMPUTE, then q's. `p - q` is p, but what q
    keeps is recomputed, together with everything that is the same data.

    Example:
        >>> from jaxckpt.policy import parse_policy, save, save_dots
        >>> policy = save("query_proj", "mlpwi*") | save_dots(batch_dims=False)
        >>> str(policy)
        'save(query_proj, mlpwi*) | save_dots(batch_dims=False)'
        >>> parse_policy(str(policy)) == policy
        True
    """

    by_name: ClassVar[bool] = False
    """Whether the decision depends on names alone."""

    def __or__(self, other: Policy) -> Policy:
        """Return the policy that keeps what either keeps, self first."""
        return Or(self, _checked(other))

    def __sub__(self, other: Policy) -> Policy:
        """Return self without what `other` keeps."""
        return Minus(self, _checked(other))

    def decide(self, candidate: Candidate) -> Decision:
        """Return the decision for a value looked at alone."""
        raise NotImplementedError

    def choose(self, candidates: Sequence[Candidate], same_data: SameData) -> Choice:
        """Return the decisions other than RECOMPUTE for all values of a program.

        Args:
            candidates: Every value that could be kept.
            same_data: Indices of the values that hold the data of value `i` (behind a
                name, convert, transpose, reshape, broadcast or sharding constraint).
        """
        decisions = ((i, self.decide(c)) for i, c in enumerate(candidates))
        return {i: d for i, d in decisions if d is not Decision.RECOMPUTE}

    def offloads(self) -> bool:
        """Return whether any value can go to host memory."""
        return False

    def patterns(self) -> tuple[str, ...]:
        """Return the name patterns that must match a value."""
        return ()

    def excluded_patterns(self) -> tuple[str, ...]:
        """Return the name patterns behind a `-`, which must name something."""
        return ()

    def optional_patterns(self) -> tuple[tuple[str, ...], ...]:
        """Return groups of patterns of which one in each group must match."""
        return ()

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        """Answer JAX's question about one equation (its `policy=` signature).

        Raises:
            PolicyError: Where JAX's per-equation question cannot express the policy.
        """
        self._check_expressible()
        candidate = _candidate_of(primitive, avals, params, self._reads_bytes())
        decision = self.decide(candidate)
        if decision is Decision.SAVE:
            return _jax.SAVEABLE
        if decision is Decision.OFFLOAD:
            return _jax.offloadable("device", "pinned_host")
        return _jax.RECOMPUTE

    def _check_expressible(self) -> None:
        if _jax.remat3_enabled() and not self._seen_by_remat3():
            raise PolicyError(
                f"`{self}` decides about values without a name, which JAX_REMAT3 never "
                "asks a bare policy about. Use `jaxckpt.remat(target, policy=...)`."
            )

    def _seen_by_remat3(self) -> bool:
        return self.by_name

    def _reads_bytes(self) -> bool:
        return False


@dataclass(frozen=True)
class Names(Policy):
    """Keep (or offload) the values whose name matches a pattern."""

    names: tuple[str, ...]
    decision: Decision = Decision.SAVE
    by_name: ClassVar[bool] = True

    def decide(self, candidate: Candidate) -> Decision:
        kept = any(map(candidate.matches, self.names))
        return self.decision if kept else Decision.RECOMPUTE

    def offloads(self) -> bool:
        return self.decision is Decision.OFFLOAD

    def patterns(self) -> tuple[str, ...]:
        return self.names

    def __str__(self) -> str:
        return f"{self.decision.value}({', '.join(map(_quoted, self.names))})"


@dataclass(frozen=True)
class Dots(Policy):
    """Keep (or offload) the results of matmul-like operations."""

    batch_dims: bool = True
    decision: Decision = Decision.SAVE

    def decide(self, candidate: Candidate) -> Decision:
        dot = candidate.dot
        kept = dot == "unbatched" or (dot == "batched" and self.batch_dims)
        return self.decision if kept else Decision.RECOMPUTE

    def offloads(self) -> bool:
        return self.decision is Decision.OFFLOAD

    def __str__(self) -> str:
        arguments = "" if self.batch_dims else "batch_dims=False"
        return f"{self.decision.value}_dots({arguments})"


@dataclass(frozen=True)
class Everything(Policy):
    """Keep every value."""

    def decide(self, candidate: Candidate) -> Decision:
        return Decision.SAVE

    def __str__(self) -> str:
        return "save_everything()"


@dataclass(frozen=True)
class Nothing(Policy):
    """Keep no value."""

    by_name: ClassVar[bool] = True

    def decide(self, candidate: Candidate) -> Decision:
        return Decision.RECOMPUTE

    def __str__(self) -> str:
        return "save_nothing()"


@dataclass(frozen=True)
class LargerThan(Policy):
    """Keep the values of more than `bytes` bytes."""

    bytes: int

    def decide(self, candidate: Candidate) -> Decision:
        kept = candidate.bytes > self.bytes
        return Decision.SAVE if kept else Decision.RECOMPUTE

    def _reads_bytes(self) -> bool:
        return True

    def __str__(self) -> str:
        return f"save_larger_than({self.bytes}B)"


@dataclass(frozen=True)
class Pair(Policy):
    """Two policies, combined."""

    left: Policy
    right: Policy

    def offloads(self) -> bool:
        return self.left.offloads() or self.right.offloads()

    def patterns(self) -> tuple[str, ...]:
        return self.left.patterns() + self.right.patterns()

    def excluded_patterns(self) -> tuple[str, ...]:
        return self.left.excluded_patterns() + self.right.excluded_patterns()

    def optional_patterns(self) -> tuple[tuple[str, ...], ...]:
        return self.left.optional_patterns() + self.right.optional_patterns()

    @property
    def by_name(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.left.by_name and self.right.by_name

    def _reads_bytes(self) -> bool:
        return self.left._reads_bytes() or self.right._reads_bytes()

    def _check_expressible(self) -> None:
        super()._check_expressible()
        self.left._check_expressible()
        self.right._check_expressible()


@dataclass(frozen=True)
class Or(Pair):
    """`left | right`."""

    def decide(self, candidate: Candidate) -> Decision:
        decision = self.left.decide(candidate)
        if decision is not Decision.RECOMPUTE:
            return decision
        return self.right.decide(candidate)

    def choose(self, candidates: Sequence[Candidate], same_data: SameData) -> Choice:
        right = self.right.choose(candidates, same_data)
        return right | self.left.choose(candidates, same_data)

    def __str__(self) -> str:
        right = f"({self.right})" if isinstance(self.right, Or) else str(self.right)
        return f"{self.left} | {right}"


@dataclass(frozen=True)
class Minus(Pair):
    """`left - right`."""

    def offloads(self) -> bool:
        return self.left.offloads()

    def patterns(self) -> tuple[str, ...]:
        return self.left.patterns()

    def excluded_patterns(self) -> tuple[str, ...]:
        return super().excluded_patterns() + self.right.patterns()

    def decide(self, candidate: Candidate) -> Decision:
        if self.right.decide(candidate) is not Decision.RECOMPUTE:
            return Decision.RECOMPUTE
        return self.left.decide(candidate)

    def choose(self, candidates: Sequence[Candidate], same_data: SameData) -> Choice:
        chosen = self.left.choose(candidates, same_data)
        excluded = {
            j for i in self.right.choose(candidates, same_data) for j in same_data(i)
        }
        return {i: d for i, d in chosen.items() if i not in excluded}

    def _check_expressible(self) -> None:
        super()._check_expressible()
        if not self.by_name:
            raise PolicyError(
                f"`{self}` cannot be a bare JAX policy: JAX asks about one equation at "
                "a time, so the un-named producer of an excluded value would stay. Use "
                "`jaxckpt.remat(target, policy=...)`, which sees the whole layer."
            )

    def __str__(self) -> str:
        left = f"({self.left})" if isinstance(self.left, Or) else str(self.left)
        right = f"({self.right})" if isinstance(self.right, Pair) else str(self.right)
        return f"{left} - {right}"


@dataclass(frozen=True)
class Recipe(Policy):
    """A policy under another tool's name; its names are optional, one must match."""

    label: str
    body: Policy

    def decide(self, candidate: Candidate) -> Decision:
        return self.body.decide(candidate)

    def choose(self, candidates: Sequence[Candidate], same_data: SameData) -> Choice:
        return self.body.choose(candidates, same_data)

    @property
    def by_name(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.body.by_name

    def offloads(self) -> bool:
        return self.body.offloads()

    def optional_patterns(self) -> tuple[tuple[str, ...], ...]:
        names = self.body.patterns()
        return (names,) if names else ()

    def _check_expressible(self) -> None:
        self.body._check_expressible()

    def __str__(self) -> str:
        return self.label


def matches(pattern: str, name: str) -> bool:
    """Return whether a glob pattern matches a whole name, case counting."""
    return fnmatch.fnmatchcase(name, pattern)


def _checked(other: Any) -> Policy:
    if not isinstance(other, Policy):
        raise TypeError(
            f"A policy combines with another policy only, not with `{other!r}`. For "
            '"no remat at all" use `policy=None` alone.'
        )
    return other


def _quoted(name: str) -> str:
    return (
        name
        if re.fullmatch(r"[\w.*?\[\]!:/@-]+", name)
        else json.dumps(name, ensure_ascii=False)
    )


def _candidate_of(
    primitive: Any, avals: Sequence[Any], params: Any, with_bytes: bool
) -> Candidate:
    """Describe the result of an equation from what JAX tells a bare policy."""
    matmul = find_matmul(primitive.name)
    dot = None
    if matmul:
        dot = "batched" if matmul.batched(avals, params) else "unbatched"
    name = params["name"] if primitive.name == "name" else None
    size = _result_bytes(primitive, avals, params) if with_bytes else 0
    return Candidate(name, dot, size)


def _result_bytes(primitive: Any, avals: Sequence[Any], params: Any) -> int:
    results, _ = primitive.abstract_eval(*avals, **params)
    results = results if primitive.multiple_results else [results]
    return max(_jax.nbytes(aval) for aval in results)
