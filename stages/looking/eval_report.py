"""Finished evaluations as people read them: one table, and two side by side."""

import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Column, Table

from nanoskyrl.eval.compare import paired
from nanoskyrl.eval.metrics import successes_by_task, summarize
from nanoskyrl.stages.core.errors import InputError, told_as
from nanoskyrl.stages.core.manifest import SUMMARY, Manifest, differences, located, read_manifest
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.looking.console import SafeConsole, with_rows

COLUMNS = 4
"""Evaluations side by side in one block of the table: as many as a terminal takes with their names whole."""
FLIPS_SHOWN = 20
ASKED_BY = ("prompt", "judge_prompt", "shots_data", "corpus")
"""Files that a benchmark is asked or graded by; which rows there are, `data` says, and pairing sees to that."""
LINES = (
    ("success", "success", "share"), ("95% interval", "success_95", "interval"), ("tasks", "tasks", "count"),
    ("samples", "samples", "count"), ("steps, mean", "turns_mean", "number"), ("steps, p95", "turns_p95", "number"),
    ("tool calls valid", "tool_calls_valid", "count"), ("tool calls invalid", "tool_calls_invalid", "count"),
    ("tool calls failed", "tool_calls_failed", "count"), ("prompt tokens", "prompt_tokens", "count"),
    ("completion tokens", "completion_tokens", "count"), ("cost", "cost", "number"),
    ("truncated", "truncated", "share"), ("no answer", "no_answer", "share"),
    ("judge failures", "judge_failures", "count"), ("not scored", "not_scored", "count"),
)  # fmt: skip
"""What the table shows of every evaluation: the line's name, the key in its summary, and how it is written."""
GENERAL = {key for _, key, _ in LINES} | {
    "benchmark", "metric", "task_ids", "held_out", "completion_tokens_mean", "status", "score_status",
}  # fmt: skip


def summary_of(output: Path) -> dict[str, Any]:
    """Return the numbers of a finished evaluation.

    Raises:
        InputError: there are none, or they cannot be read.
    """
    read_manifest(output, stage="eval")
    place = located(output, SUMMARY)
    with told_as(
        InputError, f"`{place}` cannot be read", OSError, ValueError, hint="Run the evaluation again, with `--force`"
    ):
        return json.loads(place.read_bytes())


def table(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return one table of several evaluations, a column each, in blocks one below the other."""
    items = list(summaries.items())
    blocks = [_block(dict(items[start : start + COLUMNS])) for start in range(0, len(items), COLUMNS)]
    notes = [f"{name}: {numbers['note']}" for name, numbers in items if numbers.get("note")]
    return "\n".join(["\n\n".join(blocks), *notes])


def _block(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    heads = (Column(f"{name}\n{_metric(numbers)}", justify="right") for name, numbers in summaries.items())
    passes = sorted({key for s in summaries.values() for key in s if key.startswith("pass_at_")}, key=_k)
    own = dict.fromkeys(key for numbers in summaries.values() for key in numbers if _is_own(key, numbers[key]))
    lines = [
        *LINES[:4], *((f"pass@{_k(name)}", name, "share") for name in passes), *LINES[4:],
        *((key, key, "number") for key in own),
    ]  # fmt: skip
    rows = (
        [label, *(_written(numbers.get(key), kind) for numbers in summaries.values())] for label, key, kind in lines
    )
    return _text(with_rows(Table("", *heads, box=box.SIMPLE_HEAD, pad_edge=False), rows))


def _metric(numbers: Mapping[str, Any]) -> str:
    """Return what success is called: a benchmark's own word, or on which tasks of an environment it was."""
    of_environment = "success on held-out tasks" if numbers.get("held_out", True) else "success on training tasks"
    return numbers.get("metric", of_environment)


def _is_own(key: str, value: Any) -> bool:
    return key not in GENERAL and not key.startswith("pass_at_") and (value is None or isinstance(value, int | float))


def _k(name: str) -> int:
    return int(name.rsplit("_", 1)[1])


def _written(value: Any, kind: str) -> str:
    if value is None:
        return "-"
    if kind == "interval":
        return f"[{value[0]:.3f}, {value[1]:.3f}]"
    return f"{value:,}" if kind == "count" else f"{value:.3f}" if kind == "share" else f"{value:,.4g}"


def _text(grid: Table) -> str:
    console = SafeConsole(file=io.StringIO(), width=1 << 12)  # names and labels are never cut
    console.print(grid)
    return "\n".join(line.rstrip() for line in console.file.getvalue().split("\n")).strip("\n")  # type: ignore[attr-defined]


def compare(first: Path, second: Path) -> dict[str, Any]:
    """Return the paired difference of two finished evaluations of the same tasks.

    Raises:
        InputError: one is unfinished, they are of different benchmarks or rows, or share no judged task.
    """
    manifests = [read_manifest(place, stage="eval") for place in (first, second)]
    names = [manifest.settings["rollout"]["env"] for manifest in manifests]
    if names[0] != names[1]:
        raise InputError(
            f"`{first}` is of `{names[0]}`, `{second}` of `{names[1]}`", hint="Compare two evaluations of one benchmark"
        )
    sides = [
        successes_by_task(summarize(read_parts(place, manifest), 1)[1])
        for place, manifest in zip((first, second), manifests, strict=True)
    ]
    try:
        found = paired(*sides)
    except ValueError as error:
        raise InputError(
            f"`{first}` and `{second}` share no judged task", hint="Evaluate both with the same seed and limit"
        ) from error
    ours, theirs = (_graded_by(manifest, names[0]) for manifest in manifests)
    metrics = [summary_of(place).get("metric") for place in (first, second)]
    return {
        "benchmark": names[0],
        "first_place": str(first),
        "second_place": str(second),
        "first_metric": metrics[0],
        "second_metric": metrics[1],
        "graded_otherwise": list(dict.fromkeys(name.partition(".")[0] for name, *_ in differences(ours, theirs))),
        **asdict(found),
    }


def _graded_by(manifest: Manifest, name: str) -> dict[str, Any]:
    """Return the settings of a benchmark, files by their digest."""
    files = {key: digest for key, digest in manifest.inputs.items() if key in ASKED_BY}
    return {**(manifest.settings.get(name) or {}), **files}


def comparison(found: Mapping[str, Any]) -> str:
    """Return a comparison as text."""
    low, high = found["difference_95"]
    lines = [
        f"{found['benchmark']}, {found['tasks']} tasks judged in both",
        f"first   {found['first']:.4f}  {found['first_place']}",
        f"second  {found['second']:.4f}  {found['second_place']}",
        f"second minus first  {found['difference']:+.4f}, 95% [{low:+.4f}, {high:+.4f}]"
        + ("" if low <= 0 <= high else ", which leaves out 0"),
    ]
    for label in ("improved", "worsened", "only_first", "only_second"):
        tasks = found[label]
        rest = f" and {len(tasks) - FLIPS_SHOWN} more" if len(tasks) > FLIPS_SHOWN else ""
        lines.append(f"{label.replace('_', ' '):<11} {len(tasks):4d}  {', '.join(tasks[:FLIPS_SHOWN])}{rest}".rstrip())
    if found["first_metric"] != found["second_metric"]:
        lines.append(f"note: the first is `{found['first_metric']}`, the second `{found['second_metric']}`")
    if found["graded_otherwise"]:
        names = ", ".join(f"`{found['benchmark']}.{name}`" for name in found["graded_otherwise"])
        lines.append(f"note: the two differ in {names}")
    return "\n".join(lines)
