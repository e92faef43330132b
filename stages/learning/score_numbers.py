"""The numbers of scored shards: rewards, success, pass@k, spread in groups, and what was not judged."""

# pyarrow makes the functions of pyarrow.compute at import, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

import json
from collections import Counter
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from nanoskyrl.algos.shaping import has_spread
from nanoskyrl.stages.core.metrics import Value, mean, variance
from nanoskyrl.stages.core.rows import counts_in

SUMMARY_COLUMNS = ("is_last_step", "score_status", "sample", "env", "reward", "reward_parts", "success", "group_id")


def summary(tables: Iterable[pa.Table]) -> dict[str, Value]:
    """Return the numbers of scored shards; trajectories count once, however many rows they have."""
    statuses: Counter[str] = Counter()
    texts: Counter[str] = Counter()
    rewards: list[float] = []
    successes: list[float] = []
    groups: dict[str, list[float]] = {}
    size = 1
    by_env: dict[str, tuple[list[float], list[float], set[str]]] = {}  # rewards, successes and groups of each
    for table in tables:
        last = table.select(SUMMARY_COLUMNS).filter(table.column("is_last_step"))
        statuses.update(counts_in(last.column("score_status")))
        size = max(size, 1 + (pc.max(last.column("sample")).as_py() or 0))
        known = last.filter(pc.is_valid(last.column("reward")))
        texts.update(counts_in(known.column("reward_parts")))
        given = known.column("reward").to_pylist()
        solved = [None if value is None else float(value) for value in known.column("success").to_pylist()]
        rewards += given
        successes += [value for value in solved if value is not None]
        for name in counts_in(last.column("env")):
            by_env.setdefault(name, ([], [], set()))
        names, of_groups = known.column("env").to_pylist(), known.column("group_id").to_pylist()
        for name, group, success, reward in zip(names, of_groups, solved, given, strict=True):
            groups.setdefault(group, []).append(reward if success is None else success)
            of_env = by_env[name]
            of_env[0].append(reward)
            if success is not None:
                of_env[1].append(success)
            of_env[2].add(group)
    parts: dict[str, list[float]] = {}
    for text, count in texts.items():
        for name, value in json.loads(text).items():
            parts.setdefault(name, []).extend([] if value is None else [value] * count)
    spread = {group: variance(values) for group, values in groups.items() if len(values) > 1}
    return {
        "reward/avg_raw_reward": mean(rewards),
        "reward/success": mean(successes),
        f"reward/avg_pass_at_{size}": mean(float(max(values) > 0) for values in groups.values()),
        "reward/groups_with_signal": mean(float(has_spread(values)) for values in groups.values() if len(values) > 1),
        **{f"reward/part/{name}": mean(values) for name, values in sorted(parts.items()) if values},
        **{
            f"reward/{name}/variance_per_prompt": mean(value for group, value in spread.items() if group in among)
            for name, (_, _, among) in by_env.items()
        },
        **{
            f"reward/{name}/{key}": mean(values)
            for name, (of_rewards, of_successes, _) in by_env.items()
            if len(by_env) > 1
            for key, values in (("avg_raw_reward", of_rewards), ("success", of_successes))
        },
        **{f"score/status/{status}": count for status, count in sorted(statuses.items())},
    }
