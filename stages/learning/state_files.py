"""The files of an optimizer's state, written beside the steps that follow.

`torch.save` is asked for the bytes at once, of copies of the tensors on the host: so digests are known
before anything is on disk, and the next step begins while the bytes are written. A state is in its place once
all of its files are: a killed process leaves none, as if it had never been asked for.
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
        self._files: dict[Path, list[Any]] = {}
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
        self._files[Path(path)] = pieces.kept
        self.digests[Path(path).relative_to(self.place).as_posix()] = pieces.hasher.hexdigest()

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
            there = {path.relative_to(self.place).as_posix(): path for path in self.place.rglob("*") if path.is_file()}
            self.digests |= {name: digest_file(path) for name, path in there.items()}
        for each in self._world.gather(self.digests):
            self.digests |= each
        pool = ThreadPoolExecutor(1, thread_name_prefix="state")
        done = pool.submit(self._put)
        pool.shutdown(wait=False)
        if not self._beside:
            done.result()
            self._world.barrier()
        return done

    def _put(self) -> None:
        for path, pieces in self._files.items():
            with write_errors(self._state / path.relative_to(self.place)):
                half = path.with_name(path.name + TEMPORARY)
                with half.open("wb") as file:
                    file.writelines(pieces)
                    file.flush()
                    os.fsync(file.fileno())
                half.replace(path)
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
        self.hasher = blake3(max_threads=blake3.AUTO)
        storages: dict[int, np.ndarray] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            storages[whole.data_ptr()] = whole.numpy()
            return tensor

        tree_map_only(torch.Tensor, note, value)
        self._storages: Mapping[int, np.ndarray] = storages

    def write(self, data: memoryview) -> int:
        """Take bytes that are gone afterwards, but those of a tensor."""
        self.hasher.update(data)
        address = np.frombuffer(data, np.uint8).ctypes.data if len(data) else 0
        held = self._storages.get(address)
        self.kept.append(bytes(data) if held is None or held.size < len(data) else held[: len(data)].data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: torch asks for it."""
