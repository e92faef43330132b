"""What went wrong in attempts, by pattern: one attempt can show several.

The patterns are those by which SkyRL with Fleet reads its rollouts: argument errors, things that are not there,
answers that are false, contexts that ran over, and forms that cannot be read.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from nanoskyrl.envs.graders.kinds import NO_ANSWER
from nanoskyrl.stages.core.rows import values_in
from nanoskyrl.stages.looking.row_facts import calls_by_row, recorded_calls

PATTERNS = {
    "argument error": "a tool was called with arguments that it does not take",
    "not found": "a tool, a page, a file or a thing that is not there was asked for",
    "tool error": "a tool ran and failed in another way",
    "format error": "a call that cannot be read, or a last turn that holds no answer",
    "false completion": "the attempt ended by itself with an answer, and it was wrong",
    "context overflow": "a limit of tokens cut the attempt off",
    "out of turns": "the attempt used all its turns without an end",
    "failed": "the attempt itself failed: an engine or an environment broke",
}
"""What each pattern means."""
OF_STATUS = {"truncated": "context overflow", "max_turns": "out of turns", "failed": "failed"}
ARGUMENTS, FORMAT = ("bad_arguments",), ("malformed", "too_many_calls", NO_ANSWER)
NOT_FOUND = re.compile(
    "not found|no such|does not exist|nothing (?:was )?found|there is no\\b|unknown (?:name|file|page)", re.IGNORECASE
)
COLUMNS = ("turns", "status", "stop_reason")


def pattern_of(call: Mapping[str, Any]) -> str | None:
    """Return the pattern of a call's failure; None of one that did not fail."""
    if call.get("ok"):
        return None
    error = str(call.get("error"))
    if error in ARGUMENTS:
        return "argument error"
    if error in FORMAT:
        return "format error"
    if error == "unknown_tool" or NOT_FOUND.search(str(call.get("result"))):
        return "not found"
    return "tool error"


def patterns_by_row(table: pa.Table) -> list[list[str]]:
    """Return the patterns of each row of a table with COLUMNS and, where it was scored, `success`."""
    statuses, reasons = (table.column(name).to_pylist() for name in ("status", "stop_reason"))
    rows = zip(recorded_calls(table), statuses, reasons, values_in(table, "success"), strict=True)
    return [sorted(_patterns(*row)) for row in rows]


def _patterns(calls: Sequence[Mapping[str, Any]], status: str, reason: str, success: bool | None) -> set[str]:
    found = {pattern for call in calls if (pattern := pattern_of(call))}
    unanswered = any(call.get("error") == NO_ANSWER for call in calls)
    if status == "completed" and success is False and not unanswered:
        found.add("false completion")
    if status in OF_STATUS:
        found.add(OF_STATUS[status])
    return found


def counted(rows: Iterable[Sequence[str]]) -> dict[str, int]:
    """Return in how many rows each pattern was, the most frequent first."""
    counts = Counter(pattern for row in rows for pattern in row)
    return dict(counts.most_common())


def failures(table: pa.Table) -> list[dict[str, Any]]:
    """Return every call of a table that failed: its `row` there, its `turn` and that turn's `action`, its `pattern`."""
    found = []
    for row, calls in enumerate(calls_by_row(table)):
        if not all(call.get("ok") for call in calls):
            turns = table.column("turns")[row].as_py()
            found += [
                {"row": row, **call, "action": turns[call["turn"]]["action"], "pattern": pattern_of(call)}
                for call in calls
                if not call.get("ok")
            ]
    return found
