"""Advantage estimators: from the rewards of trajectories to one number a trajectory.

A reward of None was never given; it enters no mean, and its advantage is None. A group
whose rewards are all alike gives exactly 0, whatever rounding says of its variance.
"""

import math
from collections.abc import Sequence

ZERO_SPREAD = 1e-6
"""Rewards closer than this, relative to the largest, are equal: twelve times 0.7 has a variance only by rounding."""


def has_spread(rewards: Sequence[float]) -> bool:
    """Say whether the rewards of a group differ."""
    scale = max((abs(reward) for reward in rewards), default=0.0)
    return len(rewards) > 1 and max(rewards) - min(rewards) > ZERO_SPREAD * scale


def group_normalized(
    rewards: Sequence[float | None], *, eps: float = 1e-6, divide_by_std: bool = True
) -> list[float | None]:
    """Return (reward - mean) / (std + eps) over the scored members of a group.

    DeepSeekMath, arXiv 2402.03300. The standard deviation has Bessel's correction.

    Args:
        rewards: of one group; None where there is none.
        eps: added to the standard deviation.
        divide_by_std: False leaves the difference from the mean (Dr. GRPO).

    Returns:
        One advantage a member: None where the reward is None; 0 for a group of one or without spread.
    """
    scored = [reward for reward in rewards if reward is not None]
    if not has_spread(scored):
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(scored) / len(scored)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in scored) / (len(scored) - 1))
    scale = 1 / (std + eps) if divide_by_std else 1.0
    return [None if reward is None else (reward - mean) * scale for reward in rewards]
