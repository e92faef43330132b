"""Dr. GRPO: each reward against its group's mean, and no more; arXiv 2503.20783."""

from nanoskyrl.algos.estimators.base import centred, trajectory_estimator

DR_GRPO = trajectory_estimator("dr_grpo", centred)
