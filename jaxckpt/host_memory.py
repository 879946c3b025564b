"""Optimizer state in host memory, on the device only while its leaf is updated."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax import lax
from jax.core import Tracer

from jaxckpt import _jax
from jaxckpt.devices import active_device
from jaxckpt.errors import DeviceError, WorkloadError
from jaxckpt.graph.inline import flattened

PyTree = Any

THRESHOLD_BYTES = 2**16
"""Smaller leaves stay on the device: a copy costs more in latency than it frees."""

_AHEAD = 1
"""How many leaves' copies to the device may begin before their turn."""


def to_host(tree: PyTree, *, threshold_bytes: int = THRESHOLD_BYTES) -> PyTree:
    """Return a tree with its large arrays in pinned host memory.

    Inside `jit` or outside; scalars and random keys stay where they are.

    Args:
        tree: Arrays.
        threshold_bytes: Leaves of fewer bytes stay on the device; at least 1.

    Raises:
        WorkloadError: The threshold is below 1.
        DeviceError: An array's device has no pinned host memory.

    Example:
        >>> import jax.numpy as jnp
        >>> moved = to_host({"mu": jnp.ones(2**14), "count": jnp.zeros(())})
        >>> [x.sharding.memory_kind for x in jax.tree.leaves(moved)]
        ['device', 'pinned_host']
    """
    _check_threshold(threshold_bytes)

    def move(leaf: Any) -> Any:
        if not _is_large(leaf, threshold_bytes):
            return leaf
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
            _check_devices(leaf)
        return jax.device_put(leaf, jax.memory.Space.Host)

    return jax.tree.map(move, tree)


def to_device(tree: PyTree) -> PyTree:
    """Return a tree with all its arrays in device memory.

    Parameters that live on the host have to be moved before the loss: from host
    parameters JAX makes host gradients, and it adds no host array to a device one.

    Args:
        tree: Arrays, wherever they are.

    Example:
        >>> import jax.numpy as jnp
        >>> to_device(to_host(jnp.ones(2**14))).sharding.memory_kind
        'device'
    """
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), tree)


def supports_host_memory(device: Any) -> bool:
    """Return whether a JAX device can hold arrays in pinned host memory.

    A CPU says yes; there it is the same memory and saves nothing. The devices of an
    absent chip list no memories and say no, although programs for them compile.

    Args:
        device: One of `jax.devices()`.

    Example:
        >>> supports_host_memory(jax.devices("cpu")[0])
        True
    """
    try:
        return "pinned_host" in {m.kind for m in device.addressable_memories()}
    except jax.errors.JaxRuntimeError:
        return False


def keep_on_host(
    optimizer: optax.GradientTransformation, *, threshold_bytes: int = THRESHOLD_BYTES
) -> optax.GradientTransformation:
    """Return an optimizer whose state lives in host memory between its updates.

    The update is the same operations in another order: after all gradients are there,
    one parameter's leaves of the state are copied to the device, updated and copied
    back, then the next's. So the device holds the state of few parameters at a time.
    Where one operation reads the states of all parameters (a branch or a loop, as in
    `optax.apply_if_finite` and `optax.MultiSteps`), they are there at once.

    Args:
        optimizer: Any optax transformation.
        threshold_bytes: See `to_host`.

    Raises:
        WorkloadError: The threshold is below 1; or, when an update is traced for a
            device that is here, the state is not in host memory.

    Example:
        >>> import jax.numpy as jnp
        >>> optimizer = keep_on_host(optax.adam(0.1))
        >>> state = optimizer.init({"w": jnp.ones(2**14)})
        >>> state[0].mu["w"].sharding.memory_kind
        'pinned_host'
    """
    _check_threshold(threshold_bytes)

    def init(params: PyTree) -> PyTree:
        return to_host(optimizer.init(params), threshold_bytes=threshold_bytes)

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> Any:
        _check_on_host(state, threshold_bytes)
        return _update_in_turn(optimizer, updates, state, params, threshold_bytes)

    return optax.GradientTransformation(init, update)


@dataclass(frozen=True)
class _Turn:
    """What is done while one parameter's state is on the device.

    Attributes:
        loads: Variables that are copied to the device first.
        eqns: Equations that read them and no later ones.
        outputs: Positions of the results that are there then.
    """

    loads: list[Any]
    eqns: list[Any]
    outputs: list[int]


def _update_in_turn(
    optimizer: optax.GradientTransformation,
    grads: PyTree,
    state: PyTree,
    params: PyTree,
    threshold_bytes: int,
) -> Any:
    """Return `(updates, state)`, the large leaves of the state in turn on the device.

    XLA begins copies to the device as early as it can, at the start of the step, and
    those to the host as late as it can. Barriers tie each load to what has to be over
    before it: all gradients, and the turn before the last.
    """
    traced, shape = jax.make_jaxpr(optimizer.update, return_shape=True)(
        grads, jax.eval_shape(to_device, state), params
    )
    # optax puts parts of an update that are about all leaves in a `jit` of their own.
    closed, consts = _jax.constants_as_inputs(flattened(traced, remat=False))
    jaxpr = _jax.open_jaxpr(closed)
    given = [*consts, *jax.tree.leaves((grads, state, params))]
    values = dict(zip(jaxpr.invars, given, strict=True))
    start = len(consts) + (count := len(jax.tree.leaves(grads)))
    states = jaxpr.invars[start : start + len(jax.tree.leaves(state))]
    large = [v for v in states if _is_large(v.aval, threshold_bytes)]

    results: list[Any] = [None] * len(jaxpr.outvars)
    before: list[Any] = [given[len(consts) : start]] * (1 + _AHEAD)
    for turn in _turns(jaxpr, large):
        if turn.loads:
            _load(values, turn.loads, before.pop(0))
        _run(jaxpr, turn.eqns, values)
        for position in turn.outputs:
            variable = jaxpr.outvars[position]
            result = variable.val if _is_literal(variable) else values[variable]
            if position >= count and _is_large(variable.aval, threshold_bytes):
                result = jax.device_put(result, jax.memory.Space.Host)
            results[position] = result
        if turn.loads:
            before.append([results[position] for position in turn.outputs])
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def _turns(jaxpr: Any, large: list[Any]) -> list[_Turn]:
    """Return what is done without any large leaf, then with more and more of them."""
    reads: dict[Any, frozenset[Any]] = {v: frozenset([v]) for v in large}

    def reads_of(atoms: Iterable[Any]) -> frozenset[Any]:
        variables = [a for a in atoms if not _is_literal(a)]
        return frozenset().union(*(reads.get(v, frozenset()) for v in variables))

    for eqn in jaxpr.eqns:
        reads.update(dict.fromkeys(eqn.outvars, reads_of(eqn.invars)))
    loaded: frozenset[Any] = frozenset()
    eqns, outputs = list(jaxpr.eqns), list(range(len(jaxpr.outvars)))
    turns = []
    for loads in [frozenset(), *(reads_of([v]) for v in jaxpr.outvars)]:
        new = loads - loaded
        if turns and not new:
            continue
        loaded |= new
        now = [e for e in eqns if reads_of(e.invars) <= loaded]
        there = [i for i in outputs if reads_of([jaxpr.outvars[i]]) <= loaded]
        turns.append(_Turn([v for v in large if v in new], now, there))
        eqns = [e for e in eqns if not reads_of(e.invars) <= loaded]
        outputs = [i for i in outputs if i not in there]
    return turns


def _load(values: dict[Any, Any], variables: list[Any], before: list[Any]) -> None:
    """Copy variables to the device once `before` is there."""
    held, _ = lax.optimization_barrier(([values[v] for v in variables], before))
    values.update(zip(variables, to_device(held), strict=True))


def _run(jaxpr: Any, eqns: list[Any], values: dict[Any, Any]) -> None:
    """Evaluate some equations of a jaxpr, and add what they give to `values`."""
    atoms = [a for e in eqns for a in e.invars if not _is_literal(a)]
    inputs = list(dict.fromkeys(a for a in atoms if a in values))
    outputs = [v for e in eqns for v in e.outvars]
    cut = _jax.cut_jaxpr(jaxpr, eqns, inputs, outputs)
    found = _jax.jaxpr_function(cut)(*[values[v] for v in inputs])
    values.update(zip(outputs, found, strict=True))


def _check_on_host(state: PyTree, threshold_bytes: int) -> None:
    """Raise unless the state's types say host memory, where types can say it."""
    if (device := active_device()) is not None and not device.is_attached:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if _is_large(leaf, threshold_bytes) and not _is_on_host(leaf):
            raise WorkloadError(
                f"The optimizer's state `{jax.tree_util.keystr(path)}` is in device "
                "memory; with `offload_optimizer=True` it has to begin in host memory. "
                "Use `dataclasses.replace(state, opt_state=to_host(state.opt_state))` "
                "before the first step."
            )


def _check_threshold(threshold_bytes: int) -> None:
    if threshold_bytes < 1:
        raise WorkloadError(
            f"`threshold_bytes={threshold_bytes}` is not a number of bytes. Use 1 (all "
            f"arrays move) or more, such as {THRESHOLD_BYTES}."
        )


def _check_devices(array: jax.Array) -> None:
    for device in array.sharding.device_set:
        if device.process_index == jax.process_index() and not supports_host_memory(
            device
        ):
            raise DeviceError(
                f"`{device}` has no pinned host memory, so that nothing can move there."
                " Leave the state on the device."
            )


def _is_large(leaf: Any, threshold_bytes: int) -> bool:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return False
    return math.prod(leaf.shape) * dtype.itemsize >= threshold_bytes


def _is_on_host(leaf: Any) -> bool:
    return _jax.memory_space(jax.typeof(leaf)) == "host"


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, _jax.Literal)
