"""A chain traced for given arrays: one program for each different stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from flax.errors import FlaxError

from jaxckpt import _jax
from jaxckpt.errors import WorkloadError
from jaxckpt.executor.stage import Stage, identity, stage_key
from jaxckpt.graph.gradient import abstract, is_inexact_type
from jaxckpt.graph.structure import structure_key
from jaxckpt.layers_body import Flat, as_arrays, strong
from jaxckpt.layers_tape import Tape
from jaxckpt.policy import Policy
from jaxckpt.policy_algebra import Everything
from jaxckpt.remat import refuse_callbacks, remat_jaxpr

PyTree = Any
_USERS_ERRORS = (TypeError, ValueError, AttributeError, LookupError, FlaxError)


@dataclass(frozen=True, eq=False)
class StageProgram:
    """One stage: `consts, state, layer -> after, aux`, all flat.

    Attributes:
        closed: Its closed jaxpr.
        consts: Which of the chain's shared arrays are its first inputs.
        num_state: Number of arrays of its input state.
        num_after: Number of arrays of the state it returns.
        takes_key: Whether the last input is a random key of its own; before it come
            the parameters.
        aux_tree: Structure of its auxiliary output.
        label: How to call it in errors.
    """

    closed: Any
    consts: tuple[int, ...]
    num_state: int
    num_after: int
    takes_key: bool
    aux_tree: Any
    label: str
    _tapes: dict[Any, Tape] = field(default_factory=dict)

    @property
    def inputs(self) -> list[Any]:
        """Types of the inputs."""
        return [v.aval for v in _jax.open_jaxpr(self.closed).invars]

    @property
    def results(self) -> list[Any]:
        """Types of the results."""
        return [v.aval for v in _jax.open_jaxpr(self.closed).outvars]

    @property
    def state(self) -> list[Any]:
        """Types of the input state."""
        first = len(self.consts)
        return self.inputs[first : first + self.num_state]

    @property
    def params(self) -> list[Any]:
        """Types of the parameters."""
        first = len(self.consts) + self.num_state
        return self.inputs[first : len(self.inputs) - self.takes_key]

    def run(self, consts: Flat, state: Flat, layer: Flat) -> tuple[Flat, Flat]:
        """Run the stage.

        Args:
            consts: What it takes of the chain's shared arrays.
            state: What the stage takes.
            layer: Its parameters, and its key if it takes one.
        """
        flat = _jax.jaxpr_function(self.closed)
        results = as_arrays(flat(*consts, *state, *layer))
        return results[: self.num_after], results[self.num_after :]

    def split_gradients(
        self, found: Flat, wrt_consts: Sequence[bool]
    ) -> tuple[list[tuple[int, Any]], Flat, Flat]:
        """Return a tape's gradients by what they are of.

        Args:
            found: What the backward run of a tape returns.
            wrt_consts: Which of the chain's shared arrays are differentiated.

        Returns:
            Pairs of the position of a shared array and its cotangent; cotangents of the
            state; those of the parameters.
        """
        positions = [p for p in self.consts if wrt_consts[p]]
        behind = len(positions) + sum(map(is_inexact_type, self.state))
        shared = list(zip(positions, found, strict=False))
        return shared, found[len(positions) : behind], found[behind:]

    def consts_of(self, consts: Sequence[Any]) -> list[Any]:
        """Return what the stage takes of the chain's shared arrays."""
        return [consts[i] for i in self.consts]

    def tape(
        self, policy: Policy, consts: Sequence[bool], params: Sequence[bool]
    ) -> Tape:
        """Return the tape of a policy.

        Args:
            policy: What is kept besides the input; everything is a plain `jax.vjp`.
            consts: Which of the chain's shared arrays are differentiated.
            params: Which of the stage's parameters are.
        """
        wrt = (
            *self.consts_of(consts),
            *map(is_inexact_type, self.state),
            *params,
            *[False] * self.takes_key,
        )
        if (policy, wrt) not in self._tapes:
            split = len(self.consts), self.num_state
            fn = self._under(policy)
            self._tapes[policy, wrt] = Tape(fn, self.inputs, split, wrt, None)
        return self._tapes[policy, wrt]

    def _under(self, policy: Policy) -> Any:
        if isinstance(policy, Everything):
            flat = _jax.jaxpr_function(self.closed)
        else:
            flat = remat_jaxpr(self.closed, policy, label=self.label, prevent_cse=True)

        def fn(consts: Flat, state: Flat, layer: Flat) -> tuple[Flat, Flat]:
            return as_arrays(flat(*consts, *state, *layer)), []

        return fn


@dataclass(frozen=True)
class TracedChain:
    """A chain, traced.

    Attributes:
        programs: One for each stage; equal stages share it.
        consts: The arrays that stages share: closed-over ones and keywords.
        state: x0, flat.
        result_tree: Structure of the state that the last stage returns.
    """

    programs: tuple[StageProgram, ...]
    consts: Flat
    state: Flat
    result_tree: Any


def trace_chain(
    stages: Sequence[Stage],
    params: Sequence[PyTree],
    x: PyTree,
    rng: Any,
    shared: Mapping[str, PyTree],
    *,
    has_aux: bool,
) -> TracedChain:
    """Trace a chain stage by stage, each different one once.

    Args:
        stages: The stages.
        params: Their parameters; abstract arrays will do.
        x: x0.
        rng: None, or the key of the chain.
        shared: Keywords that stages take.
        has_aux: Whether each stage returns `(state, aux)`.

    Raises:
        WorkloadError: A stage does not take what the one before it returns, returns no
            pair where `has_aux`, or calls `io_callback`.
    """
    tracer = _Tracer(rng, shared, has_aux)
    leaves, tree = jax.tree.flatten(x)
    leaves = [strong(leaf) for leaf in leaves]
    state, programs = [abstract(leaf) for leaf in leaves], []
    for number, (stage, own) in enumerate(zip(stages, params, strict=True)):
        program, tree = tracer.trace(stage, own, state, tree, number)
        programs.append(program)
        state = [_jax.abstract_array(t) for t in program.results[: program.num_after]]
    return TracedChain(tuple(programs), tracer.consts, leaves, tree)


class _Tracer:
    """Traces stages; knows the ones that it has traced."""

    def __init__(self, rng: Any, shared: Mapping[str, PyTree], has_aux: bool) -> None:
        self.rng = rng
        self.has_aux = has_aux
        self.consts: Flat = []
        self._shared = {
            name: jax.tree.map(self._const, tree) for name, tree in shared.items()
        }
        self._traced: dict[Any, tuple[StageProgram, Any]] = {}
        self._equal: dict[Any, StageProgram] = {}

    def trace(
        self, stage: Stage, params: PyTree, state: Flat, tree: Any, number: int
    ) -> tuple[StageProgram, Any]:
        """Return a stage's program, and the structure of the state behind it."""
        leaves, params_tree = jax.tree.flatten(params)
        types = tuple(map(jax.typeof, [*state, *leaves]))
        key = identity(stage.fn), stage.names, params_tree, tree, types
        if key not in self._traced:
            self._traced[key] = self._trace(stage, params, state, tree, number)
        return self._traced[key]

    def _trace(
        self, stage: Stage, params: PyTree, state: Flat, tree: Any, number: int
    ) -> tuple[StageProgram, Any]:
        shared = {n: v for n, v in self._shared.items() if stage.takes(n)}
        positions, shared_tree = jax.tree.flatten(shared)
        leaves, params_tree = jax.tree.flatten(params)
        takes_key = self.rng is not None and stage.takes("rng")
        found: list[Any] = []

        def flat(*values: Any) -> Flat:
            rest = list(values)
            given = shared_tree.unflatten(_taken(rest, len(positions)))
            x = tree.unflatten(_taken(rest, len(state)))
            own = params_tree.unflatten(_taken(rest, len(leaves)))
            result = stage(own, x, rest[0] if takes_key else None, given)
            after, aux = _pair(result, stage, self.has_aux)
            after_leaves, after_tree = jax.tree.flatten(after)
            aux_leaves, aux_tree = jax.tree.flatten(aux)
            found.append((len(after_leaves), after_tree, aux_tree))
            return [*map(strong, after_leaves), *aux_leaves]

        inputs = [*(self.consts[i] for i in positions), *state, *leaves]
        if takes_key:
            inputs.append(stage_key(self.rng, number))
        closed = self._jaxpr(flat, inputs, stage, state, tree, number)
        refuse_callbacks(closed, stage.label)
        closed, closed_over = _jax.constants_as_inputs(closed)
        consts = (*map(self._const, closed_over), *positions)
        num_after, after_tree, aux_tree = found[-1]
        program = StageProgram(
            closed, consts, len(state), num_after, takes_key, aux_tree, stage.label
        )
        same = structure_key(closed), consts, len(state), num_after, aux_tree, takes_key
        return self._equal.setdefault(same, program), after_tree

    def _jaxpr(
        self, flat: Any, inputs: Flat, stage: Stage, state: Flat, tree: Any, number: int
    ) -> Any:
        try:
            return jax.make_jaxpr(flat)(*map(abstract, inputs))
        except _USERS_ERRORS as error:
            if isinstance(error, WorkloadError):
                raise
            types = tree.unflatten([jax.typeof(s).str_short() for s in state])
            giver = f"what stage {number - 1} returns" if number else "the chain's x"
            raise WorkloadError(
                f"{stage.label} fails with {giver}, `{types}`{self._keywords(stage)}: "
                f"{str(error).splitlines()[0]}"
            ) from error

    def _keywords(self, stage: Stage) -> str:
        """Return what a stage gets by keyword, as text."""
        names = [f"`{name}`" for name in self._shared if stage.takes(name)]
        if self.rng is not None and stage.takes("rng"):
            names.append("`rng`")
        elif stage.names is not None and stage.takes("rng"):
            names.append("no `rng` (the chain got none)")
        return f", and {', '.join(names)}" if names else ""

    def _const(self, array: Any) -> int:
        """Return the position of a shared array; one given twice is there once."""
        for number, known in enumerate(self.consts):
            if known is array:
                return number
        self.consts.append(array)
        return len(self.consts) - 1


def _taken(values: list[Any], count: int) -> list[Any]:
    """Take the first values off a list."""
    taken, values[:] = values[:count], values[count:]
    return taken


def _pair(result: Any, stage: Stage, has_aux: bool) -> tuple[PyTree, PyTree]:
    if not has_aux:
        return result, None
    if not isinstance(result, tuple) or len(result) != 2:
        raise WorkloadError(
            f"{stage.label} returned no pair. With `has_aux=True` each stage returns "
            "two things: the next state, and its auxiliary output (which may be None)."
        )
    return result
