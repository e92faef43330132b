"""DPPO: a token is left out when its probability, not its ratio, has moved too far the way it is pushed.

Divergence PPO, arXiv 2602.04879. A ratio says little where probabilities are small: from
1e-4 to 3e-4 is a ratio of 3 and changes nothing. What bounds a token here is a divergence
between two coins, the token or any other: their total variation, or their KL.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from nanoskyrl.algos.base import Algorithm, SurrogateInputs
from nanoskyrl.algos.tensors import Tensor
from nanoskyrl.stages.core.checked import Checked, FiniteNonNegative

CERTAIN = 1e-8
"""Added to the probability of all other tokens, which is 0 in float32 where a token is certain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DppoTvConfig(Checked):
    """How far a probability may move; the defaults are the paper's."""

    delta_low: FiniteNonNegative = 0.2
    """A token of negative advantage is left out once it has fallen by a divergence of more than this."""
    delta_high: FiniteNonNegative = 0.2
    """A token of positive advantage is left out once it has risen by more than this."""
    ratio_max: Annotated[float, Meta(ge=1)] = 20.0
    """The ratio weighs at most this. A low bound would bias the gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DppoKlConfig(DppoTvConfig):
    """How far a probability may move, in nats; the defaults are the paper's."""

    delta_low: FiniteNonNegative = 0.05
    """A token of negative advantage is left out once it has fallen by a divergence of more than this."""
    delta_high: FiniteNonNegative = 0.05
    """A token of positive advantage is left out once it has risen by more than this."""


def total_variation(inputs: SurrogateInputs) -> Tensor:
    """Return |p - p_old| of each token; [B, T]."""
    return (inputs.logprobs.exp() - inputs.old_logprobs.exp()).abs()


def binary_kl(inputs: SurrogateInputs) -> Tensor:
    """Return KL(old || trained) in nats of two coins, the token or any other; [B, T]."""
    old, new = inputs.old_logprobs.exp(), inputs.logprobs.exp()
    others = ((1 - old + CERTAIN) / (1 - new + CERTAIN)).log()
    return old * (inputs.old_logprobs - inputs.logprobs) + (1 - old) * others


def _within(inputs: SurrogateInputs, divergence: Tensor, config: DppoTvConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the objective of tokens inside their bounds, 0 for others, and `clip_ratio`: 1 where one is outside."""
    moved = inputs.logprobs.detach() - inputs.old_logprobs
    too_high = (inputs.advantages > 0) & (moved > 0) & (divergence > config.delta_high)
    too_low = (inputs.advantages < 0) & (moved < 0) & (divergence > config.delta_low)
    outside = (too_high | too_low).to(inputs.logprobs.dtype)
    weight = inputs.log_ratio.detach().exp().clamp(max=config.ratio_max) * (1 - outside)
    # The value of the ratio, with a gradient that its bound leaves as it is.
    ratio = weight * (1 + (inputs.logprobs - inputs.logprobs.detach()))
    return ratio * inputs.advantages, {"clip_ratio": outside}


def tv_surrogate(inputs: SurrogateInputs, config: DppoTvConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return r A of each token whose probability has not moved too far, to be maximised; [B, T]."""
    return _within(inputs, total_variation(inputs).detach(), config)


def kl_surrogate(inputs: SurrogateInputs, config: DppoKlConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return r A of each token whose coin has not moved too far in KL, to be maximised; [B, T]."""
    return _within(inputs, binary_kl(inputs).detach(), config)


DPPO_TV = Algorithm(
    name="dppo_tv", surrogate=tv_surrogate, Config=DppoTvConfig, source="arXiv 2602.04879",
    estimator="grpo", loss_reduction="token_mean",
)  # fmt: skip

DPPO_KL = Algorithm(
    name="dppo_kl", surrogate=kl_surrogate, Config=DppoKlConfig, source="arXiv 2602.04879",
    estimator="grpo", loss_reduction="token_mean",
)  # fmt: skip
