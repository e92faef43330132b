"""The numbers of scored shards: rewards, success, pass@k, spread in groups, and what was not judged."""

# pyarrow makes the functions of pyarrow.compute at import, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

import json
from collections import Counter
from collections.abc import Iterable
from itertools import chain, compress, repeat
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from nanoskyrl.algos.shaping import has_spread
from nanoskyrl.stages.core.metrics import Value, grouped, mean, variance
from nanoskyrl.stages.core.rows import counts_in, rows_where, words_in

SUMMARY_COLUMNS = ("is_last_step", "score_status", "sample", "env", "reward", "reward_parts", "success", "group_id")


def summary(tables: Iterable[pa.Table]) -> dict[str, Value]:
    """Return the numbers of scored shards; trajectories count once, however many rows they have."""
    statuses, texts, envs = Counter[str](), Counter[str](), Counter[str]()
    size, rows = 1, _Rows([], [], [], [])
    for table in tables:
        last = rows_where(table.select(SUMMARY_COLUMNS), table.column("is_last_step"))
        statuses.update(counts_in(last.column("score_status")))
        envs.update(counts_in(last.column("env")))
        size = max(size, 1 + (pc.max(last.column("sample")).as_py() or 0))
        known = rows_where(last, pc.is_valid(last.column("reward")))
        texts.update(counts_in(known.column("reward_parts")))
        rows.envs.extend(words_in(known.column("env")))
        rows.groups.extend(words_in(known.column("group_id")))
        rows.rewards.extend(known.column("reward").to_pylist())
        rows.successes.extend(known.column("success").cast(pa.float64()).to_pylist())
    metrics = (
        reward if success is None else success for success, reward in zip(rows.successes, rows.rewards, strict=True)
    )
    groups = grouped(zip(rows.groups, metrics, strict=True))
    spread = {group: variance(values) for group, values in groups.items() if len(values) > 1}
    parts = grouped(
        (name, repeat(value, count))
        for text, count in texts.items()
        for name, value in json.loads(text).items()
        if value is not None
    )
    by_env = {env: rows.of(env) for env in envs} if len(envs) > 1 else dict.fromkeys(envs, rows)
    return {
        **_means("reward", rows),
        f"reward/avg_pass_at_{size}": mean(float(max(values) > 0) for values in groups.values()),
        "reward/groups_with_signal": mean(float(has_spread(values)) for values in groups.values() if len(values) > 1),
        **{f"reward/part/{name}": mean(chain(*values)) for name, values in sorted(parts.items())},
        **{
            f"reward/{env}/variance_per_prompt": mean(spread[group] for group in set(of.groups) & spread.keys())
            for env, of in by_env.items()
        },
        **{
            name: value
            for env, of in by_env.items()
            if len(by_env) > 1
            for name, value in _means(f"reward/{env}", of).items()
        },
        **{f"score/status/{status}": count for status, count in sorted(statuses.items())},
    }


class _Rows(NamedTuple):
    """What is known of trajectories with a reward, column by column."""

    envs: list[str]
    groups: list[str]
    rewards: list[float]
    successes: list[float | None]

    def of(self, env: str) -> "_Rows":
        """Return those of an environment."""
        of_env = [name == env for name in self.envs]
        envs, groups, rewards, successes = self
        return _Rows(
            list(compress(envs, of_env)), list(compress(groups, of_env)), list(compress(rewards, of_env)),
            list(compress(successes, of_env)),
        )  # fmt: skip


def _means(place: str, rows: _Rows) -> dict[str, Value]:
    solved = [success for success in rows.successes if success is not None]
    return {f"{place}/avg_raw_reward": mean(rows.rewards), f"{place}/success": mean(solved)}
