"""What the backward pass of one layer in a loop holds, by the memory model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxckpt import _jax
from jaxckpt.devices import Device
from jaxckpt.layers_body import LayerProgram
from jaxckpt.layers_tape import Tape
from jaxckpt.memory.predict import predict_step
from jaxckpt.planner.frontier import Point, frontier
from jaxckpt.planner.program import PlannedLayer

_SAMPLES = 6


def work_bytes(layer: PlannedLayer, device: Device) -> Callable[[Point], int]:
    """Return the bytes that a layer's second run and backward pass hold, by point.

    They are predicted for some points of the frontier; between them they are taken to
    change evenly with what is kept. Gradients of parameters are left out.
    """
    points = frontier(layer.costs.stage)
    chosen = np.unique(np.linspace(0, len(points) - 1, _SAMPLES).round().astype(int))
    sizes = [points[i].bytes for i in chosen]
    works = [_predicted(layer, points[i], device) for i in chosen]

    def of_point(point: Point) -> int:
        kept = point.bytes + point.host_bytes
        # What is in host memory is loaded for the layer's turn.
        return int(np.interp(kept, sizes, works)) + point.host_bytes

    return of_point


def _predicted(layer: PlannedLayer, point: Point, device: Device) -> int:
    program = LayerProgram(layer.body, layer.num_consts, layer.num_carry, "a layer")
    fn = program.under(layer.costs.policy(point.saved), prevent_cse=False)
    tape = Tape.of_layer(program, fn, layer.wrt)
    inputs = [_jax.abstract_array(x) for x in program.inputs]
    shared = layer.num_consts + layer.num_carry
    kept = [_jax.abstract_array(x) for x in tape.kept_types]
    cotangents = [_jax.abstract_array(x) for x in program.results]

    def backward(consts: Any, own: Any, kept: Any, cotangents: Any) -> Any:
        return tape.backward(consts, own, kept, cotangents)

    found = predict_step(
        backward,
        inputs[: layer.num_consts],
        inputs[shared:],
        kept,
        cotangents,
        device=device,
    )
    held = found.peak_bytes - found.argument_bytes
    return max(1, held - layer.gradient_bytes)
