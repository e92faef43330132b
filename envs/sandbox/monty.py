"""The sandbox `monty`: pydantic-monty, a Python interpreter of its own, in a pool of worker processes.

Not CPython: no generators, and of the library about what a calculation needs (math, json, re, collections,
itertools, functools, datetime, random, decimal, bisect, hashlib, csv and the like). Random numbers begin with the
same seed every time, so a program's output repeats; sleeping takes no time.
"""

import atexit
import contextlib
import importlib.util
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanoskyrl.envs.sandbox.base import Limits, Ran
from nanoskyrl.stages.core.children import children_end_with_us

GRACE_SECONDS = 1.0
"""After the program's own time, before the worker is killed."""

_pools: dict[int, Any] = {}
_starting = threading.Lock()
_at_once = {"now": 0, "most": 0}
"""Programs that run, and the most that ran since a worker was lost: with more, the pool starts another worker."""


def missing() -> str | None:
    """Return why this backend cannot be used, if that can be said without trying."""
    return None if importlib.util.find_spec("pydantic_monty") else "pydantic-monty is not installed"


def run_python(code: str, stdin: str, files: dict[str, bytes], limits: Limits, folder: Path) -> Ran:
    """Run a program in a fresh session; nothing is written to the folder."""
    ran, _ = run_session(code, None, limits, stdin=stdin, files=files)
    return ran


def run_session(
    code: str, state: bytes | None, limits: Limits, *, stdin: str = "", files: dict[str, bytes] | None = None
) -> tuple[Ran, bytes | None]:
    """Run a program where an earlier one left off.

    Args:
        code: The program.
        state: What an earlier call returned, or None to begin.
        limits: What it may use; processes do not exist here, and files are in memory.
        stdin: What `input()` reads.
        files: Names and contents, readable in the directory where the program starts.

    Returns:
        How it ended, and the state after it; None where a limit was met, which leaves nothing to resume from.
    """
    import pydantic_monty as monty

    output = monty.CollectStreams(max_bytes=limits.output_bytes)
    lines = iter(stdin.splitlines())

    def read_line(prompt: str = "") -> str:
        line = next(lines, None)
        if line is None:
            raise RuntimeError("EOFError: nothing left to read")
        return line

    memory = [monty.MemoryFile(f"/{name}", content) for name, content in (files or {}).items()]
    reason: str | None = None
    error = ""
    with (
        _pool().checkout(
            script_name="main.py",
            limits={"max_feed_duration_secs": limits.seconds, "max_memory": limits.memory_mb << 20},
            os_policy={"random_start": {"seed": 0}, "sleep": "zero"},
        ) as session,
        _looked_after(),
    ):
        try:
            if state is not None:
                session.load_session(state)
            session.feed_run(
                code,
                print_callback=output,
                external_lookup={"input": read_line},
                os=monty.OSAccess(memory) if memory else None,
            )
        except monty.MontyCrashedError as crash:
            reason, error = "timeout" if crash.timed_out else "killed", str(crash)
            _at_once["most"] = 0
        except monty.MontySyntaxError as wrong:
            reason, error = "error", wrong.display()
        except monty.MontyRuntimeError as wrong:
            reason, error = _reason(str(wrong), limits), wrong.display()
        after = session.dump() if reason in (None, "error") else None
    out, err = ("".join(text for of, text in output.output if of == stream) for stream in ("stdout", "stderr"))
    # What an error says is the program's, too, and of any length; its end tells most.
    return Ran(reason is None, out, err + error[-limits.output_bytes :], reason), after


def _reason(message: str, limits: Limits) -> str:
    if message.startswith("TimeoutError: feed time limit exceeded"):
        return "timeout"
    if message.startswith("MemoryError: the worker exceeded its memory limit"):  # it is gone
        return "memory"
    if message.startswith("MemoryError: memory limit exceeded"):
        return "output" if message.endswith(f"> {limits.output_bytes} bytes") else "memory"
    return "error"


def _pool() -> Any:
    """Return this process's pool of workers, started at first use: a forked child must not use its parent's."""
    import pydantic_monty as monty

    with _starting:
        if os.getpid() not in _pools:
            pool = monty.Monty(feed_duration_limit_grace=GRACE_SECONDS)
            _pools[os.getpid()] = pool.__enter__()
            _at_once.update(now=0, most=0)
            atexit.register(_stop, os.getpid())
        return _pools[os.getpid()]


@contextlib.contextmanager
def _looked_after() -> Iterator[None]:
    """See to it that workers end with this process: the library gives them no environment of ours."""
    with _starting:
        _at_once["now"] += 1
        new = _at_once["now"] > _at_once["most"]
        _at_once["most"] = max(_at_once.values())
    if new:
        children_end_with_us("monty")
    try:
        yield
    finally:
        with _starting:
            _at_once["now"] -= 1


def _stop(pid: int) -> None:
    if os.getpid() == pid:
        _pools.pop(pid).__exit__(None, None, None)
