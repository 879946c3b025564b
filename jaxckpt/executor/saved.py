"""Arrays outside the device, whatever their dtype and sharding, and their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import jax
import numpy as np


@dataclass(frozen=True)
class SavedArray:
    """An array outside the device: what it is made of, and of which type.

    Attributes:
        shape: Its shape, and `dtype`; of a key array those of its data.
        sharding: Where the pieces go.
        key: The kind of a key array, else None.
        pieces: The different shards by their place; none once they are elsewhere.
        places: Shape of each piece, in their order.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    key: Any
    pieces: Any
    places: Any

    @classmethod
    def of(cls, array: Any) -> SavedArray:
        """Begin to bring an array to the host."""
        key = None
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            key, array = jax.random.key_impl(array), jax.random.key_data(array)
        pieces = {_place(s.index): s.data for s in array.addressable_shards}
        for piece in pieces.values():
            piece.copy_to_host_async()
        places = {place: piece.shape for place, piece in pieces.items()}
        return cls(array.shape, array.dtype, array.sharding, key, pieces, places)

    def unloaded(self) -> list[Any]:
        """Hand the pieces out; they are held here no longer."""
        pieces = list(self.pieces.values())
        self.pieces.clear()
        return pieces

    def loaded(self) -> SavedArray:
        """Return it with pieces that are numpy arrays."""
        return self.holding([np.asarray(x) for x in self.unloaded()])

    def holding(self, pieces: Sequence[Any]) -> SavedArray:
        """Return it with other pieces, in their order."""
        named = dict(zip(self.places, pieces, strict=True))
        return SavedArray(
            self.shape, self.dtype, self.sharding, self.key, named, self.places
        )

    def read(self, file: BinaryIO) -> SavedArray:
        """Return it with pieces read from where a file stands."""
        shapes = self.places.values()
        return self.holding([_read_piece(file, s, self.dtype) for s in shapes])

    def restored(self) -> jax.Array:
        """Return the array, on the device."""
        array = jax.make_array_from_callback(
            self.shape, self.sharding, lambda index: self.pieces[_place(index)]
        )
        if self.key is None:
            return array
        return jax.random.wrap_key_data(array, impl=self.key)


def write_piece(file: BinaryIO, piece: Any) -> None:
    """Append a piece of an array to a file; wait for the piece where it must."""
    # Not `tofile`, whose error does not say that the disk is full.
    file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)


def _read_piece(file: BinaryIO, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    dtype = np.dtype(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    found = np.fromfile(file, np.uint8, count)
    if found.size != count:
        raise OSError(f"`{file.name}` is shorter than what was written.")
    return found.view(dtype).reshape(shape)


def _place(index: Any) -> tuple[Any, ...]:
    return tuple((part.start, part.stop) for part in index)
