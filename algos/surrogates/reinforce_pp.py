"""REINFORCE++: returns whitened over the whole batch in place of a critic, with PPO's clip.

arXiv 2501.03262. Two variants: plain, whose KL belongs into the reward as k1, and with the
group's mean as baseline, whose KL belongs into the loss as k2.
"""

from nanoskyrl.algos.base import Algorithm
from nanoskyrl.algos.surrogates.clip import ClipConfig, token_surrogate

REINFORCE_PP = Algorithm(
    name="reinforce_pp", surrogate=token_surrogate, Config=ClipConfig, source="arXiv 2501.03262",
    estimator="reinforce_pp", loss_reduction="token_mean", kl_place="reward", kl_estimator="k1",
)  # fmt: skip

REINFORCE_PP_BASELINE = Algorithm(
    name="reinforce_pp_baseline", surrogate=token_surrogate, Config=ClipConfig,
    source="arXiv 2501.03262", estimator="reinforce_pp_baseline", loss_reduction="token_mean",
    kl_place="loss", kl_estimator="k2",
)  # fmt: skip
