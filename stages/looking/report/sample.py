"""The trajectories that a report carries: a sample spread over steps and groups, and what a reader sees of each."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from nanoskyrl.envs.tool_formats.own import calls_in_words
from nanoskyrl.stages.core.manifest import STAYS_LOCAL, read_manifest
from nanoskyrl.stages.core.metrics import grouped
from nanoskyrl.stages.core.rows import from_table
from nanoskyrl.stages.core.safe_text import printable
from nanoskyrl.stages.core.trajectory import Trajectory
from nanoskyrl.stages.looking.error_patterns import patterns_by_row
from nanoskyrl.stages.looking.find_rows import RowSource, of_step, select, whole_rows
from nanoskyrl.stages.looking.report.runs import ReportedRun, spread
from nanoskyrl.stages.looking.tokens import TokenFacts, token_facts, tokenizer_for

STEPS, GROUPS, ATTEMPTS = 12, 8, 4
"""Sampled at most: steps of a run, groups of a step, attempts of a group (best, worst and between)."""
BYTES = 3_000_000
"""Of JSON that the trajectories of all runs may take."""
TEXT, TOKENS = 6000, 1500
"""Characters of one message and tokens of one response that are shown; more is cut, and said."""


def sampled(one: ReportedRun, index: int, budget: int) -> tuple[list[dict[str, Any]], int]:
    """Return trajectories of a run for the page, and how many rows the run has.

    Args:
        one: The run.
        index: Its number in the report.
        budget: Bytes of JSON; later ones that do not fit are left out.
    """
    by_step = {step: sources for step in one.run.steps() if (sources := of_step(one.run, step))}
    total = sum(read_manifest(sources[0].path.parent).rows_out for sources in by_step.values())
    steps = spread(list(by_step), STEPS)
    # The last step, the first, and those between: what does not fit any more is from the middle.
    ends_first = dict.fromkeys([*steps[-1:], *steps])
    found: list[dict[str, Any]] = []
    for record in (record for step in ends_first for record in _of_step(one, index, step, by_step[step])):
        budget -= len(json.dumps(record))
        if budget < 0:
            break
        found.append(record)
    return sorted(found, key=lambda record: (record["step"], record["row"])), total


def _of_step(one: ReportedRun, index: int, step: int, sources: list[RowSource]) -> Iterator[dict[str, Any]]:
    if read_manifest(sources[0].path.parent).facts.get(STAYS_LOCAL):
        return
    table = select(sources, ("group_id", "trajectory_id", "reward")).table
    groups = list(grouped(zip(table.column("group_id").to_pylist(), range(table.num_rows), strict=True)).values())
    rewards = table.column("reward").to_pylist()
    chosen = []
    for at in spread(list(range(len(groups))), GROUPS):
        by_reward = sorted(groups[at], key=lambda row: (rewards[row] is not None, rewards[row] or 0.0))
        chosen += spread(by_reward, ATTEMPTS)
    found = table.take(sorted(chosen))
    rows = whole_rows(sources, found)
    patterns = patterns_by_row(rows)
    tokenizer = tokenizer_for(one.run.root / "policies")
    numbers = found.column("row").to_pylist()
    for at, t in enumerate(from_table(rows)):
        tokens = token_facts(rows.slice(at, 1), tokenizer)
        yield {"run": index, "step": step, "row": numbers[at], **_record(t, tokens, patterns[at])}


def _record(t: Trajectory, tokens: list[TokenFacts], patterns: list[str]) -> dict[str, Any]:
    calls = [(number, call) for number, turn in enumerate(t.turns) for call in turn.tool_calls]
    advantages = [token.advantage for token in tokens if token.advantage is not None]
    return {
        "id": t.trajectory_id, "task": printable(t.task_id), "env": printable(t.env), "group": t.group_id,
        "sample": t.sample, "status": t.status, "stop": t.stop_reason, "policy": t.policy_version,
        "reward": _short(t.reward), "success": t.success, "score": t.score_status,
        "parts": {printable(name): _short(value) for name, value in t.reward_parts.items()},
        "advantage": _short(sum(advantages) / len(advantages)) if advantages else None,
        "turns": len(t.turns), "length": t.completion_tokens, "patterns": patterns,
        "error": None if t.error is None else _cut(t.error),
        "meta": _cut(json.dumps(t.metadata, ensure_ascii=False)),
        "messages": [_message(message) for message in t.messages],
        "calls": [
            {
                "turn": number, "tool": None if call.tool is None else printable(call.tool),
                "args": _cut(json.dumps(call.args, ensure_ascii=False)), "ok": call.ok,
                "error": None if call.error is None else printable(call.error), "result": _cut(str(call.result)),
            }
            for number, call in calls
        ],
        "tokens": _columns(tokens),
    }  # fmt: skip


def _message(message: Mapping[str, Any]) -> list[str]:
    text = calls_in_words(str(message.get("content") or ""), message.get("tool_calls") or ())
    return [printable(str(message.get("role"))), _cut(text)]


def _cut(text: str) -> str:
    rest = len(text) - TEXT
    return printable(text) if rest <= 0 else f"{printable(text[:TEXT])} … {rest} more characters"


def _columns(tokens: list[TokenFacts]) -> dict[str, Any]:
    """Return the tokens as columns, which are smaller than rows; a column without a number is left out."""
    shown = tokens[:TOKENS]
    found: dict[str, Any] = {
        "text": [printable(token.text) or f"[{token.id}]" for token in shown],
        "mask": "".join("1" if token.sampled else "0" for token in shown),
        "left": len(tokens) - len(shown),
    }
    for name in ("logprob", "advantage", "ratio"):
        values = [_short(getattr(token, name)) for token in shown]
        if any(value is not None for value in values):
            found[name] = values
    return found


def _short(value: float | None) -> float | None:
    """Return a number with four digits: more only makes the page larger."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")
