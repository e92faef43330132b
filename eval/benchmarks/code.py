"""Programs that a model wrote: found in its text, and run in the sandbox only.

A program that ends well has proved nothing (`sys.exit(0)` does, too): what counts is what
it answered, and what the answer should be is not given in the sandbox. The word in front of
an answer only tells it from what the program prints: a program may find it, and gains nothing.
Where tests are asserts, which hold the answers, `envs/graders/program_tests.py` runs them apart.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoskyrl.envs.sandbox.base import Limits, Ran, full_python, run_python

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
PYTHON = ("python", "python3", "py", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a program."""

    value: Any = None
    """What the harness answered; None where it did not get that far."""
    reached: bool = False
    reason: str | None = None
    """None where reached, else error, timeout, memory, output or killed."""


def fenced(text: str) -> list[str]:
    """Return every fenced block that may be Python, in order."""
    return [found[2] for found in _FENCE.finditer(text) if found[1].lower() in PYTHON]


def last_block(text: str) -> str:
    """Return what stands between the last two lines with fences; nothing where there are none."""
    lines = text.split("\n")
    fences = [place for place, line in enumerate(lines) if "```" in line]
    return "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) >= 2 else ""


HARNESS = """
import json, sys, types

def run():
    order = json.loads(sys.stdin.readline())
    secret, out = order.pop("secret"), sys.stdout
    sys.stdin = open("/dev/null")
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    with open("solution.py", encoding="utf-8") as file:
        exec(compile(file.read(), "solution.py", "exec"), module.__dict__)
    answer = work(module.__dict__, order)
    out.write("\\n" + secret + json.dumps(answer) + "\\n")
    out.flush()
"""
"""Runs the solution, then `work`, which each benchmark gives, and writes its answer behind the secret."""


def run_solution(solution: str, work: str, order: Mapping[str, Any], limits: Limits) -> Outcome:
    """Run a solution and a benchmark's `work` on it, in the sandbox.

    Args:
        solution: The program's source.
        work: Source of `work(names, order)`, which returns what JSON can hold.
        order: What `work` is called with.
        limits: What all of it may use.

    Raises:
        SandboxError: no sandbox for full Python works here.
    """
    secret = secrets.token_hex(16)
    ran = run_python(
        f"{work}\n{HARNESS}\nrun()\n",
        stdin=json.dumps({**order, "secret": secret}) + "\n",
        files={"solution.py": solution.encode("utf-8", "replace")},
        limits=limits,
        backend=full_python(),
    )
    return outcome_of(ran, secret)


def outcome_of(ran: Ran, secret: str) -> Outcome:
    """Return what a harness answered behind its secret."""
    place = ran.stdout.rfind(secret)
    if place < 0:
        return Outcome(reason=ran.reason or "error")
    try:
        value = json.loads(ran.stdout[place + len(secret) :].split("\n")[0])
    except (ValueError, RecursionError):  # the program wrote into the answer
        return Outcome(reason="error")
    return Outcome(value=value, reached=True)


def same_output(found: str, wanted: str) -> bool:
    """Say whether two outputs are the same, line by line: as text without outer spaces, else as exact numbers."""
    left, right = (_lines(text) for text in (found, wanted))
    return len(left) == len(right) and all(
        a == b or _numbers(a) == _numbers(b) is not None for a, b in zip(left, right, strict=True)
    )


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _numbers(line: str) -> Sequence[Any] | None:
    from decimal import Decimal, InvalidOperation

    try:
        found = [Decimal(word) for word in line.split()]
    except InvalidOperation:
        return None
    return None if any(number.is_snan() for number in found) else found  # which raise when they are compared
