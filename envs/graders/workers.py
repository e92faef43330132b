"""Worker processes that can be killed: for functions of libraries and users that may never return.

A worker is a fresh interpreter that calls functions by name, one at a time, and is kept for the next call. What has
not answered in time is killed. Nothing else stops a big power in C, and a signal works in the main thread alone.
"""

import atexit
import contextlib
import math
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import Any, TypeVar

from nanoskyrl.stages.core.children import ending_with_us

WORKERS = 2
"""Alive at once; more calls wait for one to be free."""
MEMORY_LIMIT = 4 << 30
"""Address space of a worker, in bytes: a power that does not end would otherwise take all there is."""
BATCH = 64
"""Calls that travel together at most."""
PROBE_SECONDS = 0.2
"""Of calls in one worker, after which it is decided whether others join it."""
START_SECONDS = 0.4
"""Of processor time that a worker takes to start."""
T = TypeVar("T")


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
        with self._worker(target) as worker:
            failed, value = worker.ask(("call", target, args), seconds)
        if failed:
            raise value
        return value

    def each(self, target: str, calls: Sequence[tuple[Any, ...]], seconds: Sequence[float], most: int) -> list[Any]:
        """Return what a function returns for each of many calls, in order; an error takes its call's place.

        Calls travel in batches. They are made one after another in one worker, so that a function that remembers does
        so in their order, until they are seen to take long; then in several, as far as that repays their start.

        Args:
            target: As in `call`.
            calls: Arguments.
            seconds: Wall clock for each call.
            most: Workers that may be used.
        """
        found: list[Any] = [None] * len(calls)
        seen = self._each(target, calls, seconds, found, iter([range(len(calls))]), probe=True)
        if seen.made == len(calls):
            return found
        left = range(seen.made, len(calls))
        several = min(_workers_for(seen.mean, seen.waits, len(left)), most, self._size, len(left))
        size = max(1, min(BATCH, int(PROBE_SECONDS / seen.mean), len(left) // several))
        batches = _Shared(range(start, min(start + size, left.stop)) for start in range(left.start, left.stop, size))
        with ThreadPoolExecutor(several) as pool:
            working = [pool.submit(self._each, target, calls, seconds, found, batches) for _ in range(several)]
            for one in working:
                one.result()
        return found

    def _each(
        self, target: str, calls: Sequence[tuple[Any, ...]], seconds: Sequence[float], found: list[Any],
        batches: Iterator[range], *, probe: bool = False,
    ) -> "_Made":  # fmt: skip
        """Make calls in one worker at a time, and say what they took.

        Until there are no more batches, or, to probe, until it is known how long a call takes.
        """
        made = _Made()
        for batch in batches:
            place = batch.start
            while place < batch.stop and not (probe and made.wall > PROBE_SECONDS):
                end = min(place + min(BATCH, max(1, made.made) if probe else BATCH), batch.stop)
                try:
                    with self._worker(target) as worker:
                        for _, value, wall, cpu in worker.ask_each(target, calls[place:end], seconds[place:end]):
                            found[place] = value
                            made.add(wall, cpu)
                            place += 1
                except Exception as error:  # of the worker, or of an answer that cannot be read
                    found[place] = error
                    made.add(seconds[place], 0.0)
                    place += 1
        return made

    @contextlib.contextmanager
    def _worker(self, target: str) -> "Iterator[_Worker]":
        """Lend a worker that has imported the function; one that fails is killed."""
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
            yield worker
        except BaseException:
            if worker is not None:
                worker.kill()
            self._idle.put(None)
            raise
        self._idle.put(worker)

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


@dataclass(slots=True)
class _Made:
    """Calls that were made, and what all but the first took: that one imports the user's module."""

    made: int = 0
    wall: float = 0.0
    cpu: float = 0.0

    def add(self, wall: float, cpu: float) -> None:
        if self.made:
            self.wall, self.cpu = self.wall + wall, self.cpu + cpu
        self.made += 1

    @property
    def mean(self) -> float:
        """Seconds of a call."""
        return max(self.wall, 1e-6) / max(self.made - 1, 1)

    @property
    def waits(self) -> float:
        """How many such calls one processor could carry at once."""
        return math.inf if self.cpu <= 0 else max(1.0, self.wall / self.cpu)


def _workers_for(mean: float, waits: float, left: int) -> int:
    """Return how many workers end soonest: each has to start, and those that compute share the processors."""
    cores = os.cpu_count() or 1
    return max(1, int(min(cores * waits, math.sqrt(left * mean * cores / START_SECONDS))))


class _Shared(Iterator[T]):
    """An iterator that several threads may take from."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items, self._lock = iter(items), threading.Lock()

    def __next__(self) -> T:
        with self._lock:
            return next(self._items)


class _Worker:
    def __init__(self, quiet: bool) -> None:
        self.place = _place()
        self._pipe, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "nanoskyrl.envs.graders.worker_main", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if quiet else 2,  # what a function prints is no data of ours
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
        self._send(request)
        return self._answer(seconds)

    def ask_each(
        self, target: str, calls: Sequence[tuple[Any, ...]], seconds: Sequence[float]
    ) -> Iterator[tuple[bool, Any, float, float]]:
        """Yield of each call whether it failed, what it returned or raised, and its seconds of wall and processor."""
        self._send(("each", target, tuple(calls)))
        for of_call in seconds:
            yield self._answer(of_call)

    def _send(self, request: tuple[str, str, tuple[Any, ...]]) -> None:
        # Pickled plainly: by `Connection.send`, torch would leave its tensors with this process.
        data = pickle.dumps(request)
        try:
            self._pipe.send_bytes(data)
        except OSError as error:
            raise WorkerDied(f"the worker is gone: {error}") from error

    def _answer(self, seconds: float) -> Any:
        """Return the next answer; the seconds begin now."""
        if not self._pipe.poll(seconds):
            raise WorkerTimeout(f"no answer in {seconds:g} s")
        try:
            data = self._pipe.recv_bytes()
        except (EOFError, OSError) as error:
            raise WorkerDied(f"the worker ended with status {self.process.wait()}") from error
        return pickle.loads(data)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._pipe.close()
