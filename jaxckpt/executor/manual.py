"""`ManualCheckpoint`: a chain's passes driven by the host, one stage at a time."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxckpt import _jax
from jaxckpt.errors import ScheduleError, WorkloadError
from jaxckpt.executor.actions import Reverse, storage_of
from jaxckpt.executor.compiled import ChainPrograms
from jaxckpt.executor.cotangents import given_cotangents
from jaxckpt.executor.driven import DrivenRun
from jaxckpt.executor.keeping import kept_actions
from jaxckpt.executor.program import trace_chain
from jaxckpt.executor.stage import Stage, as_stages, check_key, check_shared
from jaxckpt.executor.storage import check_directory
from jaxckpt.graph.gradient import abstract, is_inexact_type
from jaxckpt.layers_backward import spread
from jaxckpt.layers_body import Flat, strong

PyTree = Any


class ManualCheckpoint:
    """A chain of stages whose forward and backward pass the host drives.

    Each stage is compiled for itself, equal ones once. `backward` hands out one
    stage's gradient after the other, so that the gradients need never be there all at
    once, and what the forward pass keeps may be on the host or on disk.

    `forward` begins a pass and frees what an earlier one kept. So do `close`, an
    exception in either pass, a backward pass that is left early, and the collection of
    the object.

    Args:
        stages: Functions `stage(params, x)`, which take by keyword what they name of
            `rng` and of the shared arrays; linen Modules, whose parameters are
            `variables["params"]`; nnx Modules, whose parameters are their `nnx.Param`s.
        params: One tree of parameters for each stage; None takes those of nnx Modules.
        keep: Which stage inputs the forward pass keeps: n for every n-th, stage numbers
            (stage 0 is always one), a schedule or its text, or a list of actions. What
            stands between two of them runs again together; for n and for numbers, the
            stages from the last one on keep their tapes, and do not run again.
        storage: Where: `"device"`, `"host"` or `"disk"`; tapes stay on the device. A
            list of actions says that itself.
        directory: An existing folder for the files; None for the system's place.
        has_aux: Whether each stage returns `(state, aux)`.

    Attributes:
        params: A list; a stage's item may be replaced once its gradient is there.
        actions: What the passes do; `print` it, or `draw()` its picture.

    Raises:
        WorkloadError: `stages` or `params` are none.
        ScheduleError: `keep`, `storage` or `directory` is wrong.

    Example:
        >>> def stage(w, x):
        ...     return jnp.tanh(x @ w)
        >>> chain = ManualCheckpoint([stage] * 4, [jnp.eye(2)] * 4, keep=2)
        >>> y = chain.forward(jnp.ones((1, 2)))
        >>> for number, gradient in chain.backward(jnp.ones_like(y)):
        ...     chain.params[number] -= 0.1 * gradient
        ...     print(number, gradient.shape)
        3 (2, 2)
        2 (2, 2)
        1 (2, 2)
        0 (2, 2)
        >>> chain.input_cotangent.shape
        (1, 2)
    """

    def __init__(
        self,
        stages: Sequence[Any],
        params: Sequence[PyTree] | None = None,
        *,
        keep: Any = 1,
        storage: str = "device",
        directory: Any = None,
        has_aux: bool = False,
    ) -> None:
        self._stages = as_stages(stages)
        self.actions = kept_actions(keep, len(self._stages), storage)
        check_directory(directory)
        on_disk = "disk" in map(storage_of, self.actions)
        if directory is not None and not on_disk:
            raise ScheduleError(
                f"`directory={str(directory)!r}`, and nothing is kept on disk. Leave "
                'it out, or use `storage="disk"`.'
            )
        self._directory = directory
        self._has_aux = has_aux
        self.params = _checked_params(self._stages, params)
        self._moves = set(map(storage_of, self.actions)) != {"device"}
        self._programs: dict[Any, ChainPrograms] = {}
        self._pass: tuple[DrivenRun, _Trees] | None = None
        self._finalizer: Any = None
        self._ended: tuple[PyTree, dict[str, PyTree]] | None = None

    def forward(self, x: PyTree, *, rng: Any = None, **shared: PyTree) -> Any:
        """Run the stages; return the last one's state, with `has_aux` that and all aux.

        Args:
            x: What the first stage takes.
            rng: A random key, of which each stage that takes one gets its own.
            shared: Arrays, or trees of them, that several stages take by keyword.

        Raises:
            WorkloadError: Before anything runs: a stage does not take what the one
                before it returns, or a keyword belongs to none.
            OSError: A state cannot be kept on disk.
        """
        self.close()
        self._ended = None
        _refuse_tracers((x, shared, rng))
        _checked_params(self._stages, self.params)
        check_shared(self._stages, shared)
        check_key(rng)
        x, shared = jax.tree.map(strong, (x, dict(sorted(shared.items()))))
        if self._moves and len(_devices((x, self.params))) == 1:
            # What comes back from a storage is bound to its device. Where other arrays
            # were not, each program would be compiled twice.
            x, self.params = jax.tree.map(_committed, (x, self.params))
        run, trees = self._begin(x, rng, shared)
        self._pass, self._finalizer = (run, trees), weakref.finalize(self, run.close)
        del x
        try:
            leaves = run.run_forward(self.actions)
            run.state = None
            return self._handed_out(run, leaves)
        except BaseException:
            self.close()
            raise

    def backward(
        self, cotangent: PyTree = None, aux_cotangents: Sequence[PyTree] | None = None
    ) -> Iterator[tuple[int, PyTree]]:
        """Yield each stage's number and the gradient of its parameters, last one first.

        A gradient has None for a parameter that has none (integers, keys). Once it is
        handed out, nothing here holds it, nor what the stage's parameters were.

        Args:
            cotangent: Of what `forward` returned; None is 1 for a scalar.
            aux_cotangents: With `has_aux`, of each stage's aux; None for zeros, of all
                or of a stage's.

        Raises:
            WorkloadError: There was no `forward`, or a cotangent is of another type.
            OSError: From the iteration: a state cannot be kept on disk.
        """
        if self._pass is None or self._pass[0].started:
            raise WorkloadError(
                "There is nothing to run backward. Each `backward` needs a `forward` "
                "before it that nothing has closed."
            )
        run, trees = self._pass
        flow, d_aux = given_cotangents(run.programs.chain, cotangent, aux_cotangents)
        run.started = True
        run.flow, run.d_aux = flow, d_aux
        return self._reversed(run, trees)

    @property
    def input_cotangent(self) -> PyTree:
        """The cotangent of `x`, after a whole backward pass; None for integers."""
        return self._finished()[0]

    @property
    def shared_gradients(self) -> dict[str, PyTree]:
        """Gradients of the shared arrays by keyword, after a whole backward pass.

        A keyword without floating arrays has none.
        """
        return self._finished()[1]

    def shared_arrays(self) -> list[Any]:
        """Return what several stages read in the pass that has begun."""
        return [] if self._pass is None else self._pass[0].shared_arrays

    def close(self) -> None:
        """Free what the forward pass kept, files too."""
        if self._finalizer is not None:
            self._finalizer()
        self._pass = self._finalizer = None

    def __enter__(self) -> ManualCheckpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _begin(
        self, x: PyTree, rng: Any, shared: dict[str, PyTree]
    ) -> tuple[DrivenRun, _Trees]:
        trees = _Trees(
            tuple(jax.tree.structure(tree) for tree in self.params),
            jax.tree.structure(x),
            jax.tree.structure(shared),
        )
        params = [list(map(jnp.asarray, jax.tree.leaves(t))) for t in self.params]
        leaves = iter(jax.tree.leaves(shared))
        programs = self._programs_for(x, rng, shared)
        consts = [
            next(leaves) if isinstance(const, jax.ShapeDtypeStruct) else const
            for const in programs.chain.consts
        ]
        state = jax.tree.leaves(x)
        run = DrivenRun(
            programs, self.actions, state, params, consts, rng, self._directory
        )
        return run, trees

    def _programs_for(
        self, x: PyTree, rng: Any, shared: dict[str, PyTree]
    ) -> ChainPrograms:
        """Return the chain's programs for arguments of these types."""
        given = self.params, x, shared, rng
        leaves, tree = jax.tree.flatten(given)
        key = tree, tuple(map(jax.typeof, leaves)), _jax.trace_context()
        if key not in self._programs:
            structs = jax.tree.map(abstract, shared)
            chain = trace_chain(
                self._stages, self.params, x, rng, structs, has_aux=self._has_aux
            )
            wrt = tuple(
                isinstance(c, jax.ShapeDtypeStruct) and is_inexact_type(c)
                for c in chain.consts
            )
            self._programs[key] = ChainPrograms(replace(chain, state=[]), wrt)
        return self._programs[key]

    def _handed_out(self, run: DrivenRun, leaves: Flat) -> Any:
        chain = run.programs.chain
        y = chain.result_tree.unflatten(leaves)
        if not self._has_aux:
            return y
        aux, run.aux = run.aux, []
        pairs = zip(chain.programs, aux, strict=True)
        return y, [program.aux_tree.unflatten(values) for program, values in pairs]

    def _reversed(self, run: DrivenRun, trees: _Trees) -> Iterator[tuple[int, PyTree]]:
        try:
            run.prefetch()
            for action in self.actions[self.actions.forward_length :]:
                if run.closed:
                    raise WorkloadError(
                        "This backward pass was closed, by `close` or by another "
                        "`forward`. Run it to its end before that."
                    )
                run.run_action(action)
                if isinstance(action, Reverse):
                    yield action.index, trees.gradient(run, action.index)
            if not run.closed:
                self._ended = trees.cotangents(run)
        finally:
            if self._pass is not None and run is self._pass[0]:
                self.close()

    def _finished(self) -> tuple[PyTree, dict[str, PyTree]]:
        if self._ended is None:
            raise WorkloadError(
                "There are no cotangents of `x` and of the shared arrays yet. Run the "
                "iterator of `backward` to its end."
            )
        return self._ended


@dataclass(frozen=True)
class _Trees:
    """The structures of what a pass was given."""

    params: tuple[Any, ...]
    x: Any
    shared: Any

    def gradient(self, run: DrivenRun, stage: int) -> PyTree:
        """Take the gradient of a stage out of a pass."""
        leaves = spread(run.take_gradient(), run.wrt(stage))
        return self.params[stage].unflatten(leaves)

    def cotangents(self, run: DrivenRun) -> tuple[PyTree, dict[str, PyTree]]:
        """Return those of `x` and of the shared arrays."""
        x = self.x.unflatten(run.flow)
        count = self.shared.num_leaves
        shared = self.shared.unflatten([run.d_consts.get(i) for i in range(count)])
        return x, {name: tree for name, tree in shared.items() if jax.tree.leaves(tree)}


def _checked_params(stages: Sequence[Stage], params: Any) -> list[PyTree]:
    if params is None:
        for stage in stages:
            if stage.params is None:
                raise WorkloadError(
                    f"`params=None`, and {stage.label} brings none: only nnx Modules "
                    "do. Give one tree of parameters for each stage."
                )
        return [stage.params for stage in stages]
    if isinstance(params, (str, Mapping)) or not isinstance(params, Sequence):
        raise WorkloadError(
            f"`params` is of type `{type(params).__name__}`. Give a list with one tree "
            "for each stage."
        )
    if len(params) != len(stages):
        raise WorkloadError(
            f"`params` has {len(params)} trees, and the chain {len(stages)} stages. "
            "Give one for each stage; `{}` for one without parameters."
        )
    return list(params)


def _refuse_tracers(given: PyTree) -> None:
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(given)):
        raise WorkloadError(
            "A `ManualCheckpoint` runs from the host, and was called inside `jax.jit`, "
            "`jax.grad` or the like. Use `checkpoint_chain` there."
        )


def _devices(given: PyTree) -> set[Any]:
    arrays = [x for x in jax.tree.leaves(given) if isinstance(x, jax.Array)]
    return {device for x in arrays for device in x.devices()}


def _committed(leaf: Any) -> Any:
    array = jnp.asarray(leaf)
    return jax.device_put(array, array.sharding)
