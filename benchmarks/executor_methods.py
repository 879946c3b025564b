"""The methods that `executor.py` compares, and the chain that they differentiate."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxckpt import executor
from jaxckpt.executor import ActionList, ManualCheckpoint
from jaxckpt.layers import run_layers

try:
    import equinox.internal as EQUINOX  # noqa: N812
except ImportError:
    EQUINOX = None

Stage = Callable[[Any, Any], Any]
Chain = Callable[[Any, Any], Any]
Gradient = Callable[[Any, Any], Any]


def stage(params: Any, x: Any) -> Any:
    """Run one stage: params `w0 [width, hidden]`, `w1 [hidden, width]`."""
    return x + jnp.sin(x @ params["w0"]) @ params["w1"]


class Runs:
    """A counter that compiled programs increment."""

    def __init__(self) -> None:
        self.count = 0


def counted_stage(runs: Runs) -> Stage:
    """Return the stage with a count of its forward runs.

    The count hangs on the stage's input, which its residuals depend on. One that
    hangs on nothing (`jax.debug.callback`) is taken out of a scan by autodiff, and runs
    once.
    """

    def host(x: Any) -> Any:
        runs.count += 1
        return x

    @jax.custom_jvp
    def passed(x: Any) -> Any:
        return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    passed.defjvp(lambda primals, tangents: (passed(*primals), *tangents))
    return lambda params, x: stage(params, passed(x))


@dataclass(frozen=True)
class Method:
    """One way to a gradient.

    Attributes:
        name: What it is called.
        depth: Number of stages.
        make: Makes of a stage the chain `(params, x) -> y`; or, where the host drives
            it, the chain object.
        unrolled: Whether its stages stand one after another, and parameters are a list
            instead of a stack.
        actions: What it does, if it follows a list.
        compiled: Whether it is one program.
    """

    name: str
    depth: int
    make: Callable[[Stage], Any]
    unrolled: bool = False
    actions: ActionList | None = None
    compiled: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether it is what the others are compared with."""
        return self.name == PLAIN

    @property
    def plain(self) -> Method:
        """What it is compared with."""
        return Method(PLAIN, self.depth, _scan)

    def gradient(self, stage: Stage) -> Any:
        """Return `(params, x) -> (gradients, d_x)` of the sum of squares."""
        made = self.make(stage)
        if not self.compiled:
            return functools.partial(_drive, made)
        return jax.jit(jax.grad(lambda p, x: jnp.sum(made(p, x) ** 2), argnums=(0, 1)))

    def stacked(self, found: Any) -> Any:
        """Return gradients with those of the parameters as one stack."""
        gradients, d_x = found
        if self.unrolled:
            gradients = jax.tree.map(lambda *g: jnp.stack(g), *gradients)
        return gradients, d_x

    def live_states(self, stage: Stage, params: Any, x: Any) -> int:
        """Return the most bytes held when the host has a gradient, beyond the given."""
        chain = self.make(stage)
        _drive(chain, params, x)  # what compiling makes is there before it counts
        before = jax.live_arrays()  # held, so that no other array takes its `id`
        given = set(map(id, before))
        chain.params = list(params)
        y = chain.forward(x)
        held = []
        for _, gradient in chain.backward(2 * y):
            del gradient
            held.append(_new_bytes({*given, id(y)}))
        return max(held)


PLAIN = "autodiff, scan"


def _new_bytes(given: set[int]) -> int:
    return sum(a.nbytes for a in jax.live_arrays() if id(a) not in given)


def _drive(chain: ManualCheckpoint, params: Sequence[Any], x: Any) -> Any:
    """Run both passes of a chain that the host drives."""
    chain.params = list(params)
    y = chain.forward(x)
    gradients = dict(chain.backward(2 * y))
    return [gradients[i] for i in range(len(params))], chain.input_cotangent


def find_methods(depth: int, slots: int) -> list[Method]:
    """Return all methods for a depth and a number of slots."""
    return [*_of_jax(depth), *_of_run_layers(depth, slots), *_of_lists(depth, slots)]


def _of_jax(depth: int) -> list[Method]:
    return [
        Method("autodiff, unrolled", depth, _loop, unrolled=True),
        Method(PLAIN, depth, _scan),
        Method("jax.checkpoint each, scan", depth, _remat),
    ]


def _of_run_layers(depth: int, slots: int) -> list[Method]:
    part = max(2, round(depth ** (1 / 3)))
    rules = {
        "sqrt": "sqrt()",
        "nested, cube root": f"nested({part}, {part})",
        f"binomial({slots})": f"binomial({slots})",
    }
    return [
        Method(f"run_layers {name}", depth, functools.partial(_layers, rule))
        for name, rule in rules.items()
    ]


def _of_lists(depth: int, slots: int) -> list[Method]:
    binomial = executor.binomial(depth, slots)
    mixed = executor.mixed(depth, slots)
    on_device = max(1, slots // 2)
    levels = executor.two_level(depth, on_device, None, write=1.0, read=1.0)
    label = f"two_level({on_device}, any)"
    own = f"binomial({slots})"

    def listed(name: str, actions: ActionList, *, unrolled: bool) -> Method:
        form = "unrolled" if unrolled else "looped"
        make = functools.partial(_listed, actions, not unrolled)
        return Method(f"chain {name}, {form}", depth, make, unrolled, actions)

    found = [
        listed(own, binomial, unrolled=True),
        listed(own, binomial, unrolled=False),
        listed(f"mixed({slots})", mixed, unrolled=True),
        listed(f"mixed({slots})", mixed, unrolled=False),
        listed(label, levels, unrolled=True),
        Method(
            f"ManualCheckpoint {own}",
            depth,
            lambda s: ManualCheckpoint([s] * depth, [None] * depth, keep=binomial),
            unrolled=True,
            actions=binomial,
            compiled=False,
        ),
    ]
    if EQUINOX is not None:
        online = functools.partial(_equinox, slots)
        found.append(Method(f"equinox scan, {slots} checkpoints", depth, online))
    return found


def _body(stage: Stage) -> Any:
    return lambda x, params: (stage(params, x), None)


def _loop(stage: Stage) -> Chain:
    return lambda params, x: functools.reduce(lambda x, p: stage(p, x), params, x)


def _scan(stage: Stage) -> Chain:
    return lambda params, x: lax.scan(_body(stage), x, params)[0]


def _remat(stage: Stage) -> Chain:
    body = jax.checkpoint(_body(stage), prevent_cse=False)
    return lambda params, x: lax.scan(body, x, params)[0]


def _layers(rule: str, stage: Stage) -> Chain:
    return lambda params, x: run_layers(_body(stage), x, params, rule)[0]


def _listed(actions: ActionList, scan: bool, stage: Stage) -> Chain:
    if not scan:
        stages = [stage] * actions.steps
        return executor.checkpoint_chain(stages, actions, scan=False)
    repeated = [executor.repeat(stage, actions.steps)]
    chain = executor.checkpoint_chain(repeated, actions)
    return lambda params, x: chain([params], x)


def _equinox(slots: int, stage: Stage) -> Chain:
    assert EQUINOX is not None
    run = functools.partial(EQUINOX.scan, kind="checkpointed", checkpoints=slots)
    return lambda params, x: run(_body(stage), x, params)[0]


def state_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes of a state of `rows, width, hidden`."""
    rows, width, _ = sizes
    return rows * width * 4


def make_arrays(method: Method, sizes: Sequence[int]) -> tuple[Any, Any]:
    """Return parameters and x0 for a method, in float32."""
    rows, width, hidden = sizes
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "w0": jax.random.normal(keys[0], (method.depth, width, hidden)) / width**0.5,
        "w1": jax.random.normal(keys[1], (method.depth, hidden, width)) / hidden / 4,
    }
    x = jax.random.normal(keys[2], (rows, width))
    if method.unrolled:
        params = [
            jax.tree.map(lambda w, i=i: w[i], params) for i in range(method.depth)
        ]
    return params, x


def abstract_arrays(method: Method, sizes: Sequence[int]) -> tuple[Any, Any]:
    """Return what stands for the arrays of `make_arrays`."""
    return jax.eval_shape(lambda: make_arrays(method, sizes))
