"""Attempts by environment, as SkyRL with Fleet analyses them: turns, success, pass@n, variance, signal, errors."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanoskyrl.algos.shaping import has_spread
from nanoskyrl.stages.core.metrics import mean, variance
from nanoskyrl.stages.core.rows import values_in
from nanoskyrl.stages.looking.error_patterns import patterns_by_row
from nanoskyrl.stages.looking.find_rows import RowSource
from nanoskyrl.stages.looking.reading import HARD, LITTLE_SIGNAL, SOLVED
from nanoskyrl.stages.looking.row_facts import calls_by_row, fact

COLUMNS = (
    "trajectory_id", "is_last_step", "env", "group_id", "turns", "status", "stop_reason", "completion_tokens", "reward",
    "success",
)  # fmt: skip


@dataclass(slots=True)
class EnvironmentReport:
    """What the attempts in one environment came to; attempts count once, however many rows they have."""

    attempts: int = 0
    turns: int = 0
    calls: int = 0
    failed_calls: int = 0
    tokens: int = 0
    successes: list[float] = field(default_factory=list)
    """1 or 0 of each judged attempt."""
    rewards: list[float] = field(default_factory=list)
    groups: dict[tuple[int | None, str], list[float]] = field(default_factory=dict)
    """What each attempt of a group came to, by step and group: success, or the reward where that says nothing."""
    patterns: Counter[str] = field(default_factory=Counter)
    """Attempts that show each pattern of error."""

    @property
    def spreads(self) -> list[list[float]]:
        """The groups in which something can differ."""
        return [values for values in self.groups.values() if len(values) > 1]

    @property
    def signal(self) -> float | None:
        """The share of groups whose attempts came out differently."""
        return mean(float(has_spread(values)) for values in self.spreads)

    def to_plain(self) -> dict[str, Any]:
        """Return the numbers, JSON-ready."""
        per = self.attempts or 1
        sizes = [len(values) for values in self.groups.values()]
        return {
            "attempts": self.attempts,
            "groups": len(self.groups),
            "turns_mean": self.turns / per,
            "tool_calls_mean": self.calls / per,
            "failed_calls_mean": self.failed_calls / per,
            "tokens_mean": self.tokens / per,
            "success": mean(self.successes),
            "reward": mean(self.rewards),
            "n": max(sizes, default=0),
            "pass_at_n": mean(float(max(values) > 0) for values in self.groups.values()),
            "variance_per_prompt": mean(variance(values) for values in self.spreads),
            "signal": self.signal,
            "reading": self.reading(),
            "patterns": dict(self.patterns.most_common()),
        }

    def reading(self) -> str:
        """Return what the share of groups with signal says of the tasks."""
        signal, success = self.signal, mean(self.successes)
        if signal is None:
            return "no group of several judged attempts: nothing can be said of signal"
        if signal >= LITTLE_SIGNAL:
            return "enough groups differ to learn from"
        if success is not None and success >= SOLVED:
            return f"under {LITTLE_SIGNAL:.0%} of the groups differ: too easy"
        if success is not None and success <= HARD:
            return f"under {LITTLE_SIGNAL:.0%} of the groups differ: too hard"
        return f"under {LITTLE_SIGNAL:.0%} of the groups differ: each task is too hard or too easy"


def environment_reports(sources: Iterable[RowSource]) -> dict[str, EnvironmentReport]:
    """Return the report of each environment by its name, read part by part."""
    found: dict[str, EnvironmentReport] = {}
    for source in sources:
        table = source.read([name for name in COLUMNS if name in source.columns])
        calls, patterns = calls_by_row(table), patterns_by_row(table)
        fields: dict[str, Sequence[Any]] = {name: values_in(table, name) for name in COLUMNS if name != "turns"}
        turns = fact(table, "turns").fill_null(0).to_pylist()
        shown: dict[str, set[str]] = {}
        for row, env in enumerate(fields["env"]):
            report = found.setdefault(env, EnvironmentReport())
            report.turns += turns[row]
            report.calls += len(calls[row])
            report.failed_calls += sum(not call.get("ok") for call in calls[row])
            report.tokens += fields["completion_tokens"][row] or 0
            attempt = shown.setdefault(fields["trajectory_id"][row], set())
            report.patterns.update(each for each in dict.fromkeys(patterns[row]) if each not in attempt)
            attempt.update(patterns[row])
            if fields["is_last_step"][row]:
                _judge(report, source.step, fields, row)
    return found


def _judge(report: EnvironmentReport, step: int | None, fields: dict[str, Sequence[Any]], row: int) -> None:
    """Take an attempt's verdict from its last row."""
    report.attempts += 1
    reward, success = fields["reward"][row], fields["success"][row]
    if reward is None:
        return
    report.rewards.append(reward)
    if success is not None:
        report.successes.append(float(success))
    came_to = reward if success is None else float(success)
    report.groups.setdefault((step, fields["group_id"][row]), []).append(came_to)
