"""The columns of `advantage`: why a trajectory is left out, what the estimator says of the others, and their numbers.

The whole batch is one: groups are looked at across all of its parts. A row that is not
kept has a reason, and nulls where a number would be trained on.
"""

# pyarrow makes the functions of pyarrow.compute at import, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nanoskyrl.algos.estimators.base import Batch, Estimates, Estimator, Numbers
from nanoskyrl.algos.shaping import first_groups, groups_with_spread, has_spread, is_overlong, overlong_punishment
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.metrics import Value, mean
from nanoskyrl.stages.core.registry import plugin_errors
from nanoskyrl.stages.core.rows import counts_in, list_column, one_chunk, rows_where
from nanoskyrl.stages.core.trajectory import schema_of, tokens
from nanoskyrl.stages.learning.advantage_config import AdvantageConfig
from nanoskyrl.stages.learning.kl_in_reward import Passed, penalties
from nanoskyrl.stages.learning.trajectories import MASK, ScoredTrajectories, batch_of, by_environment

PASSED = ("old_logprobs", "ref_logprobs", "values")
"""Columns that models give."""
SUMMARY_COLUMNS = ("kept", "drop_reason", "advantages", "is_last_step", "group_id", "reward", "shaped_reward")


def drop_reasons(trajectories: ScoredTrajectories, config: AdvantageConfig) -> list[str | None]:
    """Return why each trajectory is left out, None where it is kept.

    Raises:
        SettingsError: a group has one scored member, under `singleton = error`.
    """
    groups, rewards = trajectories.groups, trajectories.rewards
    scored = Counter(group for group, reward in zip(groups, rewards, strict=True) if reward is not None)
    if config.singleton == "error" and (alone := next((g for g in groups if scored[g] == 1), None)) is not None:
        raise SettingsError(
            f"group `{alone}` has one scored trajectory",
            hint="Raise `rollout.n_samples_per_prompt`, or allow it with `advantage.singleton`",
        )
    spread = groups_with_spread(groups, trajectories.metrics)
    first = first_groups(groups, spread, config.max_groups)
    left_out = {
        "singleton": {group for group in scored if config.singleton == "drop" and scored[group] == 1},
        "zero_variance": {
            group for group in scored if config.drop_zero_variance and scored[group] > 1 and group not in spread
        },
        "surplus": spread - first,
    }
    overlong = [config.overlong_filter and is_overlong(reason) for reason in trajectories.stop_reasons]
    holds = {
        "untrainable": ~trajectories.trainable,
        "failed": trajectories.failed,
        "unscored": np.array([reward is None for reward in rewards], bool),
        "overlong": np.array(overlong, bool),
        **{name: np.array([group in of for group in groups], bool) for name, of in left_out.items()},
    }
    names = [*holds, None]
    which = np.select(list(holds.values()), range(len(holds)), default=len(holds))
    return [names[place] for place in which.tolist()]


def rows_needed(trajectories: ScoredTrajectories, reasons: Sequence[str | None], config: AdvantageConfig) -> set[int]:
    """Return the rows that models are asked about: those kept, and those whose penalty enters their group's mean."""
    enters = [reason is None or (config.use_kl_in_reward and reason == "overlong") for reason in reasons]
    return set(np.flatnonzero(np.array(enters, bool)[trajectories.of_row]).tolist())


def looks_at_tokens(config: AdvantageConfig, estimator: Estimator) -> bool:
    """Say whether more is needed of a batch's tokens than how many a row has."""
    return estimator.numbers is None or config.use_kl_in_reward


@dataclass(slots=True, kw_only=True)
class AdvantageColumns:
    """The columns of `advantage`, one value a row of the whole batch."""

    kept: np.ndarray
    drop_reason: list[str | None]
    shaped_reward: list[float | None]
    numbers: np.ndarray | None
    """The advantage of all sampled tokens of a row; None: each token has its own, in `tokens`."""
    tokens: dict[str, list[np.ndarray | None]]
    """Columns with an array a row; None in rows that are not kept. Those that are not here are null."""

    def of_rows(self, start: int, end: int) -> "AdvantageColumns":
        """Return the columns of some rows."""
        return AdvantageColumns(
            kept=self.kept[start:end], drop_reason=self.drop_reason[start:end],
            shaped_reward=self.shaped_reward[start:end],
            numbers=None if self.numbers is None else self.numbers[start:end],
            tokens={name: of[start:end] for name, of in self.tokens.items()},
        )  # fmt: skip


def estimate(
    trajectories: ScoredTrajectories,
    reasons: Sequence[str | None],
    passed: Passed,
    config: AdvantageConfig,
    estimator: Estimator,
) -> AdvantageColumns:
    """Return the columns of `advantage`."""
    found = penalties(passed, config, rows_needed(trajectories, reasons, config))
    rewards = _shaped(trajectories, config)
    totals = rewards
    if found is not None:
        totals = [
            None if reward is None else reward - (0.0 if penalty is None else float(penalty.sum()))
            for reward, penalty in zip(rewards, trajectories.joined(found), strict=True)
        ]
    numbers, of_tokens = None, dict[str, list[np.ndarray | None]]()
    if estimator.numbers is not None:
        batch = Batch(groups=trajectories.groups, rewards=totals, masks=(), penalties=(), values=())
        with plugin_errors(f"estimator `{estimator.name}`"):
            (of_each,) = by_environment(
                trajectories.envs, batch, lambda of_env: (checked_numbers(estimator, of_env, config),)
            )
        numbers = np.array([0.0 if value is None else value for value in of_each], np.float64)[trajectories.of_row]
    else:
        # A penalty falls on its own token where the estimator knows tokens, else on the whole.
        batch = batch_of(
            trajectories, rewards if estimator.by_token else totals, [reason is None for reason in reasons],
            penalties=found if estimator.by_token else None, values=passed.columns.get("values"),
        )  # fmt: skip
        with plugin_errors(f"estimator `{estimator.name}`"):
            found_rows = by_environment(
                trajectories.envs, batch, lambda of_env: _columns_of(checked_estimates(estimator, of_env, config))
            )
        of_tokens = {
            name: trajectories.by_row(of) for name, of in zip(("advantages", "returns"), found_rows, strict=True)
        }
    of_row = trajectories.of_row.tolist()
    drop_reason = [reasons[place] for place in of_row]
    of_tokens |= passed.columns
    return AdvantageColumns(
        kept=np.array([reason is None for reason in drop_reason], bool), drop_reason=drop_reason,
        shaped_reward=[totals[place] for place in of_row], numbers=numbers,
        tokens={
            name: [value if reason is None else None for value, reason in zip(of, drop_reason, strict=True)]
            for name, of in of_tokens.items()
        },
    )  # fmt: skip


def checked_numbers(estimator: Estimator, batch: Batch, config: AdvantageConfig) -> Numbers:
    """Return an estimator's number of each trajectory, if they are numbers.

    Raises:
        TypeError, ValueError: it returned something else, of another length, or not finite.
    """
    assert estimator.numbers is not None
    found = estimator.numbers(batch, config)
    if not isinstance(found, list) or len(found) != len(batch.groups):
        raise ValueError(f"its numbers are not a list of {len(batch.groups)}, one a trajectory")
    for number, reward in zip(found, batch.rewards, strict=True):
        if number is None and reward is not None:
            raise ValueError("it has no number for a trajectory with a reward")
        if number is not None and not math.isfinite(number):
            raise ValueError("its advantages hold NaN or infinity")
    return found


def _columns_of(found: Estimates) -> tuple[list[np.ndarray | None], list[np.ndarray | None]]:
    return found.advantages, [None] * len(found.advantages) if found.returns is None else found.returns


def checked_estimates(estimator: Estimator, batch: Batch, config: AdvantageConfig) -> Estimates:
    """Return what an estimator says of tokens, if it is what one says.

    Raises:
        TypeError, ValueError: it is something else, of another length, or not finite.
    """
    found = estimator.estimate(batch, config)
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


def _shaped(trajectories: ScoredTrajectories, config: AdvantageConfig) -> Numbers:
    """Return the rewards with the punishment for length."""
    if not config.overlong_buffer_length:
        return trajectories.rewards
    assert config.overlong_max_length is not None
    return [
        # Without tokens it is not trained on, and there is no length to punish.
        None if reward is None or longest is None else reward + overlong_punishment(
            longest, max_length=config.overlong_max_length, buffer_length=config.overlong_buffer_length,
            factor=config.overlong_factor,
        )
        for reward, longest in zip(trajectories.rewards, trajectories.longest_turns, strict=True)
    ]  # fmt: skip


def add_columns(table: pa.Table, columns: AdvantageColumns, start: int = 0) -> pa.Table:
    """Return a scored table with the columns of `advantage`.

    Args:
        table: A part of the batch.
        columns: Of the whole batch.
        start: The part's first row in it.
    """
    schema, here, given = schema_of("advantage"), slice(start, start + table.num_rows), set(table.column_names)
    kept = columns.kept[here]
    filled: dict[str, pa.Array] = {
        "shaped_reward": pa.array(columns.shaped_reward[here], pa.float64()),
        "kept": pa.array(kept),
        "drop_reason": pa.array(columns.drop_reason[here], pa.string()),
    }
    if columns.numbers is not None:
        filled["advantages"] = _on_sampled(table, columns.numbers[here], kept)
    for name, rows in columns.tokens.items():
        rows = [None if row is None else np.asarray(row, np.float32) for row in rows[here]]
        filled[name] = list_column(rows, pa.float32())

    def array(field: pa.Field) -> pa.Array | pa.ChunkedArray:
        if field.name in filled:
            return filled[field.name]
        if field.name in given:
            return table.column(field.name)
        return pa.nulls(table.num_rows, field.type)

    return pa.Table.from_arrays([array(field) for field in schema], schema=schema)


def _on_sampled(table: pa.Table, numbers: np.ndarray, kept: np.ndarray) -> pa.Array:
    """Return a list a row with its number on each sampled token and 0 on others; null where it is not kept."""
    masks = one_chunk(table.column(MASK))
    lengths = pc.fill_null(pc.list_value_length(masks), 0).to_numpy()
    sampled = masks.flatten().to_numpy() != 0
    with np.errstate(over="ignore"):  # `check` tells of infinities
        flat = np.where(sampled, np.repeat(numbers.astype(np.float32), lengths), np.float32(0))
    if not kept.all():
        flat, lengths = flat[np.repeat(kept, lengths)], np.where(kept, lengths, 0)
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    null = None if kept.all() else pa.array(~kept)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat), type=tokens(pa.float32()), mask=null)


def dropped_by_reason(table: pa.Table) -> Mapping[str, int]:
    """Return how many rows are not kept, by reason."""
    return {reason: count for reason, count in counts_in(table.column("drop_reason")).items() if reason is not None}


def summary(tables: Iterable[pa.Table]) -> dict[str, Value]:
    """Return the numbers of a table of advantages."""
    kept = rows = 0
    reasons: Counter[str] = Counter()
    magnitudes: list[float] = []
    shaped: list[float] = []
    groups: dict[str, list[float]] = {}
    for table in tables:
        rows += table.num_rows
        kept += pc.sum(table.column("kept")).as_py() or 0
        reasons.update(dropped_by_reason(table))
        magnitudes += _largest(table.column("advantages"))
        last = rows_where(table.select(SUMMARY_COLUMNS), table.column("is_last_step"))
        shaped += pc.drop_null(last.column("shaped_reward")).to_pylist()
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


def _largest(column: pa.ChunkedArray) -> list[float]:
    """Return the largest size of the elements of each list that has some."""
    lists = one_chunk(column)
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    starts = (np.cumsum(lengths) - lengths)[lengths > 0]
    return np.maximum.reduceat(np.abs(lists.flatten().to_numpy()), starts).tolist() if len(starts) else []
