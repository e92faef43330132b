"""Calls that are made at the same time; what they return comes in their order.

A call that only computes gains nothing from a thread, and a hop to one costs more than most steps of an environment. So
calls are made here, one after another, until they are seen to wait; the others then go to threads.
"""

import resource
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from nanoskyrl.stages.core.metrics import Stopwatch

T = TypeVar("T")
R = TypeVar("R")

WAITED_SECONDS = 1e-3
"""A hop to a thread and back takes a tenth of it."""
LOOKED_AT_SINGLY, LOOKED_AT_TOGETHER = 8, 16
"""Calls that are timed one by one at first, and together later."""
_END: Any = object()
OF_THREAD = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


class AtOnce:
    """Makes calls, at most so many at once; remembers whether they wait."""

    def __init__(self, most: int, *, waits: bool = False) -> None:
        """Expect calls that compute, unless it is known that they wait."""
        self._most, self._waits = most, waits

    def map(self, call: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Return what the call returns for each item, in order; raises what the first call raised that failed."""
        items, found, waited = list(items), list[R](), 0
        while len(found) < len(items) and not (self._waits and self._most > 1):
            began, computed, pauses = time.perf_counter(), time.thread_time(), _pauses()
            made = items[len(found) : len(found) + (1 if len(found) < LOOKED_AT_SINGLY else LOOKED_AT_TOGETHER)]
            found += map(call, made)
            idle = time.perf_counter() - began - (time.thread_time() - computed)
            # On a busy machine a call that only computes is idle, too: but then others took the processor from it. It
            # may also wait for a thread that holds Python's lock, now and then.
            if idle > WAITED_SECONDS * len(made) and _pauses() - pauses >= len(made) / 4:
                waited += 1
                self._waits = len(made) > 1 or (waited > 1 and 4 * waited >= len(found))
        if len(found) == len(items):
            return found
        pool = ThreadPoolExecutor(self._most, thread_name_prefix="at-once")
        try:
            return [*found, *pool.map(call, items[len(found) :])]
        finally:
            pool.shutdown(cancel_futures=True)


def _pauses() -> int:
    """Return how often this thread gave the processor up by itself."""
    return resource.getrusage(OF_THREAD).ru_nvcsw


def ahead(items: Iterator[T], watch: Stopwatch, name: str) -> Iterator[T]:
    """Yield items, the next of which is made in a thread while one is worked on; waiting for it is noted by name."""
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, items, _END)
        while True:
            with watch(name):
                item = following.result()
            if item is _END:
                return
            following = pool.submit(next, items, _END)
            yield item


def in_turn(items: Iterator[T], watch: Stopwatch, name: str) -> Iterator[T]:
    """Yield items, each made when its turn comes; that is noted by name."""
    while True:
        with watch(name):
            item = next(items, _END)
        if item is _END:
            return
        yield item


class Behind:
    """Makes calls in their order in a thread, one behind those who ask; waiting for the one before is noted by name."""

    def __init__(self, watch: Stopwatch, name: str) -> None:
        """Begin nothing."""
        self._watch, self._name = watch, name
        self._pool, self._made = ThreadPoolExecutor(1), Future[Any]()
        self._made.set_result(None)

    def __enter__(self) -> "Behind":
        return self

    def __call__(self, call: Callable[..., Any], *args: Any) -> None:
        """Begin a call; raises what the one before raised."""
        self._wait()
        self._made = self._pool.submit(call, *args)

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        try:
            if failed is None:
                self._wait()
        finally:
            self._pool.shutdown()

    def _wait(self) -> None:
        with self._watch(self._name):
            self._made.result()
