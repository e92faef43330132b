"""The numbers of scored shards: rewards, success, pass@k, spread in groups, and what was not judged."""

# pyarrow makes the functions of pyarrow.compute at import, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

import json
from collections import Counter
from collections.abc import Iterable, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from nanoskyrl.algos.shaping import has_spread
from nanoskyrl.stages.core.metrics import Value, grouped, mean, variance
from nanoskyrl.stages.core.rows import counts_in, words_in

SUMMARY_COLUMNS = ("is_last_step", "score_status", "sample", "env", "reward", "reward_parts", "success", "group_id")


def summary(tables: Iterable[pa.Table]) -> dict[str, Value]:
    """Return the numbers of scored shards; trajectories count once, however many rows they have."""
    statuses, texts, envs = Counter[str](), Counter[str](), Counter[str]()
    size, rows = 1, list[tuple[str, str, float, bool | None]]()  # environment, group, reward and success
    for table in tables:
        last = table.select(SUMMARY_COLUMNS).filter(table.column("is_last_step"))
        statuses.update(counts_in(last.column("score_status")))
        envs.update(counts_in(last.column("env")))
        size = max(size, 1 + (pc.max(last.column("sample")).as_py() or 0))
        known = last.filter(pc.is_valid(last.column("reward")))
        texts.update(counts_in(known.column("reward_parts")))
        verdicts = (known.column(name).to_pylist() for name in ("reward", "success"))
        rows += zip(*(words_in(known.column(name)) for name in ("env", "group_id")), *verdicts, strict=True)
    groups = grouped((group, reward if success is None else float(success)) for _, group, reward, success in rows)
    spread = {group: variance(values) for group, values in groups.items() if len(values) > 1}
    parts = grouped(
        (name, value)
        for text, count in texts.items()
        for name, value in json.loads(text).items()
        if value is not None
        for _ in range(count)
    )
    by_env = {env: [row for row in rows if row[0] == env] for env in envs}
    return {
        **_means("reward", rows),
        f"reward/avg_pass_at_{size}": mean(float(max(values) > 0) for values in groups.values()),
        "reward/groups_with_signal": mean(float(has_spread(values)) for values in groups.values() if len(values) > 1),
        **{f"reward/part/{name}": mean(values) for name, values in sorted(parts.items())},
        **{
            f"reward/{env}/variance_per_prompt": mean(spread[group] for group in {row[1] for row in of} & spread.keys())
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


def _means(place: str, rows: Sequence[tuple[str, str, float, bool | None]]) -> dict[str, Value]:
    solved = [float(success) for *_, success in rows if success is not None]
    return {f"{place}/avg_raw_reward": mean(row[2] for row in rows), f"{place}/success": mean(solved)}
