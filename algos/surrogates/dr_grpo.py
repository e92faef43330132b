"""Dr. GRPO: GRPO without its two biases, the division by a row's length and by a group's deviation.

arXiv 2503.20783. The loss divides by a constant, `train.horizon`; there is no KL.
"""

from nanoskyrl.algos.base import Algorithm
from nanoskyrl.algos.surrogates.clip import ClipConfig, token_surrogate

DR_GRPO = Algorithm(
    name="dr_grpo", surrogate=token_surrogate, Config=ClipConfig, source="arXiv 2503.20783",
    estimator="dr_grpo", loss_reduction="seq_mean_token_sum_norm",
)  # fmt: skip
