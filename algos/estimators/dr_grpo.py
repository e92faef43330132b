"""Dr. GRPO: each reward against its group's mean, and no more; arXiv 2503.20783."""

from nanoskyrl.algos.estimators.base import group_estimator, group_normalized

DR_GRPO = group_estimator(
    "dr_grpo",
    lambda rewards, config: group_normalized(rewards, divide_by_std=False, singleton=config.singleton),
)
