"""What a worker process of `workers.py` does: take a function's name and arguments, answer, and wait again."""

import contextlib
import io
import os
import pickle
import resource
import sys
import time
from multiprocessing.connection import Connection
from typing import Any, cast

from nanoskyrl.envs.graders.workers import MEMORY_LIMIT
from nanoskyrl.stages.core.registry import load_attribute


def main(handle: str) -> None:
    """Answer what comes through a pipe until nobody asks any more."""
    pipe = Connection(int(handle))
    os.set_inheritable(pipe.fileno(), False)  # what a function starts must not hold it open
    for printed in (sys.stdout, sys.stderr):  # a worker is killed in the end, and what it has not written is lost
        cast(io.TextIOWrapper, printed).reconfigure(line_buffering=True)
    sys.set_int_max_str_digits(0)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    while True:
        try:
            what, target, args = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            return
        if what != "each":
            pipe.send_bytes(pickle.dumps(_answer(what, target, args)))
            continue
        for arguments in args:
            began, computed = time.perf_counter(), _processor_seconds()
            answer = _answer("call", target, arguments)
            seconds = time.perf_counter() - began, _processor_seconds() - computed
            pipe.send_bytes(pickle.dumps((*answer, *seconds)))


def _processor_seconds() -> float:
    """Return what this process and those that it has waited for have computed."""
    return sum(os.times()[:4])


def _answer(what: str, target: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        function = load_attribute(target, what="function")
        return False, function(*args) if what == "call" else None
    except BaseException as error:  # whatever a function raises is its caller's to hear of
        return True, RuntimeError(f"{type(error).__name__}: {error}") if not _pickles(error) else error


def _pickles(error: BaseException) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # classes of exceptions pickle as they please
        return False
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
