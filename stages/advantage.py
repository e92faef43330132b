"""Stage `advantage`: every sampled token gets its advantage, or its row the reason why not.

The estimator sees the rewards of a group's trajectories, each once, however many rows it
has, and returns one number a trajectory, which is written on every token it sampled. Rows
that are not kept stay in the shards with a reason and null advantages.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nanoskyrl.algos.advantages import has_spread
from nanoskyrl.stages.config import to_plain
from nanoskyrl.stages.errors import SettingsError
from nanoskyrl.stages.manifest import Head, Manifest, open_output, read_manifest
from nanoskyrl.stages.metrics import MetricsLog, Stopwatch, Value, mean
from nanoskyrl.stages.registry import lookup
from nanoskyrl.stages.shards import read_part, read_parts
from nanoskyrl.stages.trajectory import check, list_column, row_arrays, schema_of

SINGLETON = ("zero", "drop", "raw", "error")
OLD_LOGPROBS = ("rollout", "recompute")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig:
    """Which estimator, and what is left out of training."""

    estimator: str = "grpo"
    """grpo: group-normalised rewards."""
    eps: float = 1e-6
    """Added to the standard deviation of a group."""
    divide_by_std: bool = True
    """False leaves the difference from the group's mean."""
    singleton: str = "zero"
    """A group with one scored member: zero (advantage 0), drop, raw (the reward itself), or error."""
    drop_zero_variance: bool = False
    """Leave out groups whose rewards are all alike; else they stay, with advantage 0."""
    overlong_filter: bool = False
    """Leave out trajectories that did not end by themselves; their rewards still enter the group's mean."""
    old_logprobs: str = "rollout"
    """What ratios are taken against: rollout (the recorded log-probs, engine's drift and lag included), or
    recompute (under the policy that training starts from, by a forward pass here)."""
    max_tokens_per_micro_batch: int = 16384
    """Bound of a forward pass where old_logprobs is recompute."""

    def __post_init__(self) -> None:
        """Refuse words that mean nothing."""
        for name, allowed in (("singleton", SINGLETON), ("old_logprobs", OLD_LOGPROBS)):
            if getattr(self, name) not in allowed:
                raise SettingsError(
                    f"`advantage.{name}` must be {', '.join(allowed)}, not {getattr(self, name)!r}",
                    hint="Choose one of them",
                )
        if not 0 <= self.eps <= 1:
            raise SettingsError(f"`advantage.eps` must be 0 to 1, not {self.eps}", hint="1e-6 is usual")


def advantage(
    scored: Path,
    output: Path,
    config: AdvantageConfig,
    *,
    policy: Path | None = None,
    engine: Any = None,
    force: bool = False,
    log: MetricsLog = MetricsLog(),
) -> Manifest:
    """Turn the rewards of scored shards into advantages of tokens.

    Args:
        scored: Shards written by `score`.
        output: Directory for the shards with advantages.
        config: The estimator and the filters.
        policy: What training starts from; needed where old_logprobs is recompute.
        engine: A live `Learner` to compute log-probs with; else the policy is loaded here.
        force: Replace an output made under other settings.
        log: Where numbers go.

    Raises:
        InputError: the input is missing, unfinished, corrupt or not scored.
        SettingsError: an unknown estimator, a group of one under `singleton = error`, or no policy to recompute with.
    """
    watch = Stopwatch()
    lookup("estimator", config.estimator)
    source = read_manifest(scored, stage="score")
    recompute = config.old_logprobs == "recompute"
    if recompute and policy is None:
        raise SettingsError(
            "`advantage.old_logprobs` is recompute, but no policy is named", hint="Name one with `--policy`"
        )
    starting = None
    if recompute and policy is not None:
        from nanoskyrl.stages.policy import policy_digest

        starting = policy_digest(policy)
    head = Head(
        stage="advantage",
        settings={"advantage": to_plain(config)},
        inputs={"score": source.digest},
        policy=starting or source.policy,
    )
    with open_output(output, head, force=force, dropped=dropped_by_reason) as out:
        if out.manifest is not None:
            return out.manifest
        for index, part in enumerate(source.parts):
            if out.has_part(index):
                continue
            with watch("read"):
                table = read_part(scored / part.name, part.digest)
            check(table, "score")
            with watch("estimate"):
                table = add_advantages(table, config)
            if recompute and policy is not None:
                with watch("old_logprobs"):
                    table, engine = _add_old_logprobs(table, policy, engine, config)
            check(table, "advantage")
            with watch("write"):
                out.write_part(index, table)
        manifest = out.finish(rows_in=source.rows_out)
    log.write("advantage", {**summary(read_parts(output, manifest, SUMMARY_COLUMNS)), **watch.timings()})
    return manifest


def dropped_by_reason(table: pa.Table) -> Mapping[str, int]:
    """Return how many rows are not kept, by reason."""
    return Counter(reason for reason in table.column("drop_reason").to_pylist() if reason is not None)


def add_advantages(table: pa.Table, config: AdvantageConfig) -> pa.Table:
    """Return a scored table with the columns of `advantage`; groups must not straddle tables."""
    verdicts = _verdicts(table, config)
    rows = [verdicts[name] for name in table.column("trajectory_id").to_pylist()]
    masks = row_arrays(table.column("loss_mask"))
    advantages = [
        None if value is None or mask is None else np.where(mask != 0, np.float32(value), np.float32(0))
        for (value, _), mask in zip(rows, masks, strict=True)
    ]
    reasons = [reason for _, reason in rows]
    nothing = list_column([None] * table.num_rows, pa.float32())
    added = {
        "shaped_reward": table.column("reward"),
        "advantages": list_column(advantages, pa.float32()),
        "returns": nothing,
        "values": nothing,
        "old_logprobs": nothing,
        "ref_logprobs": nothing,
        "kept": pa.array([reason is None for reason in reasons], pa.bool_()),
        "drop_reason": pa.array(reasons, pa.string()),
    }
    schema = schema_of("advantage")
    return pa.Table.from_arrays(
        [added[name] if name in added else table.column(name) for name in schema.names], schema=schema
    )


def _verdicts(table: pa.Table, config: AdvantageConfig) -> dict[str, tuple[float | None, str | None]]:
    """Return advantage and drop_reason by trajectory: exactly one of them is None."""
    estimate = lookup("estimator", config.estimator)
    names = ("trajectory_id", "group_id", "reward", "status", "trainable")
    last = table.filter(table.column("is_last_step"))
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in last.select(list(names)).to_pylist():
        groups.setdefault(row["group_id"], []).append(row)
    verdicts: dict[str, tuple[float | None, str | None]] = {}
    for group_id, members in groups.items():
        # A failure is no verdict: it leaves the group, and what is left is the group.
        rewards = [None if member["status"] == "failed" else member["reward"] for member in members]
        scored = [reward for reward in rewards if reward is not None]
        values = estimate(rewards, eps=config.eps, divide_by_std=config.divide_by_std)
        if len(scored) == 1 and config.singleton == "error":
            raise SettingsError(
                f"group `{group_id}` has one scored trajectory",
                hint="Raise `rollout.n_samples_per_prompt`, or allow it with `advantage.singleton`",
            )
        if len(scored) == 1 and config.singleton == "raw":
            values = rewards
        for member, value in zip(members, values, strict=True):
            reason = _drop_reason(member, scored, config)
            verdicts[member["trajectory_id"]] = (value if reason is None else None, reason)
    return verdicts


def _drop_reason(member: Mapping[str, Any], scored: list[float], config: AdvantageConfig) -> str | None:
    if not member["trainable"]:
        return "untrainable"
    if member["status"] == "failed":
        return "failed"
    if member["reward"] is None:
        return "unscored"
    if config.overlong_filter and member["status"] != "completed":
        return "overlong"
    if len(scored) == 1:
        return "singleton" if config.singleton == "drop" else None
    if config.drop_zero_variance and not has_spread(scored):
        return "zero_variance"
    return None


def _add_old_logprobs(table: pa.Table, policy: Path, engine: Any, config: AdvantageConfig) -> tuple[pa.Table, Any]:
    """Return the table with old_logprobs of its kept rows, and the learner that computed them."""
    from nanoskyrl.stages.batching import read_sequences
    from nanoskyrl.stages.learner import Learner, one_temperature

    if engine is None:
        engine = Learner()
    engine.load(policy)
    kept = np.flatnonzero(table.column("kept").to_numpy()).tolist()
    sequences = read_sequences(table.take(kept))
    temperature = one_temperature(table.take(kept)) if kept else 1.0
    found: list[np.ndarray | None] = [None] * table.num_rows
    for row, values in zip(
        kept, engine.logprobs(sequences, temperature, config.max_tokens_per_micro_batch), strict=True
    ):
        found[row] = values
    index = table.schema.get_field_index("old_logprobs")
    return table.set_column(index, table.schema.field(index), list_column(found, pa.float32())), engine


SUMMARY_COLUMNS = ("kept", "drop_reason", "advantages", "is_last_step", "group_id", "reward")


def summary(tables: Iterable[pa.Table]) -> dict[str, Value]:
    """Return the numbers of a table of advantages."""
    kept = rows = 0
    reasons: Counter[str] = Counter()
    magnitudes: list[float] = []
    groups: dict[str, list[float]] = {}
    for table in tables:
        rows += table.num_rows
        kept += sum(table.column("kept").to_pylist())
        reasons.update(dropped_by_reason(table))
        values = [row for row in row_arrays(table.column("advantages")) if row is not None and len(row)]
        magnitudes += [float(np.abs(row).max()) for row in values]
        last = table.filter(table.column("is_last_step"))
        for group, reward in zip(last.column("group_id").to_pylist(), last.column("reward").to_pylist(), strict=True):
            if reward is not None:
                groups.setdefault(group, []).append(reward)
    return {
        "advantage/rows": rows,
        "advantage/kept": kept,
        "advantage/abs/mean": mean(magnitudes),
        "advantage/zero_variance_groups": mean(
            float(not has_spread(group)) for group in groups.values() if len(group) > 1
        ),
        "advantage/singleton_groups": sum(len(group) == 1 for group in groups.values()),
        **{f"advantage/dropped/{reason}": count for reason, count in sorted(reasons.items())},
    }
