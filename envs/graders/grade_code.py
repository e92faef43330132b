"""Whether a program passes tests, in a sandbox that runs CPython."""

from collections.abc import Mapping
from typing import Any

from nanoskyrl.envs.graders.program_tests import run_tests
from nanoskyrl.envs.graders.reading import last_fence
from nanoskyrl.envs.sandbox.base import Limits, full_python, run_python

LIMITS = Limits(seconds=10.0, memory_mb=1024)
"""Of each run."""


def tests_of(gold: Mapping[str, Any]) -> str:
    """Return the program of asserts in a gold, whose pieces may be in a list."""
    return gold["tests"] if isinstance(gold["tests"], str) else "\n".join(gold["tests"])


def passes(gold: Mapping[str, Any], text: str) -> tuple[bool, str]:
    """Return whether the program in a text passes, and why not.

    Args:
        gold: `tests`, a program of asserts about its names, whole or as a list of pieces, or `inputs` and `outputs`,
            texts for stdin and stdout.
        text: The program, or words with the program in a fence, of which the last counts.

    Raises:
        SandboxError: no sandbox with full Python works here.
    """
    code = last_fence(text) or text
    if "tests" in gold:
        return run_tests(code, tests_of(gold), LIMITS)
    for number, (given, wanted) in enumerate(zip(gold["inputs"], gold["outputs"], strict=True), 1):
        ran = run_python(code, stdin=given, limits=LIMITS, backend=full_python())
        if not ran.ok:
            return False, f"test {number}: {ran.reason}"
        if ran.stdout.split() != wanted.split():
            return False, f"test {number}: other output"
    return True, "all outputs are right"
