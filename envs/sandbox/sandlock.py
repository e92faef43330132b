"""The sandbox `sandlock`: CPython, or any command, confined by Landlock and seccomp.

Nothing of the caller's file system can be read but the system's libraries and the interpreter, and nothing can be
reached through a socket. What `run_python` writes goes to a copy-on-write layer with a quota, and is thrown away.
"""

import contextlib
import importlib.util
import os
import stat
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanoskyrl.envs.sandbox.base import Limits, Ran
from nanoskyrl.envs.sandbox.processes import (
    REPEATABLE,
    SYSTEM,
    SYSTEM_FILES,
    Talk,
    lay_out,
    limited,
    python_argv,
    ran_from,
    talk,
)

DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")

NOBODY = 65534
LOOK_SECONDS, GRACE_SECONDS = 0.1, 1.0
# sandlock demands a group beside the user, and then warns that it makes no use of it.
warnings.filterwarnings("ignore", message="Policy field 'gid'")
SPARE_MB = 512
"""Past the kernel's own limit, at which the program learns of it; sandlock's, over all processes, kills in silence."""


def missing() -> str | None:
    """Return why this backend cannot be used, if that can be said without trying."""
    if importlib.util.find_spec("sandlock") is None:
        return "sandlock is not installed"
    from sandlock import landlock_abi_version, min_landlock_abi

    if landlock_abi_version() < min_landlock_abi():
        return f"the kernel's Landlock has ABI {landlock_abi_version()}, and {min_landlock_abi()} is needed (Linux 6.7)"
    return None if Path("/usr/bin/prlimit").exists() else "there is no /usr/bin/prlimit (package util-linux)"


def run_python(code: str, stdin: str, files: dict[str, bytes], limits: Limits, folder: Path) -> Ran:
    """Run a program in the folder; what it writes is discarded.

    Killed before it said a word, it is run once more. Where many threads start sandboxes on a busy machine, sandlock
    0.9 kills some programs that do nothing but print: seen in 0 to 8 of 100, fewer with a larger `SPARE_MB`, why is not
    known. That must not be a verdict about the program.
    """
    lay_out(folder, code, files)
    ran = _run_discarding(stdin, limits, folder)
    silent = ran.reason == "memory" and not ran.stdout and not ran.stderr
    return _run_discarding(stdin, limits, folder) if silent else ran


def _run_discarding(stdin: str, limits: Limits, folder: Path) -> Ran:
    from sandlock import BranchAction

    with (
        tempfile.TemporaryDirectory(prefix="skyrl-sandbox-") as storage,
        _fifos_opened(Path(storage), limits.seconds + GRACE_SECONDS),
    ):
        return _run(
            limited(python_argv(), memory_mb=limits.memory_mb, file_mb=limits.file_mb),
            stdin,
            limits,
            folder,
            workdir=str(folder),
            fs_storage=storage,
            max_disk=limits.file_mb << 20,
            on_exit=BranchAction.ABORT,
            on_error=BranchAction.ABORT,
        )


def run_command(argv: list[str], stdin: str, limits: Limits, folder: Path) -> Ran:
    """Run a command in the folder; what it writes stays."""
    return _run(limited(argv, memory_mb=None, file_mb=limits.file_mb), stdin, limits, folder)


@contextlib.contextmanager
def _fifos_opened(folder: Path, after: float) -> Iterator[None]:
    """From some seconds on, open every FIFO in a folder until left.

    sandlock's keeper opens what the program opens, and would wait for the other end of a FIFO for ever: no clock of
    ours could end that.
    """
    left = threading.Event()

    def look() -> None:
        seconds = after
        while not left.wait(seconds):
            seconds = LOOK_SECONDS
            with contextlib.suppress(OSError):  # a folder that the keeper takes away while we look
                for path in folder.rglob("*"):
                    with contextlib.suppress(OSError):
                        if stat.S_ISFIFO(path.lstat().st_mode):
                            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield
    finally:
        left.set()
        looking.join()


def _run(argv: list[str], stdin: str, limits: Limits, folder: Path, **more: Any) -> Ran:
    from sandlock import ExitReason, Sandbox, StdioMode

    readable = (*SYSTEM, *SYSTEM_FILES, *DEVICES, sys.base_prefix)
    box = Sandbox(
        fs_readable=[path for path in dict.fromkeys(readable) if Path(path).exists()],
        fs_writable=[str(folder), "/dev/null"],  # git opens it for writing before it does anything
        cwd=str(folder),
        clean_env=True,
        env={"HOME": str(folder), "TMPDIR": str(folder), "PATH": "/usr/bin:/bin", **REPEATABLE},
        **({"uid": NOBODY, "gid": NOBODY} if os.geteuid() == 0 else {}),  # takes root's capabilities away
        max_memory=(limits.memory_mb + SPARE_MB) << 20,
        max_processes=limits.processes + 1,  # prlimit, before it becomes the program
        no_coredump=True,
        **more,
    )
    deadline = time.monotonic() + limits.seconds
    pipe = StdioMode.PIPED
    with box.popen(argv, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        # One of its own, for `talk` closes it: closed twice, it could be another thread's by then.
        stdin_fd = os.dup(process.stdin.fileno())
        process.stdin.close()
        talked: Talk = talk(
            stdin_fd,
            process.stdout.fileno(),
            process.stderr.fileno(),
            stdin.encode("utf-8", "replace"),
            deadline,
            limits.output_bytes,
            process.kill,
        )
        result = process.wait(timeout=max(0.1, deadline - time.monotonic()))
    ran = ran_from(
        talked,
        status=result.exit_code if result.reason == ExitReason.EXITED else None,
        late=result.reason == ExitReason.TIMEOUT,
    )
    # What asks for far too much at once is killed by sandlock itself, which does not say so apart from other kills.
    return replace(ran, reason="memory") if ran.reason == "killed" and result.reason == ExitReason.KILLED else ran
