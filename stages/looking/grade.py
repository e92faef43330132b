"""Answers graded apart from any run: rows of kind, gold and pred, and saved logs of SWE-bench's harness.

The graders are those of environments and benchmarks. A row that cannot be judged says why,
and has no verdict.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanoskyrl.envs.datasets import read_rows
from nanoskyrl.envs.graders.kinds import Verdict, grade
from nanoskyrl.envs.graders.reading import REASONING, Marks
from nanoskyrl.eval.benchmarks.patches import read_predictions
from nanoskyrl.eval.benchmarks.swe_harness import find_log, report
from nanoskyrl.eval.passk import mean_interval
from nanoskyrl.eval.rows import bench_rows
from nanoskyrl.stages.core.errors import InputError, SettingsError

NEEDED = ("kind", "gold", "pred")


def grade_rows(path: Path, *, explain: bool = False, marks: Marks = REASONING) -> Iterator[dict[str, Any]]:
    """Yield each row of a file with `correct` (true, false, or null where there is no verdict) and `why`.

    Where a row has such a column already, ours is `graded_correct` or `graded_why`.

    Args:
        path: Rows of kind, gold and pred.
        explain: Also yield `taken`, the answer that was looked at, `form`, how it was stated, and `compared_as`.
        marks: What opens and closes reasoning.

    Raises:
        InputError: the file is missing; or, after the last row, some lack a column, have an unknown kind, or a gold of
            another kind: their `why` says so, and they have no verdict.
    """
    refused: list[InputError] = []
    rows = read_rows(str(path), "file", "kind, gold and pred")
    for place, row in rows:
        try:
            verdict = _verdict(row, marks)
        except (InputError, SettingsError) as error:
            refused.append(InputError(f"{place}: {error}", hint=error.hint))
            verdict = Verdict(None, f"error: {error}")
        found = {"correct": verdict.correct, "why": verdict.why}
        if explain:
            found |= {"taken": verdict.taken, "form": verdict.form, "compared_as": verdict.kind}
        yield {**row, **{f"graded_{name}" if name in row else name: value for name, value in found.items()}}
    if refused:
        more = f"; so {len(refused)} of {len(rows)} rows have no verdict" if len(rows) > 1 else ""
        raise InputError(f"{refused[0]}{more}", hint=refused[0].hint)


def _verdict(row: dict[str, Any], marks: Marks) -> Verdict:
    if missing := [name for name in NEEDED if name not in row]:
        raise InputError(f"there is no `{missing[0]}`", hint="Each row needs kind, gold and pred")
    pred = row["pred"]
    if pred is not None and not isinstance(pred, str):
        # A number is an answer, too, if somebody's old output holds it as one.
        pred = json.dumps(pred, ensure_ascii=False)
    return grade(row["kind"], row["gold"], pred, marks=marks)


def grade_logs(predictions: Path, logs: Path, data: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the official report on each prediction from the harness's saved logs, and the numbers.

    Args:
        predictions: The official JSONL.
        logs: A folder that holds INSTANCE/test_output.txt somewhere below.
        data: The rows of the benchmark.

    Raises:
        InputError: a file is missing or malformed, or a prediction is of no row.
        SettingsError: the harness is not installed, or a log is of another patch.
    """
    if not logs.is_dir():
        raise InputError(f"there is no folder of logs `{logs}`", hint="Name what the harness left")
    rows = {row["instance_id"]: row for row in bench_rows(data, None, "swe_bench_verified", ("instance_id", "repo"))}
    found: list[dict[str, Any]] = []
    for name, patch in read_predictions(predictions).items():
        if name not in rows:
            raise InputError(f"`{data}` has no row `{name}`", hint="Name the rows that the predictions are of")
        if not patch:
            found.append({"instance_id": name, "resolved": False, "why": "no patch"})
            continue
        log = find_log(logs, name)
        if log is None:
            found.append({"instance_id": name, "resolved": None, "why": "no log: not run"})
            continue
        one = report(rows[name], patch, "predictions", log)
        why = "resolved" if one["resolved"] else "not resolved"
        if not one["patch_successfully_applied"]:
            why = str(one.get("infra_failure_reason") or "the log shows no run of the tests that can be believed")
        # A fault of the machine says nothing about the patch.
        found.append({"instance_id": name, "resolved": None if one["infra_failure"] else one["resolved"], "why": why})
    judged = [float(row["resolved"]) for row in found if row["resolved"] is not None]
    interval = mean_interval(judged)
    numbers = {
        "predictions": len(found),
        "judged": len(judged),
        "resolved": int(sum(judged)),
        "resolved_share": interval[0] if interval else None,
        "resolved_95": list(interval[1:]) if interval else None,
    }
    return found, numbers
