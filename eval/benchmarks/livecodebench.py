"""LiveCodeBench: contest problems by date (arXiv 2403.07974), graded by public and private tests.

Programs read stdin, or give a class with a method (LeetCode). Every test runs in the
sandbox; what the right output is stays outside. Private tests come pickled; the unpickler
makes nothing but plain values.
"""

import base64
import io
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from nanoskyrl.envs.base import Score, Task
from nanoskyrl.envs.sandbox.base import Limits, full_python, run_python
from nanoskyrl.eval.base import BenchConfig, Benchmark, graded, user, wrong
from nanoskyrl.eval.benchmarks.code import last_block, run_solution, same_output
from nanoskyrl.eval.rows import Hub, Row, needed_text, place_of
from nanoskyrl.stages.core.errors import InputError, SettingsError, told_as
from nanoskyrl.stages.core.safe_text import shortened
from nanoskyrl.stages.core.trajectory import Trajectory

STDIN, FUNCTIONAL = "stdin", "functional"
"""What a test feeds a program with: text, or arguments of a function."""
LARGEST_TESTS = 1 << 30
"""Bytes that private tests may unpack to."""
LIMITS = Limits(seconds=6.0, memory_mb=2048, output_bytes=16 << 20)
"""Of one test; the authors give 6 seconds, too."""
SYSTEM = "You write correct Python programs for contest problems. Reply with nothing but the program."
PREAMBLE = """import bisect, collections, copy, datetime, functools, heapq, itertools
import math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
from builtins import *
sys.setrecursionlimit(50000)
"""
"""Names that contest programs count on without an import."""
WORK = """
def work(names, order):
    solution = names["Solution"]() if "Solution" in names else None
    call = getattr(solution, order["func_name"]) if solution else names[order["func_name"]]
    return plain(call(*order["arguments"]))

def plain(value):
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return [[plain(key), plain(item)] for key, item in value.items()]
    return value
"""


@dataclass(frozen=True, kw_only=True)
class LiveCodeBenchConfig(BenchConfig):
    """Which problems are asked."""

    table: ClassVar[str] = "livecodebench"
    version: Literal[
        "release_v1", "release_v2", "release_v3", "release_v4", "release_v5", "release_v6",
        "v1", "v2", "v3", "v4", "v5", "v6", "v4_v5",
    ] = "release_v6"  # fmt: skip
    """Of the hub's rows; of a file all are taken."""
    start_date: str | None = None
    """First contest date, such as 2025-01-01; None: no bound."""
    end_date: str | None = None
    """Last contest date; None: no bound."""

    def check(self) -> None:
        """Refuse dates that do not exist."""
        import datetime

        for name in ("start_date", "end_date"):
            try:
                datetime.date.fromisoformat(getattr(self, name) or "2025-01-01")
            except ValueError as error:
                raise SettingsError(
                    f"`livecodebench.{name}` is {getattr(self, name)!r}, no date", hint="Write it as 2025-01-01"
                ) from error


class LiveCodeBench(Benchmark):
    """Code generation, the `lite` rows."""

    Config = LiveCodeBenchConfig
    name = "livecodebench"
    columns = (
        "question_content", "question_id", "contest_date", "starter_code", "difficulty", "public_test_cases",
        "private_test_cases", "metadata",
    )  # fmt: skip
    metric = "passed"
    groups: ClassVar = {"passed_by_difficulty": "difficulty"}
    workers = 2
    max_generate_length = 4096

    @cached_property
    def rows(self) -> list[Row]:
        """Rows of the version whose contest lies between the dates."""
        # Its own page on the hub is a script, which `datasets` runs no more; this is a copy as plain files.
        self.hub = Hub(name="lighteval/code_generation_lite", config=self.config.version)  # pyright: ignore[reportAttributeAccessIssue]
        first, last = self.config.start_date or "", self.config.end_date or "9"
        found = [row for row in super().rows if first <= str(row["contest_date"])[:10] <= last]
        if not found:
            raise InputError(
                f"livecodebench has no problem between {self.config.start_date} and {self.config.end_date}",
                hint="Widen `livecodebench.start_date` and `livecodebench.end_date`",
            )
        return found

    def check_row(self, row: Row) -> None:
        """Refuse a row whose public tests or metadata are not what they mean; private ones are unpacked when chosen."""
        needed_text(row, "question_content", "starter_code", "public_test_cases", "private_test_cases", "metadata")
        _check_tests("public_test_cases", _from_json(row, "public_test_cases"), _function_of(row))

    def check_chosen(self, tasks: Sequence[Task]) -> None:
        """Refuse a task whose private tests are not what they mean, or that has no test at all."""
        for task in tasks:
            row = self._row_of[task.task_id]
            with told_as(
                InputError,
                f"row `{task.task_id}` of {place_of(self.config.data, self.hub)}",
                ValueError,
                hint="docs/evaluations.md gives the layout; leave such rows out",
            ):
                hidden = private_tests(row)
                _check_tests("private_test_cases", hidden, _function_of(row))
                if not hidden and not _from_json(row, "public_test_cases"):
                    raise ValueError("`public_test_cases` and `private_test_cases` hold no test")

    @cached_property
    def _row_of(self) -> dict[str, Row]:
        return {str(row["question_id"]): row for row in self.rows}

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks; without a sandbox none could be graded, so that comes first."""
        full_python()
        return super().tasks(split)

    def pose(self, row: Row, index: int) -> Task:
        """Return a row's problem; its tests stay in the file, they can hold megabytes."""
        starter = str(row["starter_code"] or "")
        how = (
            f"Begin with this code:\n```python\n{starter}\n```"
            if starter
            else "Read from stdin and write the answer to stdout:\n```python\n# your code\n```"
        )
        text = f"### Question:\n{row['question_content']}\n\n### Format: {how}\n\n### Answer: (in a fenced block)\n\n"
        return Task(
            task_id=str(row["question_id"]), split="test", prompt=row["question_content"],
            messages=user(self.asked(row["question_content"], text), SYSTEM),
            metadata={"difficulty": row["difficulty"], "contest_date": str(row["contest_date"])[:10]},
        )  # fmt: skip

    def gold(self, task: Task) -> str:
        """Raise: the benchmark has no solutions."""
        raise SettingsError("livecodebench has no gold answers", hint="Script them with `--set scripted.actions=FILE`")

    def verdict(self, text: str, metadata: Mapping[str, Any], trajectory: Trajectory) -> Score:
        """Run the tests, public ones first, up to the first that fails."""
        program, row = _without_future(last_block(text)), self._row_of[trajectory.task_id]
        if not program.strip():
            return wrong()
        tests, name = unpacked_tests(row), _function_of(row)
        passed = 0
        reason = None
        for test in tests:
            right, reason = _passes(program, test, name)
            if not right:
                break
            passed += 1
        return graded(
            passed == len(tests) > 0, tests_passed=float(passed), tests=float(len(tests)),
            timeout=float(reason == "timeout"),
        )  # fmt: skip


def _from_json(row: Row, column: str) -> Any:
    try:
        return json.loads(row[column])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`{column}` is no JSON: {error}") from error


def _function_of(row: Row) -> str | None:
    """Return the function that functional tests call, or None.

    Raises:
        ValueError: the row's metadata is no JSON object, or what it names is no text.
    """
    found = _from_json(row, "metadata") if row["metadata"] else {}
    if not isinstance(found, dict):
        raise ValueError(f"`metadata` must be a JSON object, not {shortened(repr(found))}")
    name = found.get("func_name")
    if name is not None and not isinstance(name, str):
        raise ValueError(f"func_name in `metadata` must be text, not {shortened(repr(name))}")
    return name


def _is_functional(test: Mapping[str, Any], name: str | None) -> bool:
    """Say whether a test calls a function, in place of a program."""
    return test.get("testtype") == FUNCTIONAL or bool(name and test.get("testtype") != STDIN)


def _check_tests(column: str, tests: Any, name: str | None) -> None:
    """Raise ValueError unless these are tests that a program can pass."""
    if not isinstance(tests, list):
        raise ValueError(f"`{column}` must be a list of tests, not {shortened(repr(tests))}")
    for number, test in enumerate(tests):
        where = f"test {number} of `{column}`"
        if not isinstance(test, dict):
            raise ValueError(f"{where} must be an object, not {shortened(repr(test))}")
        for field in ("input", "output"):
            if not isinstance(test.get(field), str):
                raise ValueError(f"{field} of {where} must be text, not {shortened(repr(test.get(field)))}")
        if test.get("testtype") not in (STDIN, FUNCTIONAL, None):
            raise ValueError(
                f"testtype of {where} must be {STDIN} or {FUNCTIONAL}, not {shortened(repr(test['testtype']))}"
            )
        if not _is_functional(test, name):
            continue
        if not name:
            raise ValueError(f"{where} calls a function, and `metadata` has no func_name")
        for line in (*_arguments(test), test["output"]):
            try:
                json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{where} calls a function, and {shortened(repr(line))} is no JSON: {error}"
                ) from error


def _arguments(test: Mapping[str, Any]) -> list[str]:
    """Return the arguments of a functional test, each as JSON."""
    return [line for line in test["input"].split("\n") if line.strip()]


def _passes(program: str, test: Mapping[str, Any], name: str | None) -> tuple[bool, str | None]:
    """Return whether a program passes a test, and how it ended otherwise."""
    if _is_functional(test, name):
        order = {
            "func_name": name,
            "arguments": [json.loads(line) for line in _arguments(test)],
        }
        outcome = run_solution(f"{PREAMBLE}{program}", WORK, order, LIMITS)
        return outcome.reached and outcome.value == json.loads(test["output"]), outcome.reason
    ran = run_python(f"{PREAMBLE}{program}", stdin=test["input"], limits=LIMITS, backend=full_python())
    return ran.ok and same_output(ran.stdout, test["output"]), ran.reason


def _without_future(program: str) -> str:
    """Return a program that may stand behind other lines."""
    return "\n".join(line for line in program.split("\n") if not line.startswith("from __future__ import"))


def unpacked_tests(row: Row) -> list[dict[str, Any]]:
    """Return a row's tests, public ones first.

    Raises:
        ValueError: they are in none of the known forms.
    """
    return [*_from_json(row, "public_test_cases"), *private_tests(row)]


def private_tests(row: Row) -> Any:
    """Return a row's private tests: JSON, or JSON that was pickled and packed.

    Raises:
        ValueError: they are in neither form.
    """
    private = row["private_test_cases"]
    try:
        return json.loads(private)
    except (ValueError, RecursionError):
        try:
            return json.loads(plain_unpickled(_inflated(base64.b64decode(private))))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"`private_test_cases` is neither JSON nor packed JSON: {error}") from error


def _inflated(data: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    try:
        found = unpacker.decompress(data, LARGEST_TESTS)
    except zlib.error as error:
        raise ValueError(f"private tests cannot be unpacked: {error}") from error
    if unpacker.unconsumed_tail:
        raise ValueError(f"private tests are larger than {LARGEST_TESTS} bytes")
    return found


def plain_unpickled(data: bytes) -> str:
    """Return the text in a pickle; anything that would import or call is refused.

    Raises:
        ValueError: it is no pickle of a plain text.
    """
    try:
        found = _Plain(io.BytesIO(data)).load()
    except Exception as error:  # a broken pickle raises whatever its opcodes meet
        raise ValueError(f"private tests are no plain pickle: {type(error).__name__}: {error}") from error
    if not isinstance(found, str):
        raise ValueError(f"private tests unpickle to {type(found).__name__}, not to text")
    return found


class _Plain(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")
