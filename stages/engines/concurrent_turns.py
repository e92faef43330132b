"""The turn loop for engines that sample requests one by one: no attempt waits for another.

Environments step in threads while other attempts generate. Parts are begun in order, as
many attempts alive at once as the engine has use for, and each is handed over when its
last attempt has ended, so the end of one part is hidden behind the beginning of the next.
"""

import asyncio
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nanoskyrl.envs.base import Environment
from nanoskyrl.stages.core.metrics import Stopwatch
from nanoskyrl.stages.engines.base import AsyncEngine, AsyncTokenEngine, ChatEngine, SamplingParams
from nanoskyrl.stages.engines.turns import Attempt

Begin = Callable[[], Attempt]
_END = object()


def play_concurrently(
    parts: Sequence[Sequence[Begin]],
    engine: AsyncEngine,
    sampling: SamplingParams,
    watch: Stopwatch,
    *,
    threads: int = 32,
) -> Iterator[tuple[int, list[Attempt]]]:
    """Carry all attempts to their end, and yield each part's, with its index, when they have ended.

    Args:
        parts: What begins each attempt of each part; called in a thread.
        engine: Holds the policy.
        sampling: The same for all.
        watch: Takes the seconds in which anything was generated, and those that environments took.
        threads: Environments that step at once.
    """
    finished: queue.Queue[Any] = queue.Queue()
    pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="environment")
    busy = _Busy()
    spent = [0.0]

    async def drive() -> None:
        try:
            slots = asyncio.Semaphore(engine.capacity)
            async with asyncio.TaskGroup() as tasks:
                for index, begins in enumerate(parts):
                    done: list[Attempt | None] = [None] * len(begins)
                    left = [len(begins)]
                    for place, begin in enumerate(begins):
                        await slots.acquire()
                        tasks.create_task(one(begin, index, place, done, left, slots))
        except BaseExceptionGroup as group:
            finished.put(group.exceptions[0])
            return
        except BaseException as error:
            finished.put(error)
            raise
        finished.put(_END)

    async def one(
        begin: Begin, index: int, place: int, done: list[Attempt | None], left: list[int], slots: asyncio.Semaphore
    ) -> None:
        try:
            done[place] = await _carry(begin, engine, sampling, pool, busy, spent)
            left[0] -= 1
            if not left[0]:
                finished.put((index, done))
        finally:
            slots.release()

    with watch("play"):
        driver = engine.submit(drive())
        try:
            while (item := finished.get()) is not _END:
                if isinstance(item, BaseException):
                    raise item
                engine.verify()  # before anybody sees these rows
                yield item
        finally:
            driver.cancel()
            pool.shutdown(wait=False, cancel_futures=True)
            busy.stop()
            watch.add("generate", busy.seconds)
            watch.add("env", spent[0])


async def _carry(
    begin: Begin,
    engine: AsyncEngine,
    sampling: SamplingParams,
    pool: ThreadPoolExecutor,
    busy: "_Busy",
    spent: list[float],
) -> Attempt:
    """Return an attempt that has ended."""
    loop = asyncio.get_running_loop()
    attempt = await loop.run_in_executor(pool, _timed, spent, begin)
    deadline = None if engine.trajectory_seconds is None else loop.time() + engine.trajectory_seconds
    while not attempt.ended:
        try:
            async with asyncio.timeout_at(deadline):
                if isinstance(engine, ChatEngine):
                    request = attempt.chat_request()
                    if request is None:
                        continue
                    with busy:
                        reply = await engine.chat(request, sampling)
                    await loop.run_in_executor(pool, _timed, spent, attempt.take_reply, reply)
                else:
                    assert isinstance(engine, AsyncTokenEngine)
                    with busy:
                        generation = await engine.sample(attempt.request(), sampling)
                    await loop.run_in_executor(pool, _timed, spent, attempt.take, generation)
        except TimeoutError:
            return attempt.abandoned(f"the attempt took more than {engine.trajectory_seconds:g} seconds")
    return attempt


def _timed(spent: list[float], work: Callable[..., Any], *args: Any) -> Any:
    """Do the work and add its seconds; two threads at once may lose one's, which matters to nobody."""
    began = time.perf_counter()
    try:
        return work(*args)
    finally:
        spent[0] += time.perf_counter() - began


class _Busy:
    """Seconds in which at least one request was under way; entered and left on one thread."""

    def __init__(self) -> None:
        self.seconds, self._count, self._since = 0.0, 0, 0.0

    def __enter__(self) -> None:
        if not self._count:
            self._since = time.perf_counter()
        self._count += 1

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._count -= 1

    def stop(self) -> None:
        """Count what is under way up to now."""
        if self._count:
            self.seconds += time.perf_counter() - self._since
            self._since = time.perf_counter()


def threads_for(environment: Environment, most: int) -> int:
    """Return how many of an environment's episodes may step at once: one, if it says `serial = True`."""
    return 1 if getattr(environment, "serial", False) else most
