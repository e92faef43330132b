"""The two processes in which tests and the program that they test run: a script for the sandbox, never imported.

The judge holds the tests and what it says at the end; the program runs in a child of its own and holds neither. The
judge asks for the names that its tests use, through the wire of `process_wire.py`, and calls what it finds there; it
takes no other name, no builtin and no module of the program's. It cannot be traced, nor its memory be opened, by its
child.
"""

import ast
import builtins
import ctypes
import importlib
import io
import json
import os
import random
import re
import subprocess
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # in the sandbox its text stands above this one
    from nanoskyrl.envs.graders.process_wire import TESTS, Wire

SOLUTION = "solution"
NOT_DUMPABLE = (4, 0)
"""prctl's PR_SET_DUMPABLE: /proc/PID/mem and /proc/PID/fd are closed to others, and so is ptrace."""


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
    wire.send(wire.encoded(["loaded"]))
    while True:
        kind, *rest = wire.receive()
        if kind == "ask":
            wire.answer(*rest)


def judge() -> None:
    """Run the tests and say what came of them; the word for passing is written by no other way than past the last."""
    order = json.loads(sys.stdin.buffer.read())
    verdict, sys.stdout = os.dup(1), open(os.devnull, "w")  # noqa: SIM115 (open to the end)
    try:
        if ctypes.CDLL(None).prctl(*NOT_DUMPABLE, 0, 0, 0) != 0:
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
        if wire.receive() == ["loaded"]:
            said = "failed"
            run_tests(order, wire)
            if not (wire.ended or wire.failed):  # a test, or the program, may have caught that
                said = order["passed"]
    except BaseException:  # an assert, or what the program raised
        pass
    program.kill()
    os.write(verdict, said.encode())
    os._exit(0)  # waits for no thread


def run_tests(order: Any, wire: "Wire") -> None:
    """Run the tests with what the program holds under the names that they use, or under the wanted ones alone."""
    module = types.ModuleType(TESTS)
    sys.modules[TESTS] = module
    wanted, tests = order["names"], order["tests"]
    exec(compile(order["before"], "before.py", "exec"), module.__dict__)
    asked = used_names(tests) if wanted is None else wanted
    found = wire.ask("names", asked)
    for name in asked:
        if wanted is not None or name in found:
            own = None if wanted is not None else own_module(name, tests)
            vars(module)[name] = found[name] if own is None else own
    vars(module)["__builtins__"] = builtins
    exec(compile(tests, "tests.py", "exec"), module.__dict__)


def used_names(tests: str) -> list[str]:
    """Return the names that tests read and that can be the program's: none of Python's own, none with `__`.

    No word of a text is among them, for that may be an answer.
    """
    read = [node.id for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Name)]
    return [name for name in dict.fromkeys(read) if not (name.startswith("__") or hasattr(builtins, name))]


def own_module(name: str, tests: str) -> Any:
    """Return Python's own module where the tests take from a name only what that module has; else None."""
    taken = set(re.findall(rf"\b{name}\s*\.\s*(\w+)", tests))
    if name not in sys.stdlib_module_names or not taken:
        return None
    try:
        module = importlib.import_module(name)
    except ImportError:  # the library lacks a part here
        return None
    return module if all(hasattr(module, attribute) for attribute in taken) else None


if __name__ == "__main__":
    run_program(*map(int, sys.argv[1:])) if len(sys.argv) > 1 else judge()
