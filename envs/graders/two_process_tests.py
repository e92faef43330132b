"""The two processes in which tests and the program that they test run: a script for the sandbox, never imported.

The judge holds the tests and what it says at the end; the program runs in a child of its own and holds neither. Tests
reach the program's functions through the wire of `process_wire.py`. Names of Python's own functions are never the
program's. The judge cannot be traced, nor its memory be opened, by its child.
"""

import builtins
import ctypes
import io
import json
import os
import random
import subprocess
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # in the sandbox its text stands above this one
    from nanoskyrl.envs.graders.process_wire import TESTS, Wire

SOLUTION = "solution"
NOT_DUMPABLE = (4, 0)
"""prctl's PR_SET_DUMPABLE: /proc/PID/mem and /proc/PID/fd are closed to others, and so is ptrace.

`sandlock` refuses it, and itself lets nobody trace a process or open its memory. The judge's handles can be taken
there: of its pipes the input is read to its end, and the output holds the word for passing only after passing."""


def run_program(reading: int, writing: int) -> None:
    """Load the program and do what the judge asks."""
    import _sitebuiltins

    wire = Wire(reading, writing, judge=False)
    sys.stdout = io.StringIO()
    random.seed(0)
    builtins.exit = builtins.quit = _sitebuiltins.Quitter("exit", "Ctrl-D")
    module = types.ModuleType(SOLUTION)
    sys.modules[SOLUTION] = module
    with open("solution.py", encoding="utf-8", errors="surrogatepass") as file:
        exec(compile(file.read(), "solution.py", "exec"), module.__dict__)
    names = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    wire.send("loaded", names)
    while True:
        kind, *rest = wire.receive()
        if kind == "ask":
            wire.answer(*rest)


def judge() -> None:
    """Run the tests and say what came of them; the word for passing is written by no other way than past the last."""
    order = json.loads(sys.stdin.buffer.read())
    verdict, sys.stdout = os.dup(1), open(os.devnull, "w")  # noqa: SIM115 (open to the end)
    try:
        if ctypes.CDLL(None).prctl(*NOT_DUMPABLE, 0, 0, 0) != 0 and readable("/proc/self/mem"):
            raise OSError("the judge's memory would lie open")
        asked, ask = os.pipe()
        answered, reply = os.pipe()
        program = subprocess.Popen(
            [sys.executable, "-s", "-S", "-P", "-B", "-X", "utf8", "main.py", str(asked), str(reply)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(asked, reply),
        )  # fmt: skip
    except OSError as error:
        os.write(verdict, f"{order['broken']} {error}".encode())
        return
    os.close(asked)
    os.close(reply)
    wire = Wire(answered, ask, judge=True)
    said = "ended"
    try:
        kind, names = wire.receive()
        if kind == "loaded":
            said = "failed"
            run_tests(order, names)
            if not wire.ended:  # a test may have caught that
                said = order["passed"]
    except BaseException:  # an assert, or what the program raised
        pass
    program.kill()
    os.write(verdict, said.encode())
    os._exit(0)  # waits for no thread


def readable(path: str) -> bool:
    """Say whether a file can be opened here."""
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError:
        return False
    return True


def run_tests(order: Any, names: Any) -> None:
    """Run the tests with the program's names, or the wanted ones of them."""
    module = types.ModuleType(TESTS)
    sys.modules[TESTS] = module
    wanted = order["names"]
    exec(compile(order["before"], "before.py", "exec"), module.__dict__)
    if wanted is None:
        vars(module).update((n, v) for n, v in names.items() if not hasattr(builtins, n))
    else:
        vars(module).update((name, names[name]) for name in wanted)
    exec(compile(order["tests"], "tests.py", "exec"), module.__dict__)


if __name__ == "__main__":
    run_program(*map(int, sys.argv[1:])) if len(sys.argv) > 1 else judge()
