"""What the memory model knows of a chip and its compiler."""

from __future__ import annotations

from dataclasses import dataclass

from jaxckpt.devices import Device


@dataclass(frozen=True)
class Chip:
    """Numbers by which the compiler decides what lies in memory.

    Attributes:
        operations_per_byte: Additions that the chip does while its memory moves a byte.
        multiprocessors: Processors that a product's tiles are spread over.
        widens_bfloat16: Whether bfloat16 arithmetic is done in float32.
    """

    operations_per_byte: float = 10.0
    multiprocessors: int = 132
    widens_bfloat16: bool = False

    @classmethod
    def of(cls, device: Device) -> Chip:
        """Return the numbers of a device; those of an H100 for an unknown one.

        Example:
            >>> from jaxckpt.devices import get_device
            >>> Chip.of(get_device("a100-80gb")).widens_bfloat16
            True
        """
        target, rate = device.target, device.float32_flops_per_second
        if target is None or rate is None or device.memory_bytes_per_second is None:
            return cls()
        return cls(
            rate / 2 / device.memory_bytes_per_second,
            target.multiprocessors,
            widens_bfloat16(target.compute_capability),
        )


def widens_bfloat16(compute_capability: str) -> bool:
    """Return whether bfloat16 arithmetic is done in float32.

    A100s (8.0) have no bfloat16 arithmetic outside their tensor cores, so XLA rewrites
    it to float32 and drops the casts between two operations: what it stores between
    two fused kernels is then float32, at twice the bytes (jax 0.10.2: the `tanh` of a
    GELU and the residual stream of GPT-2; not so from 8.9 on).
    """
    return tuple(map(int, compute_capability.split("."))) < (8, 9)


def split_parts(rows: int, columns: int, depth: int, chip: Chip) -> int:
    """Return in how many parts XLA cuts the contraction of a product.

    A product whose result has too few 64 x 64 tiles for the chip's processors is cut
    along what it contracts, into up to two tiles per processor and no shorter than 64;
    the partial results are float32, and a reduction adds them up.

    Args:
        rows: Rows of the result, batches of matrices counted in.
        columns: Columns of the result.
        depth: Length of the contraction.
        chip: The chip.

    Example:
        >>> split_parts(2048, 128, 512, Chip())
        4
        >>> split_parts(8192, 4096, 1024, Chip())
        1
    """
    tiles = -(-rows // _TILE) * -(-columns // _TILE)
    parts = 1
    if tiles >= chip.multiprocessors:
        return 1
    while (
        2 * parts * tiles <= 2 * chip.multiprocessors and depth // (2 * parts) >= _TILE
    ):
        parts *= 2
    return parts


_TILE = 64
