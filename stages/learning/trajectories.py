"""From rows of scored shards to the trajectories that estimators see, and back.

The whole batch is looked at at once, however it is cut into parts: groups, whitening and
dynamic sampling know no parts. A trajectory of several rows is joined in the order of its
steps, and what the estimator says of it is cut up again.
"""

# pyarrow makes the functions of pyarrow.compute at import, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nanoskyrl.algos.estimators.base import Batch, Estimates
from nanoskyrl.algos.shaping import metric_of
from nanoskyrl.stages.core.rows import row_arrays

COLUMNS = (
    "trajectory_id", "step_index", "group_id", "reward", "success", "status", "stop_reason", "trainable",
    "completion_tokens", "turns", "loss_mask", "env",
)  # fmt: skip
"""What is read of each row to decide which are kept."""


def old_or_sampler_s(
    old: Sequence[np.ndarray | None] | None, rollout: Sequence[np.ndarray | None]
) -> list[np.ndarray | None]:
    """Return each row's log-probs at the start of the update: those recomputed, else those it was sampled with.

    Args:
        old: [T] nats of each row's response tokens, None in rows that have none; None: no row has any.
        rollout: [T] nats under the policy that sampled.
    """
    return list(rollout) if old is None else [u if o is None else o for u, o in zip(rollout, old, strict=True)]


@dataclass(slots=True)
class ScoredTrajectory:
    """One trajectory."""

    group: str
    reward: float | None
    """None where it failed or was not scored: a failure is no verdict."""
    success: bool | None
    failed: bool
    trainable: bool
    stop_reason: str
    """Of the last step."""
    longest_turn: int | None
    """Tokens sampled in the longest of its turns; None: not known."""
    env: str
    rows: list[int] = field(default_factory=list)
    """Places in the batch, in the order of the steps."""

    @property
    def metric(self) -> float | None:
        """What spread is looked for in."""
        return None if self.reward is None else metric_of(self.success, self.reward)


@dataclass(slots=True)
class ScoredTrajectories:
    """All trajectories of a batch, in the order of their first rows."""

    by_id: dict[str, ScoredTrajectory]
    masks: list[np.ndarray]
    """Of each row; empty where the engine had no tokens."""

    def __iter__(self) -> Any:
        """Iterate over the trajectories."""
        return iter(self.by_id.values())

    def joined(self, trajectory: ScoredTrajectory, rows: Sequence[np.ndarray | None]) -> np.ndarray | None:
        """Return the numbers of a trajectory's tokens, from those of its rows; None if a row has none."""
        found = [row for row in (rows[index] for index in trajectory.rows) if row is not None]
        if len(found) < len(trajectory.rows):
            return None
        return found[0] if len(found) == 1 else np.concatenate(found)


def gather(tables: Iterable[pa.Table]) -> ScoredTrajectories:
    """Return the trajectories of these tables, which hold COLUMNS."""
    by_id: dict[str, ScoredTrajectory] = {}
    steps: dict[str, list[tuple[int, int]]] = {}
    masks: list[np.ndarray] = []
    for table in tables:
        facts = {name: table.column(name).to_pylist() for name in COLUMNS if name not in ("turns", "loss_mask")}
        longest = _longest_turns(table)
        for index, mask in enumerate(row_arrays(table.column("loss_mask"))):
            row = {name: values[index] for name, values in facts.items()}
            name, failed = row["trajectory_id"], row["status"] == "failed"
            trajectory = by_id.get(name)
            if trajectory is None:
                by_id[name] = trajectory = ScoredTrajectory(
                    row["group_id"], row["reward"], row["success"], False, True, row["stop_reason"], 0, row["env"]
                )
            trajectory.failed |= failed
            trajectory.trainable &= row["trainable"]
            of_row = longest[index]
            longest_before = trajectory.longest_turn
            trajectory.longest_turn = None if longest_before is None or of_row is None else max(longest_before, of_row)
            of_it = steps.setdefault(name, [])
            if not of_it or row["step_index"] > max(of_it)[0]:
                trajectory.stop_reason = row["stop_reason"]
            of_it.append((row["step_index"], len(masks)))
            masks.append(np.zeros(0, np.int8) if mask is None else mask)
    for name, trajectory in by_id.items():
        trajectory.rows = [place for _, place in sorted(steps[name])]
        if trajectory.failed:
            trajectory.reward = trajectory.success = None
    return ScoredTrajectories(by_id, masks)


def _longest_turns(table: pa.Table) -> list[int | None]:
    """Return the tokens of each row's longest turn, or all of its tokens where turns have no count; None: not known."""
    found = table.column("completion_tokens").to_pylist()
    turns = table.column("turns").combine_chunks()
    if not table.num_rows:
        return found
    counts = turns.flatten().field("token_count").to_pylist()
    start = 0
    for row, length in enumerate(pc.list_value_length(turns).to_pylist()):
        of_row = [count for count in counts[start : start + (length or 0)] if count is not None]
        found[row] = max(of_row, default=found[row])
        start += length or 0
    return found


def batch_of(
    trajectories: ScoredTrajectories,
    rewards: Sequence[float | None],
    kept: Sequence[bool],
    *,
    penalties: Sequence[np.ndarray | None] | None = None,
    values: Sequence[np.ndarray | None] | None = None,
) -> Batch:
    """Return what an estimator sees.

    Args:
        trajectories: The trajectories.
        rewards: Of each trajectory.
        kept: Whether its tokens are trained on; its reward counts among its siblings' either way.
        penalties: Of each row's tokens, taken off their rewards.
        values: Of each row's tokens.
    """
    masks = [
        mask if is_kept else np.zeros_like(mask)
        for mask, is_kept in zip((_mask(trajectories, trajectory) for trajectory in trajectories), kept, strict=True)
    ]

    def rows(of: Sequence[np.ndarray | None] | None) -> list[np.ndarray | None]:
        if of is None:
            return [None] * len(masks)
        found = (trajectories.joined(trajectory, of) for trajectory in trajectories)
        return [np.zeros(len(mask)) if row is None else row for row, mask in zip(found, masks, strict=True)]

    return Batch(
        groups=[trajectory.group for trajectory in trajectories], rewards=rewards, masks=masks,
        penalties=rows(penalties), values=rows(values),
    )  # fmt: skip


def by_environment(trajectories: ScoredTrajectories, batch: Batch, estimate: Callable[[Batch], Estimates]) -> Estimates:
    """Return what an estimator says of a batch, each environment by itself: their rewards have scales of their own."""
    places: dict[str, list[int]] = {}
    for place, trajectory in enumerate(trajectories):
        places.setdefault(trajectory.env, []).append(place)
    if len(places) <= 1:
        return estimate(batch)
    advantages: list[np.ndarray | None] = [None] * len(batch.groups)
    returns: list[np.ndarray | None] = list(advantages)
    has_returns = False
    for of_env in places.values():
        part = Batch(**{f.name: [getattr(batch, f.name)[place] for place in of_env] for f in fields(Batch)})
        found = estimate(part)
        has_returns |= found.returns is not None
        for index, place in enumerate(of_env):
            advantages[place] = found.advantages[index]
            returns[place] = None if found.returns is None else found.returns[index]
    return Estimates(advantages, returns if has_returns else None)


def by_row(trajectories: ScoredTrajectories, found: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    """Return the numbers of each row's tokens from those of each trajectory's."""
    rows: list[np.ndarray | None] = [None] * len(trajectories.masks)
    for trajectory, numbers in zip(trajectories, found, strict=True):
        start = 0
        for place in trajectory.rows:
            end = start + len(trajectories.masks[place])
            rows[place] = None if numbers is None else numbers[start:end]
            start = end
    return rows


def estimates_by_row(
    trajectories: ScoredTrajectories, estimates: Estimates
) -> tuple[list[np.ndarray | None], list[np.ndarray | None]]:
    """Return advantages and returns of each row's tokens."""
    nothing: list[np.ndarray | None] = [None] * len(trajectories.masks)
    returns = nothing if estimates.returns is None else by_row(trajectories, estimates.returns)
    return by_row(trajectories, estimates.advantages), returns


def _mask(trajectories: ScoredTrajectories, trajectory: ScoredTrajectory) -> np.ndarray:
    mask = trajectories.joined(trajectory, trajectories.masks)
    assert mask is not None
    return mask
