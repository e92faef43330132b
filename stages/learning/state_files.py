"""The files of an optimizer's state, written beside the steps that follow.

`torch.save` is asked for the bytes at once, of copies of the tensors on the host: so digests are known, and the
next step begins, while the bytes are written. A state is in its place once all of its files are: a killed process
leaves none, as if it had never been asked for.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch.utils._pytree import tree_map_only
from torch.utils.serialization import config as serialization

from nanoskyrl.stages.core.digests import digest_file
from nanoskyrl.stages.core.storage import TEMPORARY, make_directory, remove_tree, sync_directory, write_errors
from nanoskyrl.stages.learning.process_group import ProcessGroup

HASHED_AT_ONCE = 1 << 23
"""Bytes that are worth a hop to the thread that hashes them."""


class StateFiles:
    """One state on its way into place; every process has its own files of it."""

    def __init__(self, state: Path, world: ProcessGroup, *, beside: bool) -> None:
        """Begin a state.

        Args:
            state: Its directory; what is there goes.
            world: All processes that write files of it.
            beside: Whether it is written while the model learns on, from copies of what learns.

        Raises:
            OutputError: its place cannot be made.
        """
        self.place, self.digests = state.with_name(state.name + TEMPORARY), dict[str, str]()
        """Where libraries may put files of their own; and the digest of every file, by its name in the state."""
        self._state, self._world, self._beside = state, world, beside
        self._files: dict[Path, _Pieces] = {}
        if world.is_main:
            for old in (state, self.place):
                remove_tree(old)
            make_directory(self.place)
        world.barrier()

    def save(self, value: Any, path: str | Path) -> None:
        """Take what `torch.save` would write there."""
        value = tree_map_only(torch.Tensor, self._on_host, value)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies are on their way until then
        pieces = _Pieces(value)
        # No CRC-32: it takes two thirds of the time, and no reader checks it.
        with (
            serialization.patch("save.compute_crc32", False),  # pyright: ignore[reportAttributeAccessIssue]
            _interrupted_as_such(),
        ):
            torch.save(value, pieces)  # pyright: ignore[reportArgumentType] - it takes what can write and flush
        self._files[Path(path)] = pieces

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if tensor.is_cuda:
            return tensor.to("cpu", non_blocking=True)  # into pinned memory, which torch keeps for the next state
        return tensor.clone() if self._beside else tensor

    def write(self) -> Future[None]:
        """Put the files in place, all of them or none; what the future raises, a disk said.

        Raises:
            OutputError: where it is not done beside what follows, they cannot be written.
        """
        if self._world.is_main:  # libraries' own small files
            there = {self._name(path): path for path in self.place.rglob("*") if path.is_file()}
            self.digests |= {name: digest_file(path) for name, path in there.items()}
        self._world.barrier()  # no process's own files are there yet
        pool = ThreadPoolExecutor(1, thread_name_prefix="state")
        written = pool.submit(self._write_files)
        self.digests |= {self._name(path): pieces.digest() for path, pieces in self._files.items()}
        for each in self._world.gather(self.digests):
            self.digests |= each
        done = pool.submit(self._put_in_place, written)
        pool.shutdown(wait=False)
        if not self._beside:
            done.result()
            self._world.barrier()
        return done

    def _name(self, path: Path) -> str:
        return path.relative_to(self.place).as_posix()

    def _write_files(self) -> None:
        for path, pieces in self._files.items():
            with write_errors(self._state / path.relative_to(self.place)):
                half = path.with_name(path.name + TEMPORARY)
                try:
                    with half.open("wb") as file:
                        file.writelines(pieces.kept)
                        file.flush()
                        os.fsync(file.fileno())
                    half.replace(path)
                finally:
                    half.unlink(missing_ok=True)  # a full disk gets its room back

    def _put_in_place(self, written: Future[None]) -> None:
        written.result()
        self._files.clear()
        with contextlib.suppress(FileNotFoundError):  # another process was as fast, and has put it in place
            if all((self.place / name).is_file() for name in self.digests):
                for folder in {self.place, *((self.place / name).parent for name in self.digests)}:
                    sync_directory(folder)
                self.place.rename(self._state)
                sync_directory(self._state.parent)


@contextlib.contextmanager
def _interrupted_as_such() -> Iterator[None]:
    """Raise what ended a write, where torch's writer raises that its file is not whole."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        raise


class _Pieces:
    """What `torch.save` writes to: pieces of files, of which tensors are not copied."""

    def __init__(self, value: Any) -> None:
        self.kept: list[Any] = []
        self._hasher, self._new, self._size = blake3(max_threads=blake3.AUTO), list[Any](), 0
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="digest")
        storages: dict[int, np.ndarray] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            storages[whole.data_ptr()] = whole.numpy()
            return tensor

        tree_map_only(torch.Tensor, note, value)
        self._storages: Mapping[int, np.ndarray] = storages

    def write(self, data: memoryview) -> int:
        """Take bytes that are gone afterwards, but those of a tensor."""
        address = np.frombuffer(data, np.uint8).ctypes.data if len(data) else 0
        held = self._storages.get(address)
        self.kept.append(bytes(data) if held is None or held.size < len(data) else held[: len(data)].data)
        self._new.append(self.kept[-1])
        self._size += len(data)
        if self._size >= HASHED_AT_ONCE:
            self._hash()
        return len(data)

    def flush(self) -> None:
        """Do nothing: torch asks for it."""

    def digest(self) -> str:
        """Return the digest of all."""
        self._hash().result()
        self._hashing.shutdown()
        return self._hasher.hexdigest()

    def _hash(self) -> Future[None]:
        """Hash what is new, while torch continues."""

        def update(new: list[Any]) -> None:
            for piece in new:
                self._hasher.update(piece)

        new, self._new, self._size = self._new, [], 0
        return self._hashing.submit(update, new)
