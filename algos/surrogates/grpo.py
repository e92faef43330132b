"""GRPO: PPO's clipped surrogate on token ratios, with group-normalised advantages.

DeepSeekMath, arXiv 2402.03300. The paper averages tokens in a row, then rows, and puts a
k3 estimate of the KL to the reference into the loss.
"""

from dataclasses import dataclass

from nanoskyrl.algos.base import Algorithm
from nanoskyrl.algos.surrogates.clip import ClipConfig, token_surrogate


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoConfig(ClipConfig):
    """Where the ratio is clipped; the defaults are PPO's."""


GRPO = Algorithm(
    name="grpo", surrogate=token_surrogate, Config=GrpoConfig, source="arXiv 2402.03300",
    estimator="grpo", loss_reduction="sequence_mean", kl_place="loss", kl_estimator="k3",
)  # fmt: skip
