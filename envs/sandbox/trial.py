"""Trying the promises here: `python -m nanoskyrl.envs.sandbox.trial BACKEND [ATTACK ...]`, a JSON line an attack.

`tried` does that in a process of its own.

The process is what the attacks are after: it has a secret in a file and in a variable, listens on loopback, and looks
afterwards whether it was harmed. It should be one that nobody misses. BACKEND is one of `base.py`, or `none`, which
runs the attacks in a plain process: only where nothing else can be reached. There each must succeed, or it proves
nothing.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nanoskyrl.envs.sandbox.base import Ran, run_python
from nanoskyrl.envs.sandbox.promises import PROMISES, Promise
from nanoskyrl.stages.core.children import ending_with_us
from nanoskyrl.stages.core.errors import SandboxError

SCENE = "a name that only this process has"
VARIABLE = "SKYRL_SECRET"
SLACK = 120.0
"""Seconds past a program's own that starting and ending it may take on a busy machine; attacks last longer."""
PATIENCE = 4
"""A plain process that continues for so many times the limit continues for ever."""
NONE = "none"


class Scene:
    """What attacks are after, in this process and a folder of its own."""

    def __init__(self, folder: Path) -> None:
        """Lay everything out."""
        folder.mkdir()
        self.folder, self.secret, self.out = folder, folder / "secret.txt", folder / "out.txt"
        self.signals, self._processors = 0, os.sched_getaffinity(0)
        signal.signal(signal.SIGUSR1, self._signalled)
        self.listeners = self._listeners()
        self.shared = ctypes.CDLL(None).shmget(0, ctypes.c_size_t(4096), 0o1666)
        self._held = ctypes.create_string_buffer(b"secret!!")
        if self.shared >= 0:
            attach = ctypes.CDLL(None).shmat
            attach.restype = ctypes.c_void_p
            ctypes.memmove(attach(self.shared, None, 0), b"secret", 6)
        self.reset()

    def _signalled(self, *_: Any) -> None:
        self.signals += 1

    def _listeners(self) -> dict[str, socket.socket]:
        found = {"tcp": socket.create_server(("127.0.0.1", 0)), "unix": socket.socket(1), "abstract": socket.socket(1)}
        with contextlib.suppress(OSError):  # the machine has no IPv6
            found["tcp6"] = socket.create_server(("::1", 0), family=socket.AF_INET6)
        found["udp"] = socket.socket(type=socket.SOCK_DGRAM)
        found["udp"].bind(("127.0.0.1", 0))
        found["unix"].bind(str(self.folder.parent / "socket"))
        found["abstract"].bind(f"\0skyrl-{os.getpid()}")
        for name, listener in found.items():
            if name in ("unix", "abstract"):
                listener.listen(16)
            threading.Thread(target=_echo if name == "udp" else _answer, args=(listener,), daemon=True).start()
        found["tcp"].set_inheritable(True)
        return found

    def names(self) -> dict[str, Any]:
        """Return what attacks are given."""
        of = self.listeners
        return {
            "secret": str(self.secret), "folder": str(self.folder), "out": str(self.out), "pid": os.getpid(),
            "tcp": of["tcp"].getsockname()[1], "tcp6": of["tcp6"].getsockname()[1] if "tcp6" in of else 1,
            "udp": of["udp"].getsockname()[1], "unix": str(self.folder.parent / "socket"),
            "abstract": f"skyrl-{os.getpid()}",
            "address": ctypes.addressof(self._held), "shm": self.shared, "mark": f"77{os.getpid()}",
            "variable": VARIABLE, "packages": sysconfig.get_paths()["purelib"],
        }  # fmt: skip

    def _state(self) -> dict[str, Any]:
        stats = {path.name: path.lstat() for path in (self.folder, *sorted(self.folder.iterdir()))}
        return {
            "files": {name: (s.st_mode, s.st_uid, s.st_mtime_ns) for name, s in stats.items()},
            "secret": self.secret.read_text(), "attributes": os.listxattr(self.secret), "signals": self.signals,
            "limits": [resource.getrlimit(kind) for kind in range(16)],
            "processors": os.sched_getaffinity(0), "niceness": os.getpriority(os.PRIO_PROCESS, 0),
            "scheduler": os.sched_getscheduler(0), "score": Path("/proc/self/oom_score_adj").read_text(),
            "dumps": Path("/proc/self/coredump_filter").read_text(), "held": self._held.raw,
            "breach": os.path.exists("/tmp/skyrl-breach"),
        }  # fmt: skip

    def reset(self) -> None:
        """Be as before any attack."""
        self.folder.mkdir(exist_ok=True)
        self.folder.chmod(0o755)
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        os.sched_setaffinity(0, self._processors)
        self.secret.write_text("secret")
        self._before = self._state()

    def harm(self) -> str | None:
        """Return what is not as it was."""
        try:
            now = self._state()
        except OSError as error:
            return f"the caller's files: {error}"
        return next((f"the caller's {name}" for name, value in self._before.items() if now[name] != value), None)

    def left(self, seconds: float) -> list[int]:
        """Return processes of an attack that are there after some time."""
        end = time.monotonic() + seconds
        while found := _marked(f"77{os.getpid()}".encode()):
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        return found


def _marked(mark: bytes) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended while we looked
            if path.read_bytes().split(b"\0")[1:2] == [mark]:
                found.append(int(path.parent.name))
    return found


def _answer(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\nhello")
            connection.close()


def _echo(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            data, address = listener.recvfrom(99)
            listener.sendto(data, address)


@contextlib.contextmanager
def scene() -> Iterator[Scene]:
    """Lay out what attacks are after, with handles left open."""
    with tempfile.TemporaryDirectory(prefix="skyrl-trial-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)
        laid = Scene(Path(folder) / "caller")
        handles = [os.open(laid.secret, os.O_RDONLY), os.open(laid.folder, os.O_RDONLY)]
        for handle in handles:
            os.set_inheritable(handle, True)
        try:
            yield laid
        finally:
            for handle in handles:
                os.close(handle)
            if laid.shared >= 0:
                ctypes.CDLL(None).shmctl(laid.shared, 0, None)


def attempt(name: str, promise: Promise, backend: str, at: Scene) -> str | None:
    """Return how an attack on a backend succeeded, or None."""
    code = "".join(f"{word} = {value!r}\n" for word, value in at.names().items()) + promise.attacks[name]
    at.reset()
    begun = time.monotonic()
    if backend == NONE:
        with _plainly(code, promise, group="own group" not in name) as ran:
            return "it continues" if ran.reason == "timeout" else _succeeded(name, promise, at, ran, 0.3)
    ran = run_python(code, limits=promise.limits, backend=backend)
    if (seconds := time.monotonic() - begun) > promise.limits.seconds + SLACK:
        return f"it ran for {seconds:.0f} s"
    return _succeeded(name, promise, at, ran, SLACK)


def _succeeded(name: str, promise: Promise, at: Scene, ran: Ran, patience: float) -> str | None:
    if "BREACH" in ran.stdout:
        return "it says so"
    if harm := at.harm():
        return harm
    if len(ran.stdout) + len(ran.stderr) > promise.limits.output_bytes + 2000:  # monty's own words come on top
        return f"{len(ran.stdout) + len(ran.stderr)} characters of output"
    if "mark" in promise.attacks[name] and (left := at.left(patience)):
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return "it left processes"
    return None


@contextlib.contextmanager
def _plainly(code: str, promise: Promise, *, group: bool) -> Iterator[Ran]:
    """Run a program in a process like any other, in a group of its own, and end that in the end."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home, tempfile.TemporaryFile() as written:
        # As a backend that ran the program in its own process would show its frames.
        text = f"from nanoskyrl.envs.sandbox.trial import SCENE\n{code}"
        process = subprocess.Popen(
            [sys.executable, "-c", text], cwd=home, stdin=subprocess.DEVNULL, stdout=written, stderr=written,
            close_fds=False, start_new_session=group,
        )  # fmt: skip
        reason = None
        try:
            process.wait(60.0 if promise.limits.seconds > 1 else PATIENCE * promise.limits.seconds)
        except subprocess.TimeoutExpired:
            reason = "timeout"
        written.seek(0)
        yield Ran(reason is None, written.read().decode(errors="replace"), "", reason)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL) if group else process.kill()
        process.wait()


def loopback_up() -> None:
    """Have a new network namespace reach itself."""
    with socket.socket() as any_socket, contextlib.suppress(OSError):
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 0x49))  # SIOCSIFFLAGS: up and running


def tried(backend: str, names: Sequence[str] = (), *, before: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Try attacks in a process made for them.

    Args:
        backend: One of `base.py`, or `none`.
        names: Of the attacks; none: all.
        before: A command that starts the process, in a namespace or as somebody else for instance.

    Returns:
        Of each attack `promise`, `attack`, `breach` (how it succeeded, or None) and `seconds`.

    Raises:
        SandboxError: the process ended before it was done, of an attack or of itself.
    """
    command = [*before, sys.executable, "-m", "nanoskyrl.envs.sandbox.trial", backend, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ending_with_us())
    found = [json.loads(line) for line in done.stdout.splitlines()]
    wanted = len(names) or sum(len(promise.attacks) for promise in PROMISES.values())
    if len(found) != wanted:
        raise SandboxError(
            f"the trial of `{backend}` ended with status {done.returncode} after {len(found)} of {wanted} attacks: "
            f"{done.stderr.strip()[-300:]}",
            hint="The last attack may have ended it: try the attacks one by one",
        )
    return found


def main(backend: str, *names: str) -> None:
    """Try attacks, all if none is named, and print a line for each."""
    if VARIABLE not in os.environ:  # what a process began with is what others see of its variables
        os.execve(sys.executable, sys.orig_argv, {**os.environ, VARIABLE: "secret"})
    if backend == NONE:
        loopback_up()
    with contextlib.suppress(PermissionError):  # the leader of a session is one of a group already
        os.setpgid(0, 0)
    with scene() as at:
        for what, promise in PROMISES.items():
            for name in promise.attacks:
                if names and name not in names:
                    continue
                begun = time.monotonic()
                how = attempt(name, promise, backend, at)
                line = {"promise": what, "attack": name, "breach": how, "seconds": round(time.monotonic() - begun, 2)}
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
