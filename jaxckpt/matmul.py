"""The one open list of matmul-like primitives: their batch dimensions and FLOPs.

Every other module asks this list, so that a policy, a FLOP count and a report mean the
same operations by "dots". Add a primitive of your own with `register_matmul`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Avals = Sequence[Any]
Params = Mapping[str, Any]


@dataclass(frozen=True)
class Matmul:
    """How one matmul-like primitive is classified and counted.

    Attributes:
        primitive: The primitive's name in a jaxpr.
        batched: `(in_avals, params) -> bool`: whether it multiplies batches of matrices
            pairwise (attention scores do, a dense layer does not).
        flops: `(in_avals, out_avals, params) -> int`: a multiply and an add are two.
    """

    primitive: str
    batched: Callable[[Avals, Params], bool]
    flops: Callable[[Avals, Avals, Params], int]


_MATMULS: dict[str, Matmul] = {}


def register_matmul(matmul: Matmul) -> None:
    """Add a matmul-like primitive to the list, or replace its entry.

    Example:
        >>> register_matmul(Matmul("my_gemm", lambda avals, params: False,
        ...     lambda ins, outs, params: 2 * outs[0].size * ins[0].shape[-1]))
        >>> find_matmul("my_gemm").primitive
        'my_gemm'
    """
    _MATMULS[matmul.primitive] = matmul


def find_matmul(primitive: str) -> Matmul | None:
    """Return the entry of a primitive, or None where it is not matmul-like.

    Example:
        >>> find_matmul("dot_general").primitive
        'dot_general'
        >>> find_matmul("add") is None
        True
    """
    return _MATMULS.get(primitive)


def _dot_batched(avals: Avals, params: Params) -> bool:
    _, (lhs_batch, _) = params["dimension_numbers"]
    return bool(lhs_batch)


def _dot_flops(ins: Avals, outs: Avals, params: Params) -> int:
    """2 x (elements of the result) x (product of the contracted dimensions)."""
    (lhs_contract, _), _ = params["dimension_numbers"]
    contracted = math.prod(ins[0].shape[d] for d in lhs_contract)
    return 2 * outs[0].size * contracted


def _conv_flops(ins: Avals, outs: Avals, params: Params) -> int:
    """2 x (pairs of a result and a kernel element that meets a real input element).

    Zeros of padding and of a dilated input are no work: the compiler leaves them out.
    """
    numbers = params["dimension_numbers"]
    kernel = [ins[1].shape[d] for d in numbers.rhs_spec]
    sizes = [ins[0].shape[d] for d in numbers.lhs_spec[2:]]
    positions = [outs[0].shape[d] for d in numbers.out_spec[2:]]
    pairs = math.prod(map(_taps, sizes, positions, kernel[2:], *_strides(params)))
    return 2 * (outs[0].size // max(1, math.prod(positions))) * kernel[1] * pairs


def _strides(params: Params) -> tuple[Sequence[Any], ...]:
    keys = ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
    return tuple(params[key] for key in keys)


def _taps(
    size: int,
    positions: int,
    kernel: int,
    stride: int,
    padding: tuple[int, int],
    spread: int,
    dilation: int,
) -> int:
    """Count (position, kernel element) pairs of one dimension on real elements."""
    start = np.arange(positions)[:, None] * stride - padding[0]
    index = start + np.arange(kernel)[None] * dilation
    real = (index >= 0) & (index <= (size - 1) * spread) & (index % spread == 0)
    return int(real.sum())


def _ragged_flops(ins: Avals, outs: Avals, params: Params) -> int:
    """2 x (elements of the result) x k: each row meets the weights of one group only.

    In the ragged-contraction mode (the weights' gradient) each group contracts its own
    rows, so that all groups together contract each row once.
    """
    numbers = params["ragged_dot_dimension_numbers"]
    (lhs_contract, _), _ = numbers.dot_dimension_numbers
    ragged = tuple(numbers.lhs_ragged_dimensions)
    contracted = math.prod(ins[0].shape[d] for d in lhs_contract)
    result = outs[0].size
    if set(ragged) & set(lhs_contract):
        result //= ins[2].shape[-1]
    return 2 * result * contracted


def _scaled_flops(ins: Avals, outs: Avals, params: Params) -> int:
    """Block-scaled product: operands are `[batch, rows, k]`; scales cost no product."""
    return 2 * outs[0].size * ins[0].shape[-1]


def _attention_products(products: int) -> Callable[[Avals, Avals, Params], int]:
    """FLOPs of a fused attention call: `products` products of 2 b h s_q s_kv d each.

    Forward: scores and context, 2 products. Backward: scores again, and the gradients
    of probabilities, values, queries and keys, 5 products (Dao et al. 2022, section
    3.1). Counted over the whole square, causal or not, as for unfused attention.
    """

    def flops(ins: Avals, outs: Avals, params: Params) -> int:
        query, key = ins[0], ins[1]
        layout = params.get("layout", 0)
        sequence, heads = (1, 2) if layout == 0 else (2, 1)
        batch, dim = query.shape[0], query.shape[3]
        square = query.shape[sequence] * key.shape[sequence]
        return products * 2 * batch * query.shape[heads] * square * dim

    return flops


def _scaled_batched(avals: Avals, params: Params) -> bool:
    return avals[0].shape[0] > 1


def _never(avals: Avals, params: Params) -> bool:
    return False


def _always(avals: Avals, params: Params) -> bool:
    return True


for _name in ("dot_general", "scaled_dot"):
    register_matmul(Matmul(_name, _dot_batched, _dot_flops))
register_matmul(Matmul("conv_general_dilated", _never, _conv_flops))
# A grouped product is a dense layer whose weights differ by row: no pairwise batches.
register_matmul(Matmul("ragged_dot_general", _never, _ragged_flops))
register_matmul(Matmul("ragged_dot", _never, _ragged_flops))
for _name in ("scaled_matmul", "scaled_matmul_wrapper"):
    register_matmul(Matmul(_name, _scaled_batched, _scaled_flops))
for _name in ("dot_product_attention", "dot_product_attention_fp8"):
    for _suffix in ("", "_wrapper"):
        register_matmul(
            Matmul(f"{_name}_fwd{_suffix}", _always, _attention_products(2))
        )
        register_matmul(
            Matmul(f"{_name}_bwd{_suffix}", _always, _attention_products(5))
        )
