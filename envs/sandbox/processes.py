"""Talking to a confined process through pipes: a deadline, and no more output than is allowed.

The process is whatever a sandbox started; all that is known here are three pipes and how to kill it.
"""

import os
import selectors
import sys
import time
from collections.abc import Callable
from pathlib import Path

from nanoskyrl.envs.sandbox.base import Ran

BOOTSTRAP = (
    "import builtins, random, _sitebuiltins\n"
    "random.seed(0)\n"
    "builtins.exit = builtins.quit = _sitebuiltins.Quitter('exit', 'Ctrl-D')\n"
    "exec(compile(open('main.py', 'rb').read(), 'main.py', 'exec'))\n"
)
"""`-S` keeps site-packages out, and with it `exit`, which programs use."""
REPEATABLE = {"PYTHONHASHSEED": "0"}
"""With the seed above: a program's output is the same every time, the order of sets included."""
INTERPRETER = os.path.realpath(sys.executable)
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin")
"""What programs need to start; readable, never writable."""
SYSTEM_FILES = ("/etc/ld.so.cache",)

Talk = tuple[bytes, bytes, str | None]
"""stdout, stderr, and why it was stopped (timeout, output), or None where it closed both pipes by itself."""


def python_argv() -> list[str]:
    """Return the command that runs main.py in the current directory, without packages, user settings or bytecode."""
    return [INTERPRETER, "-s", "-S", "-P", "-B", "-X", "utf8", "-c", BOOTSTRAP]


def lay_out(folder: Path, code: str, files: dict[str, bytes]) -> None:
    """Write a program and its files."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    # A lone surrogate is no UTF-8: Python says so about the program, as about any other text that is none.
    (folder / "main.py").write_bytes(code.encode("utf-8", "surrogatepass"))


def limited(argv: list[str], *, memory_mb: int | None, file_mb: int, processes: int | None = None) -> list[str]:
    """Return a command under the kernel's own limits."""
    limits = [f"--fsize={file_mb << 20}", "--core=0", "--nofile=256"]
    if memory_mb is not None:
        limits.append(f"--as={memory_mb << 20}")
    if processes is not None:
        limits.append(f"--nproc={processes}")
    return ["/usr/bin/prlimit", *limits, "--", *argv]


def talk(
    stdin_fd: int, stdout_fd: int, stderr_fd: int, stdin: bytes, deadline: float, cap: int, kill: Callable[[], None]
) -> Talk:
    """Feed and read a process until it closes its pipes, or kill it at the deadline or past the cap.

    Args:
        stdin_fd: Closed here once all is written.
        stdout_fd: Left open.
        stderr_fd: Left open.
        stdin: What the process reads.
        deadline: On the clock of `time.monotonic`.
        cap: Bytes of stdout and stderr together.
        kill: Ends the process with all its children.
    """
    found = {stdout_fd: bytearray(), stderr_fd: bytearray()}
    left = memoryview(stdin)
    stopped: str | None = None
    with selectors.DefaultSelector() as selector:
        for fd in found:
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ)
        os.set_blocking(stdin_fd, False)
        selector.register(stdin_fd, selectors.EVENT_WRITE)
        reading = set(found)
        while reading:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                stopped = "timeout"
                break
            for key, _ in selector.select(remaining):
                if key.fd == stdin_fd:
                    left = _write(stdin_fd, left)
                    if not left:
                        selector.unregister(stdin_fd)
                        os.close(stdin_fd)
                        stdin_fd = -1
                elif (chunk := _read(key.fd)) is None:
                    continue
                elif chunk:
                    found[key.fd] += chunk
                else:
                    selector.unregister(key.fd)
                    reading.discard(key.fd)
            if sum(map(len, found.values())) > cap:
                stopped = "output"
                break
    if stdin_fd >= 0:
        os.close(stdin_fd)
    if stopped is not None:
        kill()
    return bytes(found[stdout_fd][:cap]), bytes(found[stderr_fd][:cap]), stopped


def _write(fd: int, left: memoryview) -> memoryview:
    try:
        return left[os.write(fd, left[:65536]) :] if left else left
    except BlockingIOError:
        return left
    except OSError:  # the process does not read any more
        return left[:0]


def _read(fd: int) -> bytes | None:
    """Return what is there, b"" at the end, None if it was not ready after all."""
    try:
        return os.read(fd, 65536)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def ran_from(talked: Talk, *, status: int | None, late: bool) -> Ran:
    """Return how a process ended, from what it said and its exit status (None: killed by a signal)."""
    stdout, stderr, stopped = (talked[0].decode("utf-8", "replace"), talked[1].decode("utf-8", "replace"), talked[2])
    if stopped is None and late:
        stopped = "timeout"
    if stopped is None and status is None:
        stopped = "killed"
    if stopped is None and status and "MemoryError" in stderr[-200:]:
        stopped = "memory"
    if stopped is None and status:
        stopped = "error"
    return Ran(stopped is None, stdout, stderr, stopped)
