"""Whether a program passes tests, in a sandbox that runs CPython."""

import hmac
import secrets
from collections.abc import Mapping
from typing import Any

from nanoskyrl.envs.actions import last_fence
from nanoskyrl.envs.sandbox import Limits, full_python, run_python

LIMITS = Limits(seconds=10.0, memory_mb=1024)

ENDING = "\n\nimport sys as _sys\n_sys.stdout.write(_sys.stdin.readline())\n"


def passes(gold: Mapping[str, Any], text: str, limits: Limits = LIMITS) -> tuple[bool, str]:
    """Return whether the program in a text passes, and why not.

    Args:
        gold: `tests`, a program of asserts to run behind it, or `inputs` and `outputs`, texts for stdin and stdout.
        text: The program, or words with the program in a fence, of which the last counts.
        limits: For each run.

    Raises:
        SandboxError: no sandbox with full Python works here.
    """
    code = last_fence(text) or text
    if "tests" in gold:
        return _passes_asserts(code, str(gold["tests"]), limits)
    for number, (given, wanted) in enumerate(zip(gold["inputs"], gold["outputs"], strict=True), 1):
        ran = run_python(code, stdin=given, limits=limits, backend=full_python())
        if not ran.ok:
            return False, f"test {number}: {ran.reason}"
        if ran.stdout.split() != wanted.split():
            return False, f"test {number}: other output"
    return True, "all outputs are right"


def _passes_asserts(code: str, tests: str, limits: Limits) -> tuple[bool, str]:
    # A word that only comes out behind the last assert: a program that exits early, with status 0, passes nothing.
    word = secrets.token_hex(16)
    ran = run_python(f"{code}\n\n{tests}{ENDING}", stdin=word + "\n", limits=limits, backend=full_python())
    if not ran.ok:
        return False, ran.reason or "error"
    if not hmac.compare_digest(ran.stdout.rstrip("\n").rpartition("\n")[2][-len(word) :].encode(), word.encode()):
        return False, "the program ended before its tests"
    return True, "all tests pass"
