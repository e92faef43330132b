"""From rows of scored shards to the trajectories that estimators see, and back.

The whole batch is looked at at once, however it is cut into parts: groups, whitening and
dynamic sampling know no parts. Of each trajectory a few numbers are kept, of its tokens
only what an estimator asks for. One of several rows is joined in the order of its steps,
and what the estimator says of it is cut up again.
"""

# pyarrow makes the functions of pyarrow.compute at import, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nanoskyrl.algos.estimators.base import Batch, Numbers
from nanoskyrl.algos.shaping import metric_of
from nanoskyrl.stages.core.metrics import grouped
from nanoskyrl.stages.core.rows import one_chunk, row_arrays, words_in

COLUMNS = ("trajectory_id", "step_index", "group_id", "reward", "success", "status", "stop_reason", "trainable", "env")
"""What is read of each row to decide which are kept."""
LENGTHS = ("completion_tokens", "turns")
"""What is read besides where rewards are shaped by length."""
MASK = "loss_mask"
"""What is read besides where an estimator looks at tokens."""

Rows = Sequence[np.ndarray | None]
Column = list[Any]
"""One value a trajectory."""


def old_or_sampler_s(old: Rows | None, rollout: Rows) -> list[np.ndarray | None]:
    """Return each row's log-probs at the start of the update: those recomputed, else those it was sampled with.

    Args:
        old: [T] nats of each row's response tokens, None in rows that have none; None: no row has any.
        rollout: [T] nats under the policy that sampled.
    """
    return list(rollout) if old is None else [u if o is None else o for u, o in zip(rollout, old, strict=True)]


@dataclass(slots=True, kw_only=True)
class ScoredTrajectories:
    """All trajectories of a batch in the order of their first rows, and where their rows are."""

    groups: list[str]
    envs: list[str]
    rewards: Numbers
    """None where it failed or was not scored: a failure is no verdict."""
    successes: list[bool | None]
    failed: np.ndarray
    trainable: np.ndarray
    stop_reasons: list[str]
    """Of the last step."""
    longest_turns: list[int | None]
    """Tokens sampled in the longest turn; None: not known, or not read."""
    of_row: np.ndarray
    """Of each row of the batch, which trajectory it is of."""
    order: np.ndarray
    """Rows, trajectory after trajectory, each in the order of its steps."""
    starts: np.ndarray
    """Where each trajectory begins in that order, and the end."""
    masks: list[np.ndarray]
    """Of each row, where they were read; empty where the engine had no tokens."""

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def metrics(self) -> Numbers:
        """What spread is looked for in."""
        return [
            None if reward is None else metric_of(success, reward)
            for reward, success in zip(self.rewards, self.successes, strict=True)
        ]

    def joined(self, rows: Rows) -> list[np.ndarray | None]:
        """Return the numbers of each trajectory's tokens, from those of its rows; None if a row has none."""
        starts, order = self.starts.tolist(), self.order.tolist()
        return [_joined([rows[row] for row in order[start:end]]) for start, end in pairwise(starts)]

    def by_row(self, found: Rows) -> list[np.ndarray | None]:
        """Return the numbers of each row's tokens from those of each trajectory's."""
        rows: list[np.ndarray | None] = [None] * len(self.masks)
        starts, order = self.starts.tolist(), self.order.tolist()
        for numbers, (first, last) in zip(found, pairwise(starts), strict=True):
            start = 0
            for row in order[first:last]:
                end = start + len(self.masks[row])
                rows[row] = None if numbers is None else numbers[start:end]
                start = end
        return rows


def _joined(rows: Rows) -> np.ndarray | None:
    found = [row for row in rows if row is not None]
    if len(found) < len(rows):
        return None
    return found[0] if len(found) == 1 else np.concatenate(found)


def gather(tables: Iterable[pa.Table]) -> ScoredTrajectories:
    """Return the trajectories of these tables, which hold COLUMNS and, where they are needed, LENGTHS and MASK."""
    facts: list[pa.Table] = []
    longest: list[int | None] = []
    masks: list[np.ndarray] = []
    for table in tables:
        facts.append(table.select(COLUMNS))
        longest += _longest_turns(table) if LENGTHS[-1] in table.column_names else [None] * table.num_rows
        if MASK in table.column_names:
            masks += [np.zeros(0, np.int8) if mask is None else mask for mask in row_arrays(table.column(MASK))]
    whole = pa.concat_tables(facts)
    of_row = one_chunk(whole.column("trajectory_id")).dictionary_encode().indices.to_numpy()
    count = int(of_row.max()) + 1 if len(of_row) else 0
    # By trajectory, then step; rows of one step stay as they come.
    order = np.lexsort((whole.column("step_index").to_numpy(), of_row))
    starts = np.searchsorted(of_row[order], np.arange(count + 1))
    first = np.minimum.reduceat(order, starts[:-1]) if count else order
    trajectories = ScoredTrajectories(
        groups=words_in(whole.column("group_id").take(first)), envs=words_in(whole.column("env").take(first)),
        rewards=whole.column("reward").take(first).to_pylist(),
        successes=whole.column("success").take(first).to_pylist(),
        failed=_any(pc.equal(whole.column("status"), "failed"), of_row, count),
        trainable=~_any(pc.invert(whole.column("trainable")), of_row, count),
        stop_reasons=words_in(whole.column("stop_reason").take(_last(whole, order, starts))),
        longest_turns=_longest(longest, order, starts), of_row=of_row, order=order, starts=starts, masks=masks,
    )  # fmt: skip
    for place in np.flatnonzero(trajectories.failed).tolist():
        trajectories.rewards[place] = trajectories.successes[place] = None
    return trajectories


def _any(flags: pa.ChunkedArray, of_row: np.ndarray, count: int) -> np.ndarray:
    """Return of each trajectory whether a row's flag is set."""
    return np.bincount(of_row[flags.to_numpy()], minlength=count) > 0


def _last(table: pa.Table, order: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the row of each trajectory's last step; of several, the first."""
    steps = table.column("step_index").to_numpy()[order]
    last = order[starts[1:] - 1].copy()
    for place in np.flatnonzero(np.diff(starts) > 1).tolist():
        of_it = steps[starts[place] : starts[place + 1]]
        last[place] = order[starts[place] + int(np.searchsorted(of_it, of_it[-1]))]
    return last


def _longest(of_rows: list[int | None], order: np.ndarray, starts: np.ndarray) -> list[int | None]:
    if len(starts) == len(order) + 1:
        return of_rows
    of_each = ([of_rows[row] for row in order[start:end]] for start, end in pairwise(starts.tolist()))
    return [None if None in of_it else max(length for length in of_it if length is not None) for of_it in of_each]


def _longest_turns(table: pa.Table) -> list[int | None]:
    """Return the tokens of each row's longest turn, or all of its tokens where turns have no count; None: not known."""
    turns = one_chunk(table.column("turns"))
    counts = pa.table([pc.list_parent_indices(turns), turns.flatten().field("token_count")], names=["row", "count"])
    found = table.column("completion_tokens").to_pylist()
    for row in counts.group_by("row", use_threads=False).aggregate([("count", "max")]).to_pylist():
        found[row["row"]] = found[row["row"]] if row["count_max"] is None else row["count_max"]
    return found


def batch_of(
    trajectories: ScoredTrajectories,
    rewards: Numbers,
    kept: Sequence[bool],
    *,
    penalties: Rows | None = None,
    values: Rows | None = None,
) -> Batch:
    """Return what an estimator sees that looks at tokens.

    Args:
        trajectories: The trajectories.
        rewards: Of each trajectory.
        kept: Whether its tokens are trained on; its reward counts among its siblings' either way.
        penalties: Of each row's tokens, taken off their rewards.
        values: Of each row's tokens.
    """
    masks = [
        mask if is_kept else np.zeros_like(mask)
        for mask, is_kept in zip(trajectories.joined(trajectories.masks), kept, strict=True)
        if mask is not None
    ]

    def rows(of: Rows | None) -> list[np.ndarray | None]:
        if of is None:
            return [None] * len(masks)
        found = trajectories.joined(of)
        return [np.zeros(len(mask)) if row is None else row for row, mask in zip(found, masks, strict=True)]

    return Batch(
        groups=trajectories.groups, rewards=rewards, masks=masks, penalties=rows(penalties), values=rows(values)
    )


def by_environment(envs: Sequence[str], batch: Batch, estimate: Callable[[Batch], tuple[Column, ...]]) -> list[Column]:
    """Return what is estimated of a batch, each environment by itself: their rewards have scales of their own.

    Args:
        envs: Of each trajectory.
        batch: What the estimator sees; fields may be empty.
        estimate: Returns columns of one value a trajectory.
    """
    places = grouped((env, place) for place, env in enumerate(envs))
    if len(places) <= 1:
        return list(estimate(batch))
    columns: list[Column] = []
    for of_env in places.values():
        held = {f.name: getattr(batch, f.name) for f in fields(Batch)}
        found = estimate(Batch(**{name: of and [of[place] for place in of_env] for name, of in held.items()}))
        columns = columns or [[None] * len(envs) for _ in found]
        for column, of_column in zip(columns, found, strict=True):
            for place, value in zip(of_env, of_column, strict=True):
                column[place] = value
    return columns
