"""Clip-Cov and KL-Cov: the few tokens that take a policy's entropy away are held back.

The Entropy Mechanism of Reinforcement Learning, arXiv 2505.22617. Entropy falls by the
covariance of advantage and log-prob: likely tokens that did well. Which tokens those are is
said by all of a mini-batch, so they are marked before its micro-batches are taken.
"""

from dataclasses import dataclass

from numpy.random import Generator

from nanoskyrl.algos.base import Algorithm, SurrogateInputs
from nanoskyrl.algos.surrogates.clip import ClipConfig, token_surrogate
from nanoskyrl.algos.tensors import Tensor
from nanoskyrl.stages.core.checked import Checked, Coefficient, FiniteNonNegative, PositiveShare, Share
from nanoskyrl.stages.core.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCovConfig(ClipConfig):
    """Which tokens lose their gradient; the defaults are the paper's, which hardly clips the ratio."""

    eps_clip_low: Share = 1.0
    """The ratio is clipped below 1 minus this."""
    eps_clip_high: FiniteNonNegative = 1.0
    """The ratio is clipped above 1 plus this."""
    clip_cov_ratio: PositiveShare = 2e-4
    """Share of a mini-batch's tokens that lose their gradient, at least one, if as many lie between the bounds."""
    clip_cov_lb: float = 1.0
    """They are drawn among tokens whose covariance is above this."""
    clip_cov_ub: float = 5.0
    """And below this."""

    def check(self) -> None:
        """Refuse bounds that cross."""
        if not self.clip_cov_lb < self.clip_cov_ub:
            raise SettingsError(
                f"`clip_cov.clip_cov_lb` is {self.clip_cov_lb} and `clip_cov.clip_cov_ub` {self.clip_cov_ub}",
                hint="The first must be below the second; 1 and 5 are the paper's",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class KlCovConfig(Checked):
    """Which tokens are kept near the old policy, and how strongly; the defaults are the paper's."""

    kl_cov_ratio: PositiveShare = 2e-4
    """Share of a mini-batch's tokens that are, those of the largest covariance; at least one."""
    ppo_kl_coef: Coefficient = 1.0
    """Weight of the distance of their log-prob from the old one."""


def covariances(inputs: SurrogateInputs) -> Tensor:
    """Return each token's share of the covariance of advantage and log-prob, without gradient; [1, N].

    Args:
        inputs: Of all trained tokens of a mini-batch, [1, N].
    """
    advantages, logprobs = inputs.advantages.detach().double(), inputs.logprobs.detach().double()
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def clip_cov_marks(inputs: SurrogateInputs, config: ClipCovConfig, random: Generator) -> Tensor:
    """Return 1 on tokens drawn among those between the bounds that the ratio's clip has not taken; [1, N]."""
    found = covariances(inputs)
    _, reported = token_surrogate(inputs, config)
    between = (found > config.clip_cov_lb) & (found < config.clip_cov_ub) & (reported["clip_ratio"] == 0)
    # A lot for every token, so that one at a bound, which rounding may let in or not, changes no other's.
    lots = found.new_tensor(random.random(found.shape)).masked_fill(~between, 2.0)
    first = lots.argsort(stable=True)[:, : _count(config.clip_cov_ratio, found)]
    return found.new_zeros(found.shape).scatter(1, first, 1.0) * between


def kl_cov_marks(inputs: SurrogateInputs, config: KlCovConfig, random: Generator) -> Tensor:
    """Return 1 on the tokens of the largest covariances; of equal ones, on the first; [1, N]."""
    found = covariances(inputs)
    first = found.argsort(descending=True, stable=True)[:, : _count(config.kl_cov_ratio, found)]
    return found.new_zeros(found.shape).scatter(1, first, 1.0)


def _count(share: float, tokens: Tensor) -> int:
    return max(int(share * tokens.numel()), 1)


def clip_cov_surrogate(inputs: SurrogateInputs, config: ClipCovConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped objective, 0 on marked tokens, to be maximised.

    Returns:
        [B, T] objective, and `clip_ratio`: 1 where the clip or the mark took the gradient away.
    """
    objective, reported = token_surrogate(inputs, config)
    return objective * (1 - inputs.marked), {"clip_ratio": reported["clip_ratio"].maximum(inputs.marked)}


def kl_cov_surrogate(inputs: SurrogateInputs, config: KlCovConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return r A, less the distance to the old log-prob on marked tokens, to be maximised.

    Returns:
        [B, T] objective, and `held_ratio`: 1 on marked tokens.
    """
    distance = config.ppo_kl_coef * inputs.log_ratio.abs() * inputs.marked
    return inputs.log_ratio.exp() * inputs.advantages - distance, {"held_ratio": inputs.marked}


CLIP_COV = Algorithm(
    name="clip_cov", surrogate=clip_cov_surrogate, Config=ClipCovConfig, source="arXiv 2505.22617",
    estimator="grpo", loss_reduction="token_mean", marks=clip_cov_marks,
)  # fmt: skip

KL_COV = Algorithm(
    name="kl_cov", surrogate=kl_cov_surrogate, Config=KlCovConfig, source="arXiv 2505.22617",
    estimator="grpo", loss_reduction="token_mean", marks=kl_cov_marks,
)  # fmt: skip
