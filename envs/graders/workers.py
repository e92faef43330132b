"""Worker processes that can be killed: for functions of libraries and users that may never return.

A worker is a process with the state of a fresh interpreter that calls functions by name, one at a time, and is kept for
the next call. What has not answered in time is killed. Nothing else stops a big power in C, and a signal works in the
main thread alone.
"""

import atexit
import contextlib
import math
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
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
PROBE_SECONDS = 0.1
"""Of calls in one worker, after which it is decided whether others join it."""
BATCH_SECONDS = 0.05
"""Of calls that travel together, where several workers share them."""
START_SECONDS = 0.03
"""Of processor time that a worker takes to start, once the libraries that it needs are loaded."""
QUICK_SECONDS = 1e-4
"""Of a call, below which its answer is left in the pipe until there are several: to wake up for each costs more."""
LONGEST_POLL = 2**31 - 1
LOOK = 16
"""Such answers that are waited for together."""
LOADED, LOAD_SECONDS = "nanoskyrl.envs.graders.worker_main:loaded", 60.0
Loaded = tuple[list[str], dict[str, str]]
"""Modules by name, and an environment."""
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
        self._sources: list[_Source] = []
        self._lock = threading.Lock()
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

    def each(
        self, target: str, calls: Sequence[tuple[Any, ...]], seconds: Sequence[float], most: int,
        seen: "Made | None" = None,
    ) -> list[Any]:  # fmt: skip
        """Return what a function returns for each of many calls, in order; an error takes its call's place.

        Calls travel in batches. They are made one after another in one worker, so that a function that remembers does
        so in their order, until they are seen to take long; then in several, as far as that repays their start.

        Args:
            target: As in `call`.
            calls: Arguments.
            seconds: Wall clock for each call.
            most: Workers that may be used.
            seen: What such calls were seen to take before, which is added to.
        """
        found: list[Any] = [None] * len(calls)
        seen = Made() if seen is None else seen
        before = seen.made
        self._each(target, calls, seconds, found, iter([range(len(calls))]), seen, probe=True)
        left = range(seen.made - before, len(calls))
        if not left:
            return found
        several = min(_workers_for(seen.mean, seen.waits, len(left)), most, self._size, len(left))
        if several > 1:
            self._load(target)
        size = max(1, min(BATCH, int(BATCH_SECONDS / seen.mean), len(left) // several))
        batches = _Shared(range(start, min(start + size, left.stop)) for start in range(left.start, left.stop, size))
        with ThreadPoolExecutor(several) as pool:
            working = [pool.submit(self._each, target, calls, seconds, found, batches, Made()) for _ in range(several)]
            for one in working:
                one.result()
        return found

    def _each(
        self, target: str, calls: Sequence[tuple[Any, ...]], seconds: Sequence[float], found: list[Any],
        batches: Iterator[range], made: "Made", *, probe: bool = False,
    ) -> None:  # fmt: skip
        """Make calls in one worker at a time, and note what they took.

        Until there are no more batches, or, to probe, until it is known how long a call takes.
        """
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
                    made.add(seconds[place] if isinstance(error, WorkerTimeout) else 0.0, 0.0)
                    place += 1

    def _load(self, target: str) -> None:
        """Have the libraries that a worker has loaded ready for those that will be started."""
        with contextlib.suppress(WorkerTimeout, WorkerDied), self._worker(target) as worker:
            if worker.source.has_loaded:
                return
            worker.source.has_loaded = True
            failed, libraries = worker.ask(("call", LOADED, ()), LOAD_SECONDS)
            if not failed and worker.source.order("load", libraries) > 1:  # threads, which a fork loses
                with self._lock:
                    self._sources.append(_Source(self._quiet, has_loaded=True))

    @contextlib.contextmanager
    def _worker(self, target: str) -> "Iterator[_Worker]":
        """Lend a worker that has imported the function; one that fails is killed."""
        if os.getpid() != self._pid:  # a forked child must not talk to its parent's workers
            self.__init__(self._size, quiet=self._quiet)
        worker = self._idle.get()
        try:
            if worker is not None and not worker.source.is_up:  # it would find other modules
                worker.end()
                worker = None
            if worker is None:
                worker = _Worker(self._started())
            worker.ask(("import", target, ()), 120.0)
            yield worker
        except BaseException:
            if worker is not None:
                worker.end()
            self._idle.put(None)
            raise
        self._idle.put(worker)

    def _started(self) -> "_Source":
        """Return what starts workers as modules are found now."""
        with self._lock:
            if not self._sources or not self._sources[-1].is_up:
                self._sources.append(_Source(self._quiet))
            return self._sources[-1]

    def close(self) -> None:
        """End the idle workers; the pool can be used again."""
        if os.getpid() != self._pid:  # a forked child does not own them
            return
        for _ in range(self._idle.qsize()):
            worker = self._idle.get()
            if worker is not None:
                worker.end()
            self._idle.put(None)
        while self._sources:
            self._sources.pop().close()


def _place() -> tuple[str, ...]:
    return (os.getcwd(), *sys.path)


@dataclass(slots=True)
class Made:
    """Calls that were made, and what all but the first took: that one imports the user's module."""

    made: int = 0
    wall: float = 0.0
    cpu: float = 0.0

    def add(self, wall: float, cpu: float) -> None:
        """Note a call."""
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


class _Source:
    """A process that forks workers: a fresh interpreter, started as this one finds modules at that time."""

    def __init__(self, quiet: bool, *, has_loaded: bool = False) -> None:
        self.place, self.has_loaded = _place(), has_loaded
        self._control, theirs = socket.socketpair()
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
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

    def order(self, what: str, argument: Any = None, handles: Sequence[int] = ()) -> int:
        """Have something done, and return the number that comes of it."""
        with self._lock:
            try:
                data = pickle.dumps((what, argument))
                socket.send_fds(self._control, [len(data).to_bytes(8, "big")], handles)
                self._control.sendall(data)
                answer = b""
                while not answer.endswith(b"\n"):
                    if not (more := self._control.recv(64)):
                        raise WorkerDied(f"what starts workers ended with status {self._process.wait()}")
                    answer += more
                return int(answer)
            except OSError as error:
                raise WorkerDied(f"what starts workers is gone: {error}") from error

    @property
    def is_up(self) -> bool:
        """Whether it can fork workers that find the modules of now."""
        return self.place == _place() and self._process.poll() is None

    def close(self) -> None:
        """End it; its workers end when nobody asks them any more."""
        self._process.kill()
        self._process.wait()
        self._control.close()


class _Worker:
    def __init__(self, source: _Source) -> None:
        self.source = source
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = source.order("fork", handles=[theirs.fileno()])
        self._status: int | None = None
        self._ready = select.poll()  # `Connection.poll` makes one for each call
        self._ready.register(self._pipe.fileno(), select.POLLIN)

    def ask(self, request: tuple[str, str, tuple[Any, ...]], seconds: float) -> tuple[bool, Any]:
        self._send(request)
        return self._answer(seconds)

    def ask_each(
        self, target: str, calls: Sequence[tuple[Any, ...]], seconds: Sequence[float]
    ) -> Iterator[tuple[bool, Any, float, float]]:
        """Yield of each call whether it failed, what it returned or raised, and its seconds of wall and processor."""
        self._send(("each", target, tuple(calls)))
        quick = False
        for left, of_call in zip(range(len(calls), 0, -1), seconds, strict=True):
            if quick and left % LOOK == 0 and not self._has_answer(0):
                time.sleep(LOOK * QUICK_SECONDS)
            answer = self._answer(of_call)
            quick = answer[2] < QUICK_SECONDS
            yield answer

    def _send(self, request: tuple[str, str, tuple[Any, ...]]) -> None:
        # Pickled plainly: by `Connection.send`, torch would leave its tensors with this process.
        data = pickle.dumps(request)
        try:
            self._pipe.send_bytes(data)
        except OSError as error:
            raise WorkerDied(f"the worker is gone: {error}") from error

    def _has_answer(self, seconds: float) -> bool:
        return bool(self._ready.poll(min(1000 * seconds, LONGEST_POLL)))

    def _answer(self, seconds: float) -> Any:
        """Return the next answer; the seconds begin now."""
        if not self._has_answer(seconds):
            raise WorkerTimeout(f"no answer in {seconds:g} s")
        try:
            data = self._pipe.recv_bytes()
        except (EOFError, OSError) as error:
            raise WorkerDied(f"the worker ended with status {self.end()}") from error
        return pickle.loads(data)

    def end(self) -> int | None:
        """Kill it unless it has ended, and return its status; None: nobody knows it any more."""
        if self._process:
            try:
                self._status = self.source.order("end", self._process)
            except WorkerDied:  # its source is gone: it is nobody's child
                with contextlib.suppress(OSError):
                    os.kill(self._process, signal.SIGKILL)
            self._process = 0
            self._pipe.close()
        return self._status
