"""The columns of `advantage`: why a trajectory is left out, what the estimator says of the others, and their numbers.

The whole batch is one: groups are looked at across all of its parts. A row that is not
kept has a reason, and nulls where a number would be trained on.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from nanoskyrl.algos.estimators.base import Batch, Estimates, Estimator
from nanoskyrl.algos.shaping import first_groups, groups_with_spread, has_spread, is_overlong, overlong_punishment
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.metrics import Value, mean
from nanoskyrl.stages.core.registry import plugin_errors
from nanoskyrl.stages.core.rows import list_column, row_arrays
from nanoskyrl.stages.core.trajectory import schema_of
from nanoskyrl.stages.learning.advantage_config import AdvantageConfig
from nanoskyrl.stages.learning.kl_in_reward import penalties
from nanoskyrl.stages.learning.trajectories import (
    ScoredTrajectories,
    ScoredTrajectory,
    batch_of,
    by_environment,
    estimates_by_row,
)

PASSED = ("old_logprobs", "ref_logprobs", "values")
"""Columns that models give."""
SUMMARY_COLUMNS = ("kept", "drop_reason", "advantages", "is_last_step", "group_id", "reward", "shaped_reward")
Rows = list[np.ndarray | None]


def drop_reasons(trajectories: ScoredTrajectories, config: AdvantageConfig) -> list[str | None]:
    """Return why each trajectory is left out, None where it is kept.

    Raises:
        SettingsError: a group has one scored member, under `singleton = error`.
    """
    groups, metrics = [t.group for t in trajectories], [t.metric for t in trajectories]
    scored = Counter(t.group for t in trajectories if t.reward is not None)
    if config.singleton == "error" and (alone := next((g for g in groups if scored[g] == 1), None)) is not None:
        raise SettingsError(
            f"group `{alone}` has one scored trajectory",
            hint="Raise `rollout.n_samples_per_prompt`, or allow it with `advantage.singleton`",
        )
    spread = groups_with_spread(groups, metrics)
    first = first_groups(groups, spread, config.max_groups)

    def reason(trajectory: ScoredTrajectory) -> str | None:
        group = trajectory.group
        holds = {
            "untrainable": not trajectory.trainable,
            "failed": trajectory.failed,
            "unscored": trajectory.reward is None,
            "overlong": config.overlong_filter and is_overlong(trajectory.stop_reason),
            "singleton": config.singleton == "drop" and scored[group] == 1,
            "zero_variance": config.drop_zero_variance and scored[group] > 1 and group not in spread,
            "surplus": config.max_groups is not None and group in spread and group not in first,
        }
        return next((name for name, it_does in holds.items() if it_does), None)

    return [reason(trajectory) for trajectory in trajectories]


def rows_needed(trajectories: ScoredTrajectories, reasons: Sequence[str | None], config: AdvantageConfig) -> set[int]:
    """Return the rows that models are asked about: those kept, and those whose penalty enters their group's mean."""
    return {
        row
        for trajectory, reason in zip(trajectories, reasons, strict=True)
        if reason is None or (config.use_kl_in_reward and reason == "overlong")
        for row in trajectory.rows
    }


def estimate(
    trajectories: ScoredTrajectories,
    reasons: Sequence[str | None],
    passed: Mapping[str, Rows],
    config: AdvantageConfig,
    estimator: Estimator,
) -> dict[str, list[Any]]:
    """Return the columns of `advantage`, one value a row of the whole batch."""
    kept = [reason is None for reason in reasons]
    found = penalties(passed, trajectories.masks, config, rows_needed(trajectories, reasons, config))
    rewards = [_shaped(trajectory, config) for trajectory in trajectories]
    joined = [None if found is None else trajectories.joined(trajectory, found) for trajectory in trajectories]
    totals = [
        None if reward is None else reward - (0.0 if penalty is None else float(penalty.sum()))
        for reward, penalty in zip(rewards, joined, strict=True)
    ]
    # A penalty falls on its own token where the estimator knows tokens, else on the whole.
    batch = batch_of(
        trajectories, rewards if estimator.by_token else totals, kept,
        penalties=found if estimator.by_token else None, values=passed.get("values"),
    )  # fmt: skip
    with plugin_errors(f"estimator `{estimator.name}`"):
        estimates = by_environment(
            trajectories, batch, lambda of_env: checked_estimates(estimator.estimate(of_env, config), of_env)
        )
    advantages, returns = estimates_by_row(trajectories, estimates)
    rows = len(trajectories.masks)
    columns: dict[str, list[Any]] = {
        "shaped_reward": [None] * rows, "kept": [False] * rows, "drop_reason": [None] * rows,
        "advantages": advantages, "returns": returns,
        **{name: list(passed.get(name) or [None] * rows) for name in PASSED},
    }  # fmt: skip
    for trajectory, reason, total in zip(trajectories, reasons, totals, strict=True):
        for row in trajectory.rows:
            columns["shaped_reward"][row] = total
            columns["kept"][row], columns["drop_reason"][row] = reason is None, reason
            if reason is not None:
                for name in ("advantages", "returns", *PASSED):
                    columns[name][row] = None
    return columns


def checked_estimates(found: Any, batch: Batch) -> Estimates:
    """Return what an estimator said, if it is what one says.

    Raises:
        TypeError, ValueError: it is something else, of another length, or not finite.
    """
    if not isinstance(found, Estimates):
        raise TypeError(f"it returned {type(found).__name__}, not Estimates")
    for name, rows in (("advantages", found.advantages), ("returns", found.returns)):
        if rows is None and name == "returns":
            continue
        if not isinstance(rows, list) or len(rows) != len(batch.masks):
            raise ValueError(f"its {name} are not a list of {len(batch.masks)} arrays, one a trajectory")
        for row, mask, reward in zip(rows, batch.masks, batch.rewards, strict=True):
            if row is None and (reward is None or not mask.any()):
                continue
            if not isinstance(row, np.ndarray) or row.shape != mask.shape:
                raise ValueError(f"its {name} of a trajectory of {len(mask)} tokens are no array of that length")
            if not np.isfinite(row).all():
                raise ValueError(f"its {name} hold NaN or infinity")
            if (row[mask == 0] != 0).any():
                raise ValueError(f"its {name} are not 0 where nothing is trained")
    return found


def _shaped(trajectory: ScoredTrajectory, config: AdvantageConfig) -> float | None:
    if trajectory.reward is None or not config.overlong_buffer_length:
        return trajectory.reward
    if trajectory.longest_turn is None:  # without tokens it is not trained on, and there is no length to punish
        return None
    assert config.overlong_max_length is not None
    return trajectory.reward + overlong_punishment(
        trajectory.longest_turn, max_length=config.overlong_max_length,
        buffer_length=config.overlong_buffer_length, factor=config.overlong_factor,
    )  # fmt: skip


def add_columns(table: pa.Table, columns: Mapping[str, Sequence[Any]]) -> pa.Table:
    """Return a scored table with the columns of `advantage`."""
    schema = schema_of("advantage")

    def array(name: str) -> pa.Array | pa.ChunkedArray:
        if name not in columns:
            return table.column(name)
        of = schema.field(name).type
        if pa.types.is_list(of):
            rows = [None if row is None else np.asarray(row, np.float32) for row in columns[name]]
            return list_column(rows, of.value_type)
        return pa.array(columns[name], of)

    return pa.Table.from_arrays([array(name) for name in schema.names], schema=schema)


def dropped_by_reason(table: pa.Table) -> Mapping[str, int]:
    """Return how many rows are not kept, by reason."""
    return Counter(reason for reason in table.column("drop_reason").to_pylist() if reason is not None)


def summary(tables: Iterable[pa.Table]) -> dict[str, Value]:
    """Return the numbers of a table of advantages."""
    kept = rows = 0
    reasons: Counter[str] = Counter()
    magnitudes: list[float] = []
    shaped: list[float] = []
    groups: dict[str, list[float]] = {}
    for table in tables:
        rows += table.num_rows
        kept += sum(table.column("kept").to_pylist())
        reasons.update(dropped_by_reason(table))
        values = [row for row in row_arrays(table.column("advantages")) if row is not None and len(row)]
        magnitudes += [float(np.abs(row).max()) for row in values]
        last = table.filter(table.column("is_last_step"))
        shaped += [value for value in last.column("shaped_reward").to_pylist() if value is not None]
        for group, reward in zip(last.column("group_id").to_pylist(), last.column("reward").to_pylist(), strict=True):
            if reward is not None:
                groups.setdefault(group, []).append(reward)
    return {
        "advantage/rows": rows,
        "advantage/kept": kept,
        "advantage/abs/mean": mean(magnitudes),
        "advantage/shaped_reward/mean": mean(shaped),
        "advantage/zero_variance_groups": mean(
            float(not has_spread(group)) for group in groups.values() if len(group) > 1
        ),
        "advantage/singleton_groups": sum(len(group) == 1 for group in groups.values()),
        **{f"advantage/dropped/{reason}": count for reason, count in sorted(reasons.items())},
    }
