"""Rewards against their group's mean, in standard deviations of the batch; Lite PPO, arXiv 2508.08221."""

from nanoskyrl.algos.estimators.base import Batch, EstimatorConfig, Numbers, centred, std, trajectory_estimator
from nanoskyrl.algos.shaping import has_spread


def batch_std(batch: Batch, config: EstimatorConfig) -> Numbers:
    """Centre on the group's mean, and divide by the deviation of all rewards of the batch."""
    scored = [reward for reward in batch.rewards if reward is not None]
    scale = 1 / (std(scored, config.std_ddof) + config.eps) if has_spread(scored) else 0.0
    return [None if value is None else value * scale for value in centred(batch, config)]


BATCH_STD = trajectory_estimator("batch_std", batch_std)
