"""MaxRL: each reward against its group's mean, divided by that mean; arXiv 2602.02710.

With rewards of 0 and 1 the mean is the share of successes, and the gradient on average that of its logarithm.
"""

import math

from nanoskyrl.algos.estimators.base import Numbers, group_estimator, group_normalized
from nanoskyrl.stages.core.errors import SettingsError


def mean_normalized(rewards: Numbers, *, eps: float = 1e-6, singleton: str = "zero") -> Numbers:
    """Return (reward - mean) / (mean + eps) over the scored members of a group.

    Args:
        rewards: of one group, 0 or more; None where there is none.
        eps: added to the mean.
        singleton: raw gives a group of one its reward, anything else 0.

    Returns:
        One advantage a member: None where the reward is None; 0 for a group without spread.

    Raises:
        SettingsError: a reward is negative, and the mean could be 0, or turn every sign round.
    """
    scored = [reward for reward in rewards if reward is not None]
    if min(scored, default=0.0) < 0:
        raise SettingsError(
            f"`maxrl` divides by a group's mean reward, and a reward is {min(scored):g}",
            hint="Give rewards of 0 or more, without a punishment or a KL in them, or take another estimator",
        )
    centred = group_normalized(rewards, divide_by_std=False, singleton=singleton)
    if len(scored) < 2:
        return centred
    scale = 1 / (math.fsum(scored) / len(scored) + eps)
    return [None if value is None else value * scale for value in centred]


MAXRL = group_estimator(
    "maxrl", lambda rewards, config: mean_normalized(rewards, eps=config.eps, singleton=config.singleton)
)
