"""FLOPs of the product-like instructions in optimized HLO, and the rate they run at."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxckpt.devices import Device
from jaxckpt.xla.hlo import Computation, Instruction, Module, Shape, bits

_FULL_PRECISION = re.compile(r"highest|dot_f32_f32_f32")
_INTERMEDIATE = re.compile(
    r'"intermediate_tensor_shape"\s*:\s*\{.*?"dimensions"\s*:\s*\[([^\]]*)\]'
)
_CONTRACTING = re.compile(r'"lhs_contracting_dimensions"\s*:\s*\[([^\]]*)\]')

ATTENTION_TARGET = re.compile(r"^__cudnn\$fmha")
GEMM_TARGET = re.compile(r"^__cublas\$")
CONVOLUTION_TARGET = re.compile(r"^__cudnn\$conv")


@dataclass(frozen=True)
class Product:
    """One multiplication of matrices, a convolution, or a fused attention.

    Attributes:
        flops: A multiply-add counts two.
        dtype: Type of the factors.
        full_precision: Whether float32 factors must not be rounded to TF32.
    """

    flops: int
    dtype: str
    full_precision: bool = False


def find_products(
    module: Module, computation: Computation, instruction: Instruction
) -> list[Product]:
    """Return the products that one instruction does, those in its fusion included."""
    if instruction.opcode in ("fusion", "fusion-start"):
        return [
            p for called in module.callees(instruction) for p in _inside(module, called)
        ]
    product = _product(computation, instruction)
    return [] if product is None else [product]


def _inside(module: Module, computation: Computation) -> Iterator[Product]:
    for instruction in computation.instructions.values():
        yield from find_products(module, computation, instruction)


def _product(computation: Computation, instruction: Instruction) -> Product | None:
    if instruction.opcode == "dot":
        return _dot(
            computation, instruction, instruction.numbers("lhs_contracting_dims")
        )
    if instruction.opcode == "convolution":
        return _convolution(computation, instruction)
    if instruction.opcode != "custom-call":
        return None
    target = instruction.custom_call_target
    if GEMM_TARGET.match(target):
        found = _CONTRACTING.search(instruction.attributes)
        dims = re.findall(r"\d+", found.group(1)) if found else ()
        return _dot(computation, instruction, tuple(map(int, dims)))
    if CONVOLUTION_TARGET.match(target):
        return _convolution(computation, instruction)
    if ATTENTION_TARGET.match(target):
        return _attention(computation, instruction)
    return None


def _dot(
    computation: Computation, instruction: Instruction, contracting: tuple[int, ...]
) -> Product:
    """`2 * elements of the result * length of the contraction`."""
    left = next(computation.operands(instruction)).shape
    length = math.prod(left.dims[d] for d in contracting)
    asked = [instruction.attribute(n) or "" for n in ("operand_precision", "algorithm")]
    full = any(_FULL_PRECISION.search(text) for text in asked)
    return Product(2 * instruction.shape.elements * length, left.dtype, full)


def _convolution(computation: Computation, instruction: Instruction) -> Product | None:
    """`2 * elements of y * elements of the kernel for one output feature`.

    `dim_labels` always speaks of the forward convolution `y = conv(x, kernel)`, so the
    kernel of the gradient calls is found by its role. Padding counts as work.
    """
    labels = instruction.attribute("dim_labels")
    shapes = [operand.shape for operand in computation.operands(instruction)]
    if labels is None or len(shapes) < 2:
        return None
    target = instruction.custom_call_target
    y, kernel = instruction.shape, shapes[1]
    if "BackwardInput" in target:
        y = shapes[0]
    elif "BackwardFilter" in target:
        y, kernel = shapes[1], instruction.shape
    kernel_labels = labels.split("_")[1].split("->")[0]
    per_feature = math.prod(
        size
        for size, label in zip(kernel.dims, kernel_labels, strict=False)
        if label != "o"
    )
    groups = max(1, *instruction.numbers("batch_group_count"), 1)
    return Product(2 * y.elements * per_feature // groups, shapes[0].dtype)


def _attention(computation: Computation, instruction: Instruction) -> Product | None:
    """`4 * batch * heads * queries * keys * width`; the backward pass 2.5 times that.

    The forward pass has two products, the backward pass five. A causal mask counts in
    full, as it does in the FLOPs of a model's formula.
    """
    found = _INTERMEDIATE.search(instruction.attributes)
    if found is None:
        return None
    scores = Shape("bf16", tuple(int(n) for n in re.findall(r"\d+", found.group(1))))
    query = next(computation.operands(instruction)).shape
    width = query.elements * scores.dims[-1] // max(1, scores.elements)
    passes = 10 if "Backward" in instruction.custom_call_target else 4
    return Product(passes * scores.elements * width, query.dtype)


def product_rate(product: Product, device: Device) -> float:
    """Return the datasheet FLOP/s at which `device` does `product`."""
    width = bits(product.dtype)
    return rate_of_factors(width, device, full_precision=product.full_precision)


def rate_of_factors(
    width: int, device: Device, *, full_precision: bool = False
) -> float:
    """Return the datasheet FLOP/s of products of factors of so many bits.

    16-bit factors run at the dense bf16 rate and 8-bit factors at twice that. float32
    factors run at half of it (TF32 on the tensor cores, XLA's choice at JAX's default
    precision), but outside the tensor cores if full precision is asked for; float64 at
    half of that.
    """
    peak = device.peak_flops_per_second
    assert peak is not None
    vector = device.float32_flops_per_second or peak / 16
    if width == 16:
        return peak
    if 0 < width <= 8:
        return 2 * peak
    if width >= 64:
        return vector / 2
    return vector if full_precision else peak / 2
