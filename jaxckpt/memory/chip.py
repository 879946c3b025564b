"""What the memory model knows of a chip and its compiler."""

from __future__ import annotations

from dataclasses import dataclass

from jaxckpt.devices import Device


@dataclass(frozen=True)
class Chip:
    """Numbers by which the compiler decides what lies in memory.

    Attributes:
        operations_per_byte: Additions that the chip does while its memory moves a byte.
        compute_capability: CUDA's, as a pair.
    """

    operations_per_byte: float = 10.0
    compute_capability: tuple[int, int] = (9, 0)

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
        major, minor = map(int, target.compute_capability.split("."))
        operations = rate / 2 / device.memory_bytes_per_second
        return cls(operations, (major, minor))

    @property
    def widens_bfloat16(self) -> bool:
        """Whether bfloat16 arithmetic is done in float32.

        A100s (8.0) have none outside their tensor cores, so XLA rewrites it to float32
        and drops the casts between two operations: what it stores between two fused
        kernels is then float32, at twice the bytes (jax 0.10.2: the `tanh` of a GELU
        and the residual stream of GPT-2; not so from 8.9 on).
        """
        return self.compute_capability < (8, 9)

    @property
    def is_hopper_or_later(self) -> bool:
        """Whether products run on tensor cores as an H100 has them."""
        return self.compute_capability >= (9, 0)


def split_parts(rows: int, columns: int, depth: int, chip: Chip) -> int:
    """Return in how many parts XLA cuts the contraction of a product.

    A product whose result has few 128 x 128 tiles is cut along what it contracts, into
    up to 64 tiles in all, or 128 where it is at least 2048 deep, each at least 128 deep
    (half as many parts before compute capability 9.0); the partial results are float32,
    and a reduction adds them up. Seen in programs compiled with jax 0.10.2: exact in
    most of 24 products of 128 to 2048 rows, half or twice as many in the others.

    Args:
        rows: Rows of the result, of all matrices of a batch.
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
    most = 128 if depth >= 2048 else 64
    parts = 1
    while 2 * parts * tiles <= most and depth // (2 * parts) >= _TILE:
        parts *= 2
    return parts if chip.is_hopper_or_later else max(1, parts // 2)


_TILE = 128
