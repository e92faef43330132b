"""GRPO: each reward against its group's mean, in standard deviations of the group; DeepSeekMath, arXiv 2402.03300."""

from nanoskyrl.algos.estimators.base import group_estimator, group_normalized

GRPO = group_estimator(
    "grpo",
    lambda rewards, config: group_normalized(rewards, eps=config.eps, ddof=config.std_ddof, singleton=config.singleton),
)
