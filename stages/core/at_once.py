"""Calls that wait for something, made at the same time; what they return comes in their order.

A call that only computes gains nothing from a thread, and a hop to one costs more than most steps of an environment. So
calls are made here, one after another, until one of them has waited; the others then go to threads.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

WAITED_SECONDS = 1e-3
"""A hop to a thread and back takes a tenth of it."""


class AtOnce:
    """Makes calls, at most so many at once; remembers whether they wait."""

    def __init__(self, most: int, *, waits: bool = False) -> None:
        """Expect calls that compute, unless it is known that they wait."""
        self._most, self._waits = most, waits

    def map(self, call: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Return what the call returns for each item, in order; raises what the first call raised that failed."""
        items, found = list(items), list[R]()
        while len(found) < len(items) and not (self._waits and self._most > 1):
            began, computed = time.perf_counter(), time.thread_time()
            found.append(call(items[len(found)]))
            self._waits = time.perf_counter() - began - (time.thread_time() - computed) > WAITED_SECONDS
        if len(found) == len(items):
            return found
        pool = ThreadPoolExecutor(self._most, thread_name_prefix="at-once")
        try:
            return [*found, *pool.map(call, items[len(found) :])]
        finally:
            pool.shutdown(cancel_futures=True)
