"""GRPO: PPO's clipped surrogate on token ratios, with group-normalised advantages.

DeepSeekMath, arXiv 2402.03300. The paper averages tokens in a row, then rows, and puts a
k3 estimate of the KL to the reference into the loss.
"""

from nanoskyrl.algos.base import Algorithm
from nanoskyrl.algos.surrogates.clip import ClipConfig, token_surrogate

GRPO = Algorithm(
    name="grpo", surrogate=token_surrogate, Config=ClipConfig, source="arXiv 2402.03300",
    estimator="grpo", loss_reduction="sequence_mean", kl_place="loss", kl_estimator="k3",
)  # fmt: skip
