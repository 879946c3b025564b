"""One pass of a chain that the host drives: actions over real arrays."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from jaxckpt import _jax
from jaxckpt.executor.actions import ActionList, Keep, Load
from jaxckpt.executor.compiled import ChainPrograms, TapedStage
from jaxckpt.executor.interpret import Interpreter, KeptTape
from jaxckpt.executor.stage import stage_key
from jaxckpt.executor.storage import DeviceStore, DiskStore, HostStore
from jaxckpt.graph.gradient import is_inexact_type
from jaxckpt.layers_backward import spread
from jaxckpt.layers_body import Flat
from jaxckpt.policy import Policy


class DrivenRun(Interpreter):
    """One forward and backward pass.

    Args:
        programs: The chain's.
        actions: What to do.
        state: x0, flat.
        params: Parameters of each stage, flat.
        consts: What stages share.
        rng: None, or the chain's key.
        directory: Where a folder for files is made.

    Attributes:
        flow: Cotangents of the state that the next reversed stage returned.
        gradient: That of the last reversed stage, until it is taken.
        d_consts: Sums so far, by position.
        d_aux: Cotangents of each stage's auxiliary output; None for zeros.
        aux: In the forward pass, each stage's auxiliary output.
        started: Whether the backward pass has begun.
        closed: Whether everything is freed.
    """

    def __init__(
        self,
        programs: ChainPrograms,
        actions: ActionList,
        state: Flat,
        params: Sequence[Flat],
        consts: Flat,
        rng: Any,
        directory: Any,
    ) -> None:
        super().__init__(state)
        self.programs = programs
        self.flow: Flat = []
        self.gradient: Flat = []
        self.d_consts: dict[int, Any] = {}
        self.d_aux: list[Flat] = []
        self.aux: list[Flat] = [[] for _ in params]
        self.started = self.closed = False
        self._params: list[Flat] = list(params)
        self._consts = consts
        self._rng = rng
        self._stores = _stores(actions, directory)
        self._reads = [
            (action.storage, action.index)
            for action in actions[actions.forward_length :]
            if isinstance(action, Load) and action.storage == "disk"
        ]

    def forward(self, start: int, stop: int, state: Flat) -> Flat:
        """Run stages forward; each state is freed when the next one is there."""
        self.state = None
        for index in range(start, stop):
            run = self.programs.forward(index)
            results = run(*self._inputs(index, state))
            state = self._split(index, results)
        return state

    def taped(self, index: int, state: Flat, policy: Policy) -> tuple[Flat, KeptTape]:
        """Run a stage forward and keep what the policy says."""
        self.state = None
        results, kept = self._stage(index, policy).forward(*self._inputs(index, state))
        return self._split(index, results), KeptTape(kept, policy)

    def backward(self, index: int, tape: KeptTape) -> None:
        """Run a stage backward; its parameters are not held from here on."""
        consts, _, layer = self._inputs(index, [])
        flow, self.flow = self.flow, []
        d_aux, self.d_aux[index] = self.d_aux[index], []
        stage = self._stage(index, tape.policy)
        found = stage.backward(consts, layer, tape.kept, flow, d_aux)
        self._params[index] = []
        program = self.programs.chain.programs[index]
        shared, flow, self.gradient = program.split_gradients(
            found, self.programs.wrt_consts
        )
        for position, value in shared:
            self._add(position, value)
        self.flow = spread(flow, [is_inexact_type(t) for t in program.state])

    def put(self, key: tuple[str, int], value: Any) -> Any:
        """Move a state or tape to a storage."""
        return self._stores[key[0]].put(value)

    def get(self, key: tuple[str, int], held: Any) -> Any:
        """Bring it back, and begin to read the next one from disk."""
        value = self._stores[key[0]].get(held)
        if self._reads and key == self._reads[0]:
            self._reads.pop(0)
            self.prefetch()
        return value

    def discard(self, key: tuple[str, int], held: Any) -> None:
        """Free a slot."""
        self._stores[key[0]].discard(held)

    def prefetch(self) -> None:
        """Begin to read what the backward pass loads next from disk."""
        held = self.slots.get(self._reads[0]) if self._reads else None
        if held is not None:
            self._stores["disk"].prefetch(held.value)

    def take_gradient(self) -> Flat:
        """Hand out the gradient of the stage that was reversed last."""
        gradient, self.gradient = self.gradient, []
        return gradient

    def close(self) -> None:
        """Free everything, files too."""
        self.closed = True
        self.state = self.tape = None
        self.slots.clear()
        self.flow, self.gradient, self.d_aux, self.aux = [], [], [], []
        self._params, self._consts, self.d_consts = [], [], {}
        for store in self._stores.values():
            store.close()

    @property
    def shared_arrays(self) -> Flat:
        """What stages share: keywords, and arrays that they close over."""
        return self._consts

    def wrt(self, index: int) -> tuple[bool, ...]:
        """Return which parameters of a stage are differentiated."""
        program = self.programs.chain.programs[index]
        return tuple(map(is_inexact_type, program.params))

    def _stage(self, index: int, policy: Policy) -> TapedStage:
        return self.programs.taped(index, policy, self.wrt(index))

    def _inputs(self, index: int, state: Flat) -> tuple[Flat, Flat, Flat]:
        program = self.programs.chain.programs[index]
        key = [stage_key(self._rng, index)] if program.takes_key else []
        layer = [*self._params[index], *key]
        return program.consts_of(self._consts), state, layer

    def _split(self, index: int, results: Flat) -> Flat:
        """Return the state among a stage's results; the forward pass keeps the rest."""
        count = self.programs.chain.programs[index].num_after
        if not self.started:
            self.aux[index] = results[count:]
        return results[:count]

    def _add(self, position: int, value: Any) -> None:
        before = self.d_consts.pop(position, None)
        self.d_consts[position] = value if before is None else _add(before, value)


@functools.partial(jax.jit, donate_argnums=0)
def _add(total: Any, value: Any) -> Any:
    return _jax.add_any(total, value)


def _stores(actions: ActionList, directory: Any) -> dict[str, DeviceStore]:
    used = {action.storage for action in actions if isinstance(action, Keep)}
    stores: dict[str, DeviceStore] = {"device": DeviceStore()}
    if "host" in used:
        stores["host"] = HostStore()
    if "disk" in used:
        stores["disk"] = DiskStore(directory)
    return stores
