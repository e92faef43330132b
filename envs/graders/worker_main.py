"""What the processes of `workers.py` do: the first one forks workers, and these call functions by name.

The first process imports and never calls: its state is that of a fresh interpreter, with libraries loaded, so that many
workers start in the time of one. No thread runs in it that a fork could lose.
"""

import contextlib
import importlib
import io
import os
import pickle
import resource
import signal
import socket
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, cast

from nanoskyrl.envs.graders.workers import MEMORY_LIMIT, Loaded
from nanoskyrl.stages.core.registry import load_attribute

LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def main(handle: str) -> None:
    """Fork workers, and end them, as a pool asks through a socket, until nobody asks any more."""
    for printed in (sys.stdout, sys.stderr):  # a worker is killed in the end, and what it has not written is lost
        cast(io.TextIOWrapper, printed).reconfigure(line_buffering=True)
    sys.set_int_max_str_digits(0)
    orders: dict[str, Callable[[Any], int]] = {"load": _load, "end": _end}
    with socket.socket(fileno=int(handle)) as control:
        control.set_inheritable(False)
        while True:
            size, given, *_ = socket.recv_fds(control, 8, 1)
            if not size:
                return
            data = control.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
            what, argument = pickle.loads(data)
            if what != "fork":
                control.sendall(b"%d\n" % orders[what](argument))
                continue
            child = _fork()
            if not child:
                control.close()
                _serve(given[0])
                os._exit(0)
            os.close(given[0])
            control.sendall(b"%d\n" % child)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: those of libraries in C outlive a fork
        return os.fork()


def _end(child: int) -> int:
    """Kill a worker, if it has not ended, and return its status."""
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _load(loaded: Loaded) -> int:
    """Import the libraries that a worker has loaded, under its environment; return how many threads run then."""
    names, environment = loaded
    os.environ.clear()
    os.environ.update(environment)
    for name in names:
        with contextlib.suppress(Exception):  # a worker will say so
            importlib.import_module(name)
    return threading.active_count()


def loaded() -> Loaded:
    """Return which libraries this worker has loaded, and its environment; none if threads run, which a fork loses.

    Modules that are not installed are none: each worker imports them itself, and what they hold is its own.
    """
    names = [
        name
        for name, module in list(sys.modules.items())
        if name.startswith("nanoskyrl.") or (getattr(module, "__file__", None) or "").startswith(LIBRARIES)
    ]
    return (names if threading.active_count() == 1 else []), dict(os.environ)


def _serve(handle: int) -> None:
    """Answer what comes through a pipe until nobody asks any more."""
    os.setsid()  # Ctrl-C is for the caller to hear
    pipe = Connection(handle)
    os.set_inheritable(pipe.fileno(), False)  # what a function starts must not hold it open
    if (numbers := sys.modules.get("numpy.random")) is not None:  # as `random` does by itself
        numbers.seed()
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
