"""Talking to a confined process: a deadline, no more output than is allowed, and a look now and then at what it holds.

The kernel limits each process; what all of them hold together is looked at from outside, twenty times a second.
"""

import contextlib
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from math import ceil
from pathlib import Path

from nanoskyrl.envs.sandbox.base import Limits, Ran

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
OPEN_FILES = 64
"""Of one process. A pair of sockets holds 400 kB that no other limit counts."""
FILES = 10_000
"""In each folder in memory, where a file takes a kilobyte that its size does not show."""
SIGNALS = 256
"""That wait; the kernel counts them together with those of everything that the same user runs."""
HELD = (b"Pss:", b"SwapPss:", b"VmPTE:")
"""What the kernel tells of a process's memory, in kilobytes; a page that is only read counts by its table alone."""
LOOK_SECONDS = 0.05
ENDING_SECONDS = 0.1
"""For a process that closed its pipes to end, past the deadline."""


def python_argv() -> list[str]:
    """Return the command that runs main.py in the current directory, without packages, user settings or bytecode."""
    return [INTERPRETER, "-s", "-S", "-P", "-B", "-X", "utf8", "-c", BOOTSTRAP]


def lay_out(folder: Path, code: str, files: dict[str, bytes]) -> None:
    """Write a program and its files."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    # A lone surrogate is no UTF-8: Python says so about the program, as about any other text that is none.
    (folder / "main.py").write_bytes(code.encode("utf-8", "surrogatepass"))


def limited(argv: list[str], limits: Limits) -> list[str]:
    """Return a command under the kernel's own limits, which hold for each of its processes, and for the first.

    The first process of a namespace is not the program's, but lets the program write into its memory.
    """
    # Should nobody be there to stop it at its deadline, it ends when all cores could have worked for so long.
    seconds = ceil(limits.seconds) * (os.cpu_count() or 1) + 1
    # A limit of 1 leaves no core; one of 0 would still give it to the program that the machine has for that.
    wanted = {
        "as": limits.memory_mb << 20, "fsize": limits.file_mb << 20, "core": 1, "nofile": OPEN_FILES,
        "nproc": limits.processes, "cpu": seconds, "sigpending": SIGNALS,
    }  # fmt: skip
    words = " ".join(f"--{kind}={_at_most(kind, value)}" for kind, value in wanted.items())
    script = f'for pid in 1 $$; do prlimit --pid $pid {words} || exit; done; exec "$@"'
    return ["/bin/sh", "-c", script, "sh", *argv]


def _at_most(kind: str, value: int) -> int:
    """Return a limit, or the one that we are under ourselves where that is lower: nobody may raise it."""
    ours = resource.getrlimit(getattr(resource, f"RLIMIT_{kind.upper()}"))[1]
    return value if ours == resource.RLIM_INFINITY else min(value, ours)


def listed(path: str) -> list[str]:
    """Return what a folder in /proc lists, or nothing where its process has ended."""
    try:
        return os.listdir(path)
    except (FileNotFoundError, ProcessLookupError):
        return []


def family(pid: int) -> Iterator[int]:
    """Yield a process and all that descends from it, as far as it is there."""
    yield pid
    for task in listed(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):  # it ended while we looked
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                yield from family(int(child))


def memory_of(pid: int) -> int:
    """Return the bytes that a process holds, swapped or not, of shared ones its share; 0 where it is gone.

    Raises:
        PermissionError: it may not be looked at.
    """
    # A first thread that ended holds nothing, and the others continue.
    for task in listed(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            told = Path(f"/proc/{pid}/task/{task}")
            lines = [*(told / "smaps_rollup").open("rb"), *(told / "status").open("rb")]
            if held := sum(int(line.split()[1]) for line in lines if line.startswith(HELD)):
                return held << 10
    return 0


def files_in(members: Sequence[int], place: str) -> int:
    """Return how many files lie in a folder that is in memory, as some process sees it.

    A process that has ended and was not waited for sees nothing, and one that has not yet gone into the sandbox sees
    the machine's own folder.
    """
    for pid in reversed(members):
        with contextlib.suppress(OSError):
            inside = f"/proc/{pid}/root{place}"
            if not os.path.exists(place) or os.stat(inside).st_dev != os.stat(place).st_dev:
                found = os.statvfs(inside)
                return found.f_files - found.f_ffree
    return 0


def holds_too_much(pid: int, limits: Limits, places: Sequence[str]) -> bool:
    """Say whether a process and all it started hold more memory, or files in memory, than they may.

    Args:
        pid: The first of them.
        limits: What they may use.
        places: The folders inside that are in memory and can be written to.
    """
    members = list(family(pid))
    try:
        held = sum(map(memory_of, members))
    except PermissionError:  # what may not be looked at could hold anything
        return True
    return held > limits.memory_mb << 20 or any(files_in(members, place) > FILES for place in places)


def talk(process: "subprocess.Popen[bytes]", stdin: bytes, limits: Limits, too_much: Callable[[], bool]) -> Ran:
    """Feed and read a process until it ends, or end it with its group at the deadline or past a limit.

    Args:
        process: Leader of a group, started with three pipes and without buffers.
        stdin: What it reads.
        limits: What it may use.
        too_much: Says whether it holds more than it may.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    deadline = time.monotonic() + limits.seconds
    written = {process.stdout: bytearray(), process.stderr: bytearray()}
    left = memoryview(stdin)
    stopped: str | None = None
    looked = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for pipe in (process.stdin, *written):
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_WRITE if pipe is process.stdin else selectors.EVENT_READ)
        reading = set(written)
        while stopped is None:
            now = time.monotonic()
            if now - looked > LOOK_SECONDS:
                stopped = "memory" if too_much() else None
                looked = time.monotonic()
            if now >= deadline + (0 if reading else ENDING_SECONDS):
                stopped = "timeout"
            elif not reading:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_SECONDS)
                    break
            for key, _ in selector.select(min(LOOK_SECONDS, deadline - now)) if reading and stopped is None else ():
                pipe = key.fileobj
                if pipe is process.stdin:
                    left = _write(key.fd, left)
                    if not left:
                        selector.unregister(pipe)
                        process.stdin.close()
                elif chunk := _read(key.fd):
                    written[pipe] += chunk  # pyright: ignore[reportArgumentType] (one of the two)
                elif chunk is not None:
                    selector.unregister(pipe)
                    reading.discard(pipe)  # pyright: ignore[reportArgumentType]
            if sum(map(len, written.values())) > limits.output_bytes:
                stopped = "output"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    out, err = (bytes(text) for text in written.values())
    out = out[: limits.output_bytes]
    stdout, stderr = out.decode("utf-8", "replace"), err[: limits.output_bytes - len(out)].decode("utf-8", "replace")
    reason = stopped or _reason(process.wait(), stderr)
    return Ran(reason is None, stdout, stderr, reason)


def _reason(status: int, stderr: str) -> str | None:
    if status < 0 or status - 128 in signal.valid_signals():  # bwrap says 128 + signal
        return "killed"
    if status and "MemoryError" in stderr[-200:]:
        return "memory"
    return "error" if status else None


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
