"""The numbers of an evaluation, from its scored shards alone.

Tasks are independent, samples of one task are not: intervals go over tasks. What was not
judged is counted apart and is never wrong; where a share says "of the samples", failed
attempts are among them.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from nanoskyrl.envs.graders.kinds import ANSWERED, NO_ANSWER
from nanoskyrl.eval.base import JUDGE_FAILED, Scored
from nanoskyrl.eval.passk import mean_interval, pass_at_k
from nanoskyrl.stages.core.metrics import grouped
from nanoskyrl.stages.core.rows import from_table
from nanoskyrl.stages.core.trajectory import Trajectory

KS = (1, 2, 4, 8, 16, 32, 64)
MILLION = 1_000_000
COUNTS = ("turns", "calls_valid", "calls_invalid", "calls_failed")
"""What is counted of an attempt, and kept among the parts of its score where its turns are withheld."""
INVALID = ("malformed", "unknown_tool", "bad_arguments", "too_many_calls")
"""Errors of calls that were written wrongly; all others were carried out, and failed."""


def counts_of(row: Trajectory) -> dict[str, float]:
    """Return the turns and the tool calls of an attempt by kind."""
    calls = [call for turn in row.turns for call in turn.tool_calls if call.error != NO_ANSWER]
    invalid = sum(not call.ok and call.error in INVALID for call in calls)
    valid = sum(call.ok for call in calls)
    numbers = (len(row.turns), valid, invalid, len(calls) - valid - invalid)
    return {name: float(number) for name, number in zip(COUNTS, numbers, strict=True)}


def summarize(
    tables: Iterable[pa.Table], n_samples: int, *, ks: Sequence[int] = (), prices: Mapping[str, float] | None = None
) -> tuple[dict[str, Any], list[Scored]]:
    """Return the numbers of scored shards, and the judged attempts for a benchmark's own.

    Args:
        tables: The shards of an evaluation.
        n_samples: Samples of each task.
        ks: pass@k for these; none: every power of two up to `n_samples`.
        prices: What a million `prompt` and `completion` tokens cost; None: not known.
    """
    scored: list[Scored] = []
    statuses: Counter[str] = Counter()
    score_statuses: Counter[str] = Counter()
    prompt: list[int | None] = []
    completion: list[int | None] = []
    counted: list[dict[str, float]] = []
    for table in tables:
        for row, asked, written in _whole(table):
            statuses[row.status] += 1
            score_statuses[str(row.score_status)] += 1
            prompt.append(asked)
            completion.append(written)
            counted.append(counts_of(row) | {name: kept for name in COUNTS if (kept := row.reward_parts.get(name))})
            scored.append(
                Scored(
                    task_id=row.task_id, sample=row.sample, success=row.success, reward=row.reward,
                    parts=row.reward_parts, metadata=row.metadata,
                )
            )  # fmt: skip
    by_task = successes_by_task(scored)
    interval = mean_interval([sum(values) / len(values) for values in by_task.values()])
    samples = len(scored)
    wanted = [k for k in (ks or KS) if k <= n_samples]
    passes = {
        f"pass_at_{k}": _mean([pass_at_k(len(v), int(sum(v)), k) for v in by_task.values() if len(v) >= k])
        for k in wanted
    }
    known = [row for row in scored if ANSWERED in row.parts]
    numbers = {
        "tasks": len(by_task),
        "samples": samples,
        "success": interval[0] if interval else None,
        "success_95": list(interval[1:]) if interval else None,
        **passes,
        "turns_mean": _mean([counts["turns"] for counts in counted]),
        "turns_p95": float(np.percentile([counts["turns"] for counts in counted], 95)) if samples else None,
        "tool_calls_valid": int(sum(counts["calls_valid"] for counts in counted)),
        "tool_calls_invalid": int(sum(counts["calls_invalid"] for counts in counted)),
        "tool_calls_failed": int(sum(counts["calls_failed"] for counts in counted)),
        "prompt_tokens": _total(prompt),
        "completion_tokens": _total(completion),
        "completion_tokens_mean": _mean([count for count in completion if count is not None]),
        # What some attempts cost is not what the evaluation cost.
        "cost": None if None in prompt or None in completion else cost(_total(prompt), _total(completion), prices),
        "truncated": statuses["truncated"] / samples if samples else None,
        "no_answer": sum(not row.parts[ANSWERED] for row in known) / len(known) if known else None,
        "judge_failures": sum(bool(row.parts.get(JUDGE_FAILED)) for row in scored),
        "not_scored": sum(count for status, count in score_statuses.items() if status != "scored"),
        "status": dict(sorted(statuses.items())),
        "score_status": dict(sorted(score_statuses.items())),
    }
    return numbers, scored


def successes_by_task(rows: Iterable[Scored]) -> dict[str, list[float]]:
    """Return 1 or 0 for each judged sample, by task; a task without a verdict is not there."""
    return grouped((row.task_id, float(row.success)) for row in rows if row.success is not None)


def _whole(table: pa.Table) -> Iterable[tuple[Trajectory, int | None, int | None]]:
    """Yield each attempt once, with the turns and the tokens of all its rows; None: a row does not say."""
    for rows in grouped((row.trajectory_id, row) for row in from_table(table)).values():
        whole = dataclasses.replace(rows[-1], turns=[turn for row in rows for turn in row.turns])
        counts = [row.prompt_tokens for row in rows], [row.completion_tokens for row in rows]
        prompt, completion = (None if None in of_rows else _total(of_rows) for of_rows in counts)
        yield whole, prompt, completion


def _total(counts: Sequence[int | None]) -> int | None:
    """Return the sum of the counts that are known; None where there is none."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def cost(prompt: int | None, completion: int | None, prices: Mapping[str, float] | None) -> float | None:
    """Return what so many tokens cost, in the prices' currency; None where prices or tokens are not known."""
    if prices is None or prompt is None or completion is None:
        return None
    return (prompt * prices["prompt"] + completion * prices["completion"]) / MILLION


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if len(values) else None
