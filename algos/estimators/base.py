"""What an advantage estimator is, and what estimators share.

It goes from the rewards of a batch's trajectories to a number for every trained token. A
reward of None was never given; it enters no mean, and its advantage is None. A group
whose rewards are all equal gives exactly 0, whatever rounding says of its variance.
Tokens that are not trained take part in no recursion and no mean.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nanoskyrl.algos.shaping import has_spread
from nanoskyrl.stages.core.checked import Checked, Share
from nanoskyrl.stages.core.metrics import grouped

Numbers = list[float | None]
"""One a trajectory; None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorConfig(Checked):
    """Amounts that estimators read."""

    eps: Share = 1e-6
    """Added to what rewards are divided by: a standard deviation, or maxrl's mean."""
    std_ddof: Literal[0, 1] = 1
    """What is taken off the count in the deviation of a group's or batch's rewards: 1 is Bessel's correction."""
    singleton: Literal["zero", "drop", "raw", "error"] = "zero"
    """A group with one scored member: zero (advantage 0), drop, raw (the reward itself), or error."""
    gamma: Share = 1.0
    """Discount from one trained token to the next."""
    lambd: Share = 0.95
    """GAE: 1 trusts the rewards alone, 0 the critic alone."""
    whiten_ddof: Literal[0, 1] = 1
    """What is taken off the count in the variance of whitened advantages: 1 is Bessel's correction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Trajectories as estimators see them; one that is stored as several rows is joined in order."""

    groups: Sequence[str]
    rewards: Sequence[float | None]
    """Of the whole trajectory, KL penalty excluded; None where there is none."""
    masks: Sequence[np.ndarray]
    """[T] nonzero on trained tokens."""
    penalties: Sequence[np.ndarray | None]
    """[T] taken off the reward of each token; None where nothing is."""
    values: Sequence[np.ndarray | None]
    """[T] of the critic, before each token is drawn; None where no estimator asked."""


@dataclass(frozen=True, slots=True)
class Estimates:
    """What an estimator says of each trajectory; None where the reward is None."""

    advantages: list[np.ndarray | None]
    """[T] 0 on tokens that are not trained."""
    returns: list[np.ndarray | None] | None = None
    """[T] what the critic is to predict, or what was discounted; None: the estimator has none."""


Estimate = Callable[[Batch, EstimatorConfig], Estimates]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """One way to say how much better than expected a token did."""

    name: str
    estimate: Estimate
    needs_values: bool = False
    by_token: bool = False
    """Whether a penalty falls on its own token; else its sum is taken off the trajectory's reward."""
    numbers: Callable[[Batch, EstimatorConfig], Numbers] | None = None
    """Of an estimator that looks at groups and rewards alone: one number a trajectory, for all of its trained tokens.
    It is what `estimate` puts on them; `advantage` does that part by part, and holds no tokens of the whole batch."""


def group_normalized(
    rewards: Numbers,
    *,
    eps: float = 1e-6,
    divide_by_std: bool = True,
    ddof: int = 1,
    singleton: str = "zero",
) -> Numbers:
    """Return (reward - mean) / (std + eps) over the scored members of a group.

    DeepSeekMath, arXiv 2402.03300.

    Args:
        rewards: of one group; None where there is none.
        eps: added to the standard deviation.
        divide_by_std: False leaves the difference from the mean (Dr. GRPO, arXiv 2503.20783).
        ddof: taken off the count in the standard deviation.
        singleton: raw gives a group of one its reward, anything else 0.

    Returns:
        One advantage a member: None where the reward is None; 0 for a group without spread.
    """
    scored = [reward for reward in rewards if reward is not None]
    if len(scored) == 1 and singleton == "raw":
        return list(rewards)
    if not has_spread(scored):
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(scored) / len(scored)
    scale = 1 / (std(scored, ddof) + eps) if divide_by_std else 1.0
    return [None if reward is None else (reward - mean) * scale for reward in rewards]


def std(values: Sequence[float], ddof: int) -> float:
    """Return the standard deviation of numbers, with ddof taken off their count."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - ddof))


def by_group(batch: Batch, of_group: Callable[[Numbers], Numbers]) -> Numbers:
    """Return one number a trajectory, from a function of one group's rewards."""
    members = grouped((group, index) for index, group in enumerate(batch.groups))
    found: Numbers = [None] * len(batch.groups)
    for indices in members.values():
        for index, value in zip(indices, of_group([batch.rewards[i] for i in indices]), strict=True):
            found[index] = value
    return found


def on_tokens(batch: Batch, values: Sequence[float | None]) -> list[np.ndarray | None]:
    """Return a trajectory's number on each of its trained tokens."""
    return [
        None if value is None else np.where(mask != 0, value, 0.0)
        for value, mask in zip(values, batch.masks, strict=True)
    ]


def centred(batch: Batch, config: EstimatorConfig) -> Numbers:
    """Return each trajectory's reward less the mean of its group's."""
    return by_group(batch, lambda rewards: group_normalized(rewards, divide_by_std=False, singleton=config.singleton))


def group_estimator(name: str, of_group: Callable[[Numbers, EstimatorConfig], Numbers]) -> Estimator:
    """Return an estimator that sees the rewards of one group at a time, and gives a trajectory's tokens one number."""
    return trajectory_estimator(name, lambda batch, config: by_group(batch, lambda of: of_group(of, config)))


def trajectory_estimator(name: str, numbers: Callable[[Batch, EstimatorConfig], Numbers]) -> Estimator:
    """Return an estimator that sees groups and rewards alone, and gives a trajectory's tokens one number."""
    return Estimator(
        name=name,
        estimate=lambda batch, config: Estimates(on_tokens(batch, numbers(batch, config))),
        numbers=numbers,
    )


def token_rewards(batch: Batch) -> list[np.ndarray | None]:
    """Return rewards by token: the trajectory's on its last trained token, less the penalties on their own."""
    return [
        None if reward is None else _by_token(reward, mask, penalty)
        for reward, mask, penalty in zip(batch.rewards, batch.masks, batch.penalties, strict=True)
    ]


def _by_token(reward: float, mask: np.ndarray, penalty: np.ndarray | None) -> np.ndarray:
    rewards = np.zeros(len(mask))
    trained = np.flatnonzero(mask)
    if penalty is not None:
        rewards[trained] -= penalty[trained]
    if len(trained):
        rewards[trained[-1]] += reward
    return rewards
