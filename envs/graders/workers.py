"""Worker processes that can be killed: for functions of libraries and users that may never return.

A worker is a fresh interpreter that calls functions by name, one at a time, and is kept for the next call. What has
not answered in time is killed. Nothing else stops a big power in C, and a signal works in the main thread alone.
"""

import atexit
import os
import pickle
import queue
import selectors
import struct
import subprocess
import sys
import time
from typing import IO, Any

from nanoskyrl.stages.core.children import ending_with_us

WORKERS = 2
"""Alive at once; more calls wait for one to be free."""
MEMORY_LIMIT = 4 << 30
"""Address space of a worker, in bytes: a power that does not end would otherwise take all there is."""
_HEAD = struct.Struct("<Q")


class WorkerTimeout(TimeoutError):
    """The call did not end in time; its worker was killed."""


class WorkerDied(Exception):
    """The worker ended without an answer."""


class Workers:
    """A pool; calls may come from many threads."""

    def __init__(self, size: int = WORKERS, *, quiet: bool = False) -> None:
        """Start nothing yet; what functions print goes to stderr, or if quiet nowhere."""
        self._size, self._quiet = size, quiet
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(size):
            self._idle.put(None)
        self._pid = os.getpid()
        atexit.register(self.close)

    def call(self, target: str, *args: Any, seconds: float) -> Any:
        """Return what `module:function` returns for these arguments.

        Args:
            target: A function that a fresh interpreter can import.
            args: What it is called with; must pickle, as must what it returns.
            seconds: Wall clock, without the start of a worker and the import of the module.

        Raises:
            WorkerTimeout: it did not return in time.
            WorkerDied: the process ended, for want of memory for instance.
            Exception: whatever the function raised.
        """
        if os.getpid() != self._pid:  # a forked child must not talk to its parent's workers
            self.__init__(self._size, quiet=self._quiet)
        worker = self._idle.get()
        try:
            if worker is not None and worker.place != _place():  # it would find other modules
                worker.kill()
                worker = None
            if worker is None:
                worker = _Worker(self._quiet)
            worker.ask(("import", target, ()), 120.0)
            answer = worker.ask(("call", target, args), seconds)
        except BaseException:
            if worker is not None:
                worker.kill()
            self._idle.put(None)
            raise
        self._idle.put(worker)
        failed, value = answer
        if failed:
            raise value
        return value

    def close(self) -> None:
        """End the idle workers; the pool can be used again."""
        if os.getpid() != self._pid:  # a forked child does not own them
            return
        for _ in range(self._idle.qsize()):
            worker = self._idle.get()
            if worker is not None:
                worker.kill()
            self._idle.put(None)


def _place() -> tuple[str, ...]:
    return (os.getcwd(), *sys.path)


class _Worker:
    def __init__(self, quiet: bool) -> None:
        self.place = _place()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nanoskyrl.envs.graders.worker_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            env=ending_with_us(
                {
                    **os.environ,
                    "PYTHONHASHSEED": "0",  # two workers must see sets of strings in one order
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                }
            ),
            start_new_session=True,  # Ctrl-C is for us to hear
        )

    def ask(self, request: tuple[str, str, tuple[Any, ...]], seconds: float) -> tuple[bool, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        deadline = time.monotonic() + seconds
        try:
            send(self.process.stdin, request)
        except OSError as error:
            raise WorkerDied(f"the worker is gone: {error}") from error
        fd = self.process.stdout.fileno()
        found = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while len(found) < _HEAD.size or len(found) < _HEAD.size + _HEAD.unpack_from(found)[0]:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise WorkerTimeout(f"no answer in {seconds:g} s")
                chunk = os.read(fd, 1 << 16)
                if not chunk:
                    raise WorkerDied(f"the worker ended with status {self.process.wait()}")
                found += chunk
        return pickle.loads(found[_HEAD.size :])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def send(pipe: IO[bytes], value: Any) -> None:
    """Write a value, its length before it."""
    data = pickle.dumps(value)
    pipe.write(_HEAD.pack(len(data)) + data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> Any:
    """Return the next value, or raise EOFError."""
    head = pipe.read(_HEAD.size)
    if len(head) < _HEAD.size:
        raise EOFError
    return pickle.loads(pipe.read(_HEAD.unpack(head)[0]))
