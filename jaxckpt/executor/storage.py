"""Where kept values are between the passes of a chain that the host drives.

A store's `put` returns what a slot holds, a tree with the value's structure or a
record; `get` makes the value of it again: same types, same shardings.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import pathlib
import shutil
import tempfile
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxckpt.errors import ScheduleError
from jaxckpt.executor.saved import SavedArray, write_piece

PyTree = Any
WRITES_AHEAD = 2
"""How many kept values may wait for the disk: `put` blocks until there are fewer."""


class DeviceStore:
    """Leaves values where they are; the other stores move them.

    Example:
        >>> store = DeviceStore()
        >>> store.get(store.put(3))
        3
    """

    def put(self, value: PyTree) -> Any:
        """Return what a slot holds for a value."""
        return value

    def get(self, held: Any) -> PyTree:
        """Return the value that a slot holds, on the device."""
        return held

    def prefetch(self, held: Any) -> None:
        """Begin to read what the next `get` asks for."""

    def discard(self, held: Any) -> None:
        """Free what a slot holds."""

    def close(self) -> None:
        """Free everything; may be called again."""


class HostStore(DeviceStore):
    """Moves values to the host's memory and back, without waiting for it.

    On a device that cannot address pinned host memory they become numpy arrays; that
    waits for them.

    Example:
        >>> import jax.numpy as jnp
        >>> store = HostStore()
        >>> held = store.put({"x": jnp.arange(3)})
        >>> held["x"].value.sharding.memory_kind
        'pinned_host'
        >>> store.get(held)["x"].sharding.memory_kind
        'device'
    """

    def put(self, value: PyTree) -> PyTree:
        """Return the value's arrays on the host."""
        return jax.tree.map(_to_host, value)

    def get(self, held: PyTree) -> PyTree:
        """Return the arrays on the device again."""
        return jax.tree.map(_from_host, held, is_leaf=_is_on_host)


@dataclass(frozen=True)
class _OnHost:
    value: Any
    sharding: Any


def _to_host(array: Any) -> _OnHost:
    sharding = array.sharding
    kinds = [
        {memory.kind for memory in device.addressable_memories()}
        for device in sharding.device_set
        if device.process_index == jax.process_index()
    ]
    if all("pinned_host" in found for found in kinds):
        host = sharding.with_memory_kind("pinned_host")
        return _OnHost(jax.device_put(array, host), sharding)
    return _OnHost(SavedArray.of(array).loaded(), sharding)


def _from_host(held: _OnHost) -> jax.Array:
    if isinstance(held.value, SavedArray):
        return held.value.restored()
    return jax.device_put(held.value, held.sharding)


def _is_on_host(value: Any) -> bool:
    return isinstance(value, _OnHost)


class DiskStore(DeviceStore):
    """Keeps each value in one file of a temporary folder.

    One thread writes and reads, so that this overlaps with the computation. The files
    are gone when they are discarded, the folder when the store is closed, collected or
    the interpreter exits; not when the process is killed.

    Args:
        directory: Where to make the folder; None for the system's place for such.

    Raises:
        ScheduleError: It is no folder.
        OSError: The folder cannot be made; and from any later call, a file could not
            be written or read.

    Example:
        >>> import jax.numpy as jnp
        >>> store = DiskStore()
        >>> held = store.put({"x": jnp.arange(3)})
        >>> store.get(held)["x"]
        Array([0, 1, 2], dtype=int32)
        >>> store.close()
        >>> store.folder.exists()
        False
    """

    def __init__(self, directory: Any = None) -> None:
        check_directory(directory)
        try:
            folder = tempfile.mkdtemp(prefix="jaxckpt-", dir=directory)
        except OSError as error:
            raise _disk_error(error, directory or tempfile.gettempdir()) from error
        self.folder = pathlib.Path(folder)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "jaxckpt-disk")
        self._room = threading.BoundedSemaphore(WRITES_AHEAD)
        self._failed: list[BaseException] = []
        self._files = 0
        self._remove = weakref.finalize(self, _remove, self._thread, self.folder)

    def put(self, value: PyTree) -> Any:
        """Begin to write a value; return the record of its file."""
        self._room.acquire()
        self._check()
        leaves, tree = jax.tree.flatten(value)
        record = _File(
            self.folder / str(self._files), tree, [SavedArray.of(x) for x in leaves]
        )
        self._files += 1
        job = record.path, [saved.unloaded() for saved in record.leaves]
        record.written = self._thread.submit(_write, *job, self._room, self._failed)
        return record

    def prefetch(self, held: Any) -> None:
        """Begin to read a file."""
        if held.read is None:
            held.read = self._thread.submit(_read, held.path, held.leaves)

    def get(self, held: Any) -> PyTree:
        """Return the value, on the device."""
        self.prefetch(held)
        read, held.read = held.read, None
        concurrent.futures.wait([read])
        self._check()  # a file that is not there was not written
        try:
            leaves = read.result()
        except OSError as error:
            raise _disk_error(error, self.folder) from error
        return jax.tree.unflatten(held.tree, [leaf.restored() for leaf in leaves])

    def discard(self, held: Any) -> None:
        """Remove a file."""
        concurrent.futures.wait([held.written])
        held.read = None
        held.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Stop, and remove the folder."""
        self._remove()

    def _check(self) -> None:
        if not self._failed:
            return
        error = self._failed[0]
        if isinstance(error, OSError):
            raise _disk_error(error, self.folder) from error
        raise error


class _File:
    """The record of one file: what is in it, and the jobs that write and read it."""

    def __init__(
        self, path: pathlib.Path, tree: Any, leaves: Sequence[SavedArray]
    ) -> None:
        self.path = path
        self.tree = tree
        self.leaves = leaves
        self.written: Any = None
        self.read: Any = None


def check_directory(directory: Any) -> None:
    """Raise `ScheduleError` unless there is such a folder, or it is None."""
    if directory is None:
        return
    with contextlib.suppress(TypeError):
        if pathlib.Path(directory).is_dir():
            return
    raise ScheduleError(
        f"`directory={str(directory)!r}` is no folder. Make it first, or use None for "
        "the system's place for temporary files."
    )


def _write(
    path: pathlib.Path, pieces: list[Any], room: Any, failed: list[BaseException]
) -> None:
    """Write a file; runs in the thread, where nobody would see an exception."""
    try:
        if not failed:
            with path.open("wb") as file:
                while pieces:
                    write_piece(file, pieces.pop(0))
    except BaseException as error:
        failed.append(error)
    finally:
        pieces.clear()
        room.release()


def _read(path: pathlib.Path, leaves: Sequence[SavedArray]) -> list[SavedArray]:
    with path.open("rb") as file:
        return [leaf.read(file) for leaf in leaves]


def _remove(thread: Any, folder: pathlib.Path) -> None:
    thread.shutdown(wait=True, cancel_futures=True)
    shutil.rmtree(folder, ignore_errors=True)


def _disk_error(error: OSError, folder: Any) -> OSError:
    why = error.strerror or str(error)
    return OSError(
        error.errno,
        f"Keeping states on disk failed in `{folder}`: {why}. Give a `directory` that "
        'can be written and has room, or use `storage="host"`',
    )
