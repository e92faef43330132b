"""Processes that we start, and that are gone soon after us, by whatever signal we went.

The kernel's own way, PR_SET_PDEATHSIG, follows the thread that started a process, is lost where a process changes its
user, and is not inherited. So a guard, started with the first child, looks at this process: a small Python in a
session of its own, which no terminal and no signal to our group reaches. When this process is gone it ends, first
by SIGTERM and soon by SIGKILL, every process that has our mark in its environment, those that were named to it,
and what descends from either. It is not this process's child: who ends our children with us, as Ray does, leaves
theirs. It finds them again and again until there is none, and then removes the temporary
directories that were named to it.

`skyrl serve` is started by the user and has nobody's mark: it outlives its clients.
"""

import contextlib
import glob
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

MARK = "NANOSKYRL_CALLERS"
"""In the environment of what we start: who started it and, before that, who started us, each as `pid-start`."""
LOOK_SECONDS, GRACE_SECONDS = 0.5, 2.0
QUIET_LOOKS = 2
"""So many looks in a row that find nothing end the guard: what was just being forked has shown by then."""


class _Guard:
    """The guard of this process, once there is one."""

    lock = threading.Lock()
    of = 0
    """Whose it is."""
    itself = ""
    """As `pid-start`."""
    pipe: "IO[bytes] | None" = None
    others: set[str] = set()  # noqa: RUF012 (of the process, which has one guard)
    children: set[int] = set()  # noqa: RUF012


def ending_with_us(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a process that shall not outlive this one; it holds for what that one starts, too.

    Args:
        env: What it is given besides; None: what we have.
    """
    with _Guard.lock:
        _keep()
    callers = os.environ.get(MARK, "")
    ours = _mark()
    known = callers.split(":") if callers else []
    return {**(os.environ if env is None else env), MARK: ":".join([*known, *([ours] if ours not in known else [])])}


def children_end_with_us(name: str) -> None:
    """Have children that a library started, and gave an environment of its own, end with this process.

    Args:
        name: Of the program, as the kernel knows it.
    """
    found: set[int] = set()
    for place in glob.glob("/proc/self/task/*/children"):
        with contextlib.suppress(OSError), open(place, "rb") as file:  # a thread that ended
            found |= set(map(int, file.read().split()))
    with _Guard.lock:
        _keep()
        names = {f"{pid}-{start_of(pid)}" for pid in found - _Guard.children if _name_of(pid) == name}
        _Guard.children = found
        _Guard.others |= names
        _tell(names)


def kept_directory(prefix: str, folder: Path | None = None) -> Path:
    """Return a new temporary directory that is gone soon after this process, or once `drop_directory` is called."""
    made = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
    with _Guard.lock:
        _keep()
        _Guard.others.add(str(made))
        _tell([str(made)])
    return made


def drop_directory(made: Path) -> None:
    """Remove a temporary directory."""
    shutil.rmtree(made, ignore_errors=True)
    with _Guard.lock:
        _Guard.others.discard(str(made))
        _tell([f"-{made}"])


@contextlib.contextmanager
def temporary_directory(prefix: str, folder: Path | None = None) -> Iterator[Path]:
    """Make a temporary directory for the block, which goes with this process, too."""
    made = kept_directory(prefix, folder)
    try:
        yield made
    finally:
        drop_directory(made)


def owner() -> dict[str, str | int | None]:
    """Return which process of which machine this is, as JSON holds it."""
    return {"host": socket.gethostname(), "boot": _boot(), "pid": os.getpid(), "start": start_of(os.getpid())}


def is_gone(said: dict[str, str | int | None]) -> bool:
    """Say whether a process is surely gone; of another machine's nobody knows."""
    if said["host"] != socket.gethostname() or type(said["pid"]) is not int or type(said["start"]) is not str:
        return False
    return said["boot"] != _boot() or start_of(said["pid"]) != said["start"]


def stop_process(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Ask a process that leads a group of its own to stop, then make it, with all that is left of the group."""
    process.terminate()  # it ends what it started itself
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    """Return a port of loopback that nothing listens on now, for a process that is about to be started."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def start_of(pid: int) -> str | None:
    """Return when a process began, by a clock that nobody sets where there is one; None: it is gone, or has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
        return None if state in (b"Z", b"X") else fields[18].decode()
    except (FileNotFoundError, ProcessLookupError):
        if os.path.exists("/proc/self/stat"):
            return None
    import psutil

    with contextlib.suppress(psutil.Error):
        found = psutil.Process(pid)
        return None if found.status() == psutil.STATUS_ZOMBIE else str(found.create_time())
    return None


def _name_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read().decode(errors="replace").strip()
    except OSError:  # it ended
        return ""


def _mark() -> str:
    return f"{os.getpid()}-{start_of(os.getpid())}"


def _keep() -> None:
    """See to it that this process has a guard; a forked one needs its own."""
    if _Guard.of == os.getpid() and _runs(_Guard.itself):
        return
    if _Guard.of != os.getpid():
        _Guard.others, _Guard.children = set(), set()
    # By its path, and with nothing of ours imported: it is up in some ten milliseconds. It carries nobody's mark.
    shell = subprocess.Popen(
        ["/bin/sh", "-c", 'exec 3<&0; "$@" <&3 3<&- >/dev/null & echo $!', "sh",
         sys.executable, "-P", os.path.abspath(__file__), _mark()],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, cwd="/",
        env={name: value for name, value in os.environ.items() if name != MARK},
    )  # fmt: skip
    assert shell.stdout is not None
    with shell.stdout:
        pid = int(shell.stdout.read())
    shell.wait()
    _Guard.of, _Guard.itself, _Guard.pipe = os.getpid(), f"{pid}-{start_of(pid)}", shell.stdin
    _tell(_Guard.others)


def _runs(itself: str) -> bool:
    pid, _, start = itself.partition("-")
    return start_of(int(pid)) == start


def _tell(lines: Iterable[str]) -> None:
    if _Guard.pipe is not None and _Guard.of == os.getpid():
        with contextlib.suppress(OSError):  # somebody killed it: the next child has another one started
            _Guard.pipe.write("".join(f"{line}\n" for line in lines).encode())
            _Guard.pipe.flush()


def keep(mark: str) -> None:
    """Wait until a process is gone, then end what it started, and remove what it made. This is what the guard does.

    Args:
        mark: The process, as `pid-start`, which its children have in their environment.
    """
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    others: set[str] = set()
    heard, reading = b"", True
    os.set_blocking(0, False)
    while reading:
        # A forked child may hold the other end of the pipe, and the caller may close it by becoming another program.
        there = _runs(mark)
        select.select([0], [], [], LOOK_SECONDS if there else 0)
        try:
            chunk = os.read(0, 65536)
            reading = bool(chunk)
        except BlockingIOError:  # all is read; of a caller that is gone, too, whose last words count
            chunk, reading = b"", there
        *lines, heard = (heard + chunk).split(b"\n")
        for line in lines:
            others.discard(line[1:].decode()) if line[:1] == b"-" else others.add(line.decode())
    end = time.monotonic() + GRACE_SECONDS
    quiet, told = 0, set[int]()
    while quiet < QUIET_LOOKS:
        found = started_by(mark, others)
        quiet = 0 if found else quiet + 1
        for pid in found:
            with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
                if time.monotonic() > end:
                    os.kill(pid, signal.SIGKILL)
                elif pid not in told:
                    told.add(pid)
                    os.kill(pid, signal.SIGTERM)
        time.sleep(0.05)
    for name in others:
        if os.path.isabs(name):
            shutil.rmtree(name, ignore_errors=True)


def started_by(mark: str, others: Iterable[str] = ()) -> list[int]:
    """Return the processes with a mark in their environment, some others, and what descends from either.

    Args:
        mark: `pid-start` of the caller.
        others: Processes that have none, as `pid-start`.
    """
    others = set(others)
    table = dict(_processes(mark))
    found = {pid for pid, (_, itself, marked) in table.items() if marked or itself in others}
    while more := {pid for pid, (parent, _, _) in table.items() if parent in found} - found:
        found |= more
    return sorted(found - {os.getpid()})


def _processes(mark: str) -> Iterator[tuple[int, tuple[int, str, bool]]]:
    """Yield every process that runs: its parent, which it is, as `pid-start`, and whether it has the mark."""
    if not os.path.exists("/proc/self/stat"):
        import psutil

        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                itself = f"{process.pid}-{process.create_time()}"
                yield process.pid, (process.ppid(), itself, mark in process.environ().get(MARK, "").split(":"))
        return
    named = re.compile(rb"(^|\0)" + f"{MARK}=([^\0]*:)?{re.escape(mark)}".encode() + rb"[:\0]")
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent, *others = file.read().rpartition(b")")[2].split()[:20]
            if state in (b"Z", b"X"):
                continue
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    marked = named.search(file.read() + b"\0") is not None
            except OSError:  # another user's
                marked = False
            yield int(name), (int(parent), f"{name}-{others[17].decode()}", marked)


if __name__ == "__main__":
    keep(sys.argv[1])
