"""DAPO: GRPO with a higher upper clip, every token weighed equally, and groups that teach something.

arXiv 2503.14476. Soft overlong punishment is part of `advantage`, dynamic sampling of
`rollout`; both are on for this algorithm unless switched off. There is no KL.
"""

from dataclasses import dataclass

from nanoskyrl.algos.base import Algorithm
from nanoskyrl.algos.surrogates.clip import ClipConfig, token_surrogate


@dataclass(frozen=True, slots=True, kw_only=True)
class DapoConfig(ClipConfig):
    """Where the ratio is clipped: higher above than below, so that rare tokens can grow."""

    eps_clip_high: float = 0.28
    """The ratio is clipped above 1 plus this."""


DAPO = Algorithm(
    name="dapo", surrogate=token_surrogate, Config=DapoConfig, source="arXiv 2503.14476",
    estimator="grpo", loss_reduction="token_mean", overlong_punishment=True, dynamic_sampling=True,
)  # fmt: skip
