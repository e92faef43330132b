"""The sandbox `bwrap`: CPython, or any command, in namespaces of its own (the package bubblewrap).

Under root the program becomes an unused user first: the kernel counts no processes of root's, and lets root make
namespaces. That user may not reach an interpreter below a home directory, so a first bwrap binds it to where all can.
What namespaces leave open, `envs/sandbox/seccomp.py` refuses.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from nanoskyrl.envs.sandbox import seccomp
from nanoskyrl.envs.sandbox.base import Limits, Ran
from nanoskyrl.envs.sandbox.processes import (
    REPEATABLE,
    SYSTEM,
    SYSTEM_FILES,
    lay_out,
    limited,
    python_argv,
    ran_from,
    talk,
)
from nanoskyrl.stages.core.children import ending_with_us

BOX = "/box"
"""Where a program's directory lies inside."""
PYTHON = "/mnt/python"
FOLDER = "/mnt/folder"
READ_ONLY = ("--size", "1048576", "--tmpfs", "/dev/shm", "--remount-ro", "/dev", "--remount-ro", "/")
"""bwrap makes the root and /dev in memory, without a limit; files in /dev/shm are limited instead."""
FILTER = "@filter"
"""Stands in a command for the handle of the filter of system calls."""
FIRST_USER, USERS = 0x7000_0000, 1 << 20
"""Users that nobody is: one for each call, so that calls count and signal apart."""

_calls = itertools.count(os.getpid() << 8)


def missing() -> str | None:
    """Return why this backend cannot be used, if that can be said without trying."""
    for tool in ("bwrap", "setpriv", "prlimit"):
        if shutil.which(tool) is None:
            return f"`{tool}` is not installed (packages bubblewrap and util-linux)"
    return seccomp.missing()


def run_python(code: str, stdin: str, files: dict[str, bytes], limits: Limits, folder: Path) -> Ran:
    """Run a program in a file system in memory that begins with the folder's files."""
    lay_out(folder, code, files)
    folder.chmod(0o755)  # readable for the user that the program becomes
    argv = limited(python_argv(), memory_mb=limits.memory_mb, file_mb=limits.file_mb, processes=limits.processes)
    inside = ["--size", str(limits.file_mb << 20), "--tmpfs", BOX]
    prefix, source = _as_nobody(folder) if os.geteuid() == 0 else ([], folder)
    python = PYTHON if prefix else sys.base_prefix
    for path in sorted(folder.iterdir()):
        inside += ["--ro-bind", str(source / path.name), f"{BOX}/{path.name}"]
    return _run([*prefix, *_bwrap(python), *inside, *READ_ONLY, "--chdir", BOX, "--", *argv], stdin, limits)


def run_command(argv: list[str], stdin: str, limits: Limits, folder: Path) -> Ran:
    """Run a command in the folder; what it writes stays."""
    processes = limits.processes if os.geteuid() else None
    argv = limited(argv, memory_mb=limits.memory_mb, file_mb=limits.file_mb, processes=processes)
    bind = ["--size", str(limits.file_mb << 20), "--tmpfs", "/tmp", "--bind", str(folder), str(folder)]
    return _run([*_bwrap(sys.base_prefix), *bind, *READ_ONLY, "--chdir", str(folder), "--", *argv], stdin, limits)


def _as_nobody(folder: Path) -> tuple[list[str], Path]:
    """Return a command in front of bwrap that gives root away, and where it finds the folder."""
    user = str(FIRST_USER + next(_calls) % USERS)
    outer = [
        "bwrap", "--die-with-parent", "--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID",
        "--cap-add", "CAP_SETPCAP", "--bind", "/", "/", "--dev-bind", "/dev", "/dev", "--tmpfs", "/mnt",
        "--ro-bind", sys.base_prefix, PYTHON, "--ro-bind", str(folder), FOLDER, "--",
        "setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--bounding-set=-all", "--inh-caps=-all",
    ]  # fmt: skip
    return outer, Path(FOLDER)


def _bwrap(python: str) -> list[str]:
    argv = [
        "bwrap", "--unshare-user", "--disable-userns", "--unshare-all", "--die-with-parent", "--new-session",
        "--cap-drop", "ALL", "--seccomp", FILTER, "--hostname", "sandbox", "--clearenv",
        "--setenv", "PATH", "/usr/bin:/bin",
        "--setenv", "HOME", BOX, "--setenv", "TMPDIR", BOX, "--proc", "/proc", "--dev", "/dev",
    ]  # fmt: skip
    for name, value in REPEATABLE.items():
        argv += ["--setenv", name, value]
    for path in SYSTEM:
        if Path(path).is_symlink():
            argv += ["--symlink", os.readlink(path), path]
        elif Path(path).is_dir():
            argv += ["--ro-bind", path, path]
    for path in SYSTEM_FILES:
        argv += ["--ro-bind-try", path, path]
    if not Path(sys.base_prefix).is_relative_to("/usr"):
        argv += ["--ro-bind", python, sys.base_prefix]
    return argv


def _holding(file: IO[bytes], content: bytes) -> int:
    """Write a file and return its handle, at the beginning again."""
    file.write(content)
    file.seek(0)
    return file.fileno()


def _run(argv: list[str], stdin: str, limits: Limits) -> Ran:
    deadline = time.monotonic() + limits.seconds
    with (
        tempfile.TemporaryFile() as filtered,
        subprocess.Popen(
            [str(_holding(filtered, seccomp.program())) if word == FILTER else word for word in argv],
            pass_fds=[filtered.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=ending_with_us({"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}),
            start_new_session=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None

        # One of its own, which `talk` closes: the program sees the end of its input only when none is open.
        stdin_fd = os.dup(process.stdin.fileno())
        process.stdin.close()

        def kill() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        try:
            talked = talk(
                stdin_fd, process.stdout.fileno(), process.stderr.fileno(),
                stdin.encode("utf-8", "replace"), deadline, limits.output_bytes, kill,
            )  # fmt: skip
            late = False
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late = True
        finally:
            kill()
    signalled = process.returncode < 0 or process.returncode - 128 in signal.valid_signals()  # bwrap says 128 + signal
    return ran_from(talked, status=None if signalled else process.returncode, late=late)
