"""PPO: the clipped surrogate on token ratios, with advantages from a critic.

Proximal Policy Optimization, arXiv 1707.06347; advantages by GAE, arXiv 1506.02438.
"""

from nanoskyrl.algos.base import Algorithm
from nanoskyrl.algos.surrogates.clip import ClipConfig, token_surrogate

PPO = Algorithm(
    name="ppo", surrogate=token_surrogate, Config=ClipConfig, source="arXiv 1707.06347",
    estimator="gae", loss_reduction="token_mean", kl_place="reward", kl_estimator="k1", needs_critic=True,
)  # fmt: skip
