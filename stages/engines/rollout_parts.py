"""Parts of a rollout: whole groups of attempts, and the numbers of what came of them.

A part is written when all of its attempts have ended, so a killed rollout resumes at the
next one and ends with the same bytes.
"""

# pyarrow makes the functions of pyarrow.compute at import, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from nanoskyrl.envs.base import Task
from nanoskyrl.envs.graders.kinds import NO_ANSWER, UNANSWERED
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.metrics import Stopwatch, Value, mean
from nanoskyrl.stages.core.rows import calls_to_json, counts_in
from nanoskyrl.stages.engines.base import Engine, TokenEngine

SUMMARY_COLUMNS = ("stop_reason", "completion_tokens", "turns")


def in_parts(tasks: Sequence[Task], rows_per_part: int, n_samples: int, first: int = 0) -> dict[int, Sequence[Task]]:
    """Return the tasks of each part by its index, which begins at first: whole groups, of at least so many rows."""
    groups = -(-rows_per_part // n_samples)
    return {first + start // groups: tasks[start : start + groups] for start in range(0, len(tasks), groups)}


def load_policy(engine: Engine, policy: Path | None, name: str, watch: Stopwatch) -> None:
    """Give a policy to an engine that takes one.

    Raises:
        SettingsError: there is none, and the engine of this name needs one.
    """
    if isinstance(engine, TokenEngine):
        if policy is None:
            raise SettingsError(f"engine `{name}` needs a policy", hint="Name one with `--policy`")
        with watch("load"):
            engine.load(policy)


def failed(table: pa.Table) -> dict[str, int]:
    """Return how many rows failed, if any."""
    return {word: count for word, count in counts_in(table.column("status")).items() if word == "failed"}


def summary(tables: Iterator[pa.Table]) -> dict[str, Value]:
    """Return the numbers of a rollout: counts, lengths, turns, calls, and how the attempts ended."""
    reasons: Counter[str] = Counter()
    written: Counter[str] = Counter()  # the calls of a turn, as text
    rows, tokens, turns = 0, [], []
    no_calls = {calls_to_json([]), calls_to_json([UNANSWERED])}
    for table in tables:
        reasons.update(table.column("stop_reason").to_pylist())
        rows += table.num_rows
        tokens += [count for count in table.column("completion_tokens").to_pylist() if count is not None]
        turns += pc.list_value_length(table.column("turns")).to_pylist()
        flat = table.column("turns").combine_chunks().flatten()
        written.update(text for text in flat.field("tool_calls").to_pylist() if text not in no_calls)
    calls = [(count, call) for text, count in written.items() for call in json.loads(text)]
    return {
        "rollout/rows": rows,
        "rollout/response_tokens/mean": mean(tokens),
        "rollout/response_tokens/total": sum(tokens) if tokens else None,
        "rollout/turns/mean": mean(turns),
        "rollout/turns_with_tool_calls": written.total(),
        "rollout/tool_calls": sum(count for count, call in calls if call["error"] != NO_ANSWER),
        "rollout/failed_calls": sum(count for count, call in calls if not call["ok"] and call["error"] != NO_ANSWER),
        **{f"rollout/stop_reason/{reason}": count for reason, count in sorted(reasons.items())},
    }
