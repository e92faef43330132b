"""Whether a program that a model wrote passes a program of asserts, in the sandbox.

The program's process never holds the tests, what they expect, or the words that tell how they ended: those are in
a process of their own (`two_process_tests.py`), which only asks it to call its functions. So none of these passes:
ending early, hooks at the exit, walks over frames or objects, objects equal to everything, other builtins, writing to
any handle or to the wire, a name that stands for AssertionError. What was tried is in
tests/envs/test_program_tests.py.

What remains: the program sees the arguments and may answer by their looks. A test that asks no more than what the
program's own objects say of themselves (`assert answer`, `assert x in answer`, two such objects compared) has only
their word for it, and so has one that uses a name, a module's for instance, which it does not import or define itself.

Tests see the program through calls: classes, iterators, errors and functions handed over work, but objects that are not
plain take no part in arithmetic with plain ones and are no coroutines, and names of Python's builtins are always
Python's own. A test that needs more fails.
"""

import ast
import json
import secrets
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanoskyrl.envs.sandbox.base import Limits, full_python, run_python
from nanoskyrl.stages.core.errors import SandboxError
from nanoskyrl.stages.core.safe_text import shortened

PASSED = "all tests pass"
SCRIPT = (
    "nanoskyrl.envs.graders.wire_values",
    "nanoskyrl.envs.graders.process_wire",
    "nanoskyrl.envs.graders.two_process_tests",
)
"""Modules whose texts run in the sandbox; named in full, so that whoever follows what is imported finds them."""


def parsed_tests(tests: Any) -> ast.Module:
    """Return a program of tests as a tree.

    Raises:
        ValueError: it is no text, or no Python: every solution would fail it.
    """
    if not isinstance(tests, str):
        raise ValueError(f"tests must be text, not {shortened(repr(tests))}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a stray backslash in them is nobody's business here
            return ast.parse(tests)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"tests are no Python: {type(error).__name__}: {error}") from error


def run_tests(
    solution: str, tests: str, limits: Limits, *, before: str = "", names: Sequence[str] | None = None
) -> tuple[bool, str]:
    """Return whether a program passes its tests, and how it ended.

    Args:
        solution: The program's source; it is not run as `__main__`.
        tests: Asserts, which may use the program's names.
        limits: What all of it may use.
        before: Trusted source that the tests need, such as helpers from the prompt.
        names: The only names that are the program's, over those of `before`; None: all but Python's builtins.

    Returns:
        The second is `all tests pass`, `a test fails`, `the program ended before its tests`, or `Ran.reason`.

    Raises:
        SandboxError: no sandbox for full Python works here, or it lets no process be started.
    """
    passed, broken = secrets.token_hex(16), secrets.token_hex(16)
    order = {"tests": tests, "before": before, "names": names, "passed": passed, "broken": broken}
    ran = run_python(
        source(),
        stdin=json.dumps(order),
        files={"solution.py": solution.encode("utf-8", "surrogatepass")},
        limits=limits,
        backend=full_python(),
    )
    if ran.stdout == passed:
        return True, PASSED
    if ran.stdout.startswith(broken):
        raise SandboxError(
            f"the sandbox starts no process for a program: {ran.stdout[len(broken) :]}", hint="See `skyrl doctor`"
        )
    if ran.reason is not None:
        return False, ran.reason
    return False, "a test fails" if ran.stdout == "failed" else "the program ended before its tests"


def source() -> str:
    """Return the script that the sandbox runs, one text: nothing can be imported from the directory where it lies."""
    files = (Path(__file__).with_name(f"{name.rpartition('.')[2]}.py") for name in SCRIPT)
    return "\n\n".join(file.read_text(encoding="utf-8") for file in files)
