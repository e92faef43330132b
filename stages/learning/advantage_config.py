"""Settings of `advantage`, and how what is left open in them is decided by the algorithm."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from msgspec import Meta

from nanoskyrl.algos.base import Algorithm
from nanoskyrl.algos.estimators.base import EstimatorConfig
from nanoskyrl.algos.kl import KlEstimator
from nanoskyrl.stages.core.checked import Coefficient, NonNegativeInt, PositiveInt
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.learning.train_config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig(EstimatorConfig):
    """Which estimator, what shapes the rewards, what is left out of training, and what models are asked."""

    estimator: str | None = None
    """grpo, dr_grpo, rloo, gae, reinforce_pp, reinforce_pp_baseline, batch_std or maxrl; None: the algorithm's."""
    overlong_buffer_length: NonNegativeInt | None = None
    """Tokens over which a soft punishment for length grows; 0 is off; None: a fifth of the largest length for dapo,
    else off."""
    overlong_max_length: PositiveInt | None = None
    """Tokens of a trajectory's longest turn at which that punishment is whole; None: what a turn may have at most."""
    overlong_factor: Coefficient = 1.0
    """The whole punishment."""
    overlong_filter: bool = False
    """Leave out trajectories that did not end by themselves; their rewards still enter the group's mean."""
    drop_zero_variance: bool | None = None
    """Leave out groups whose success, or unshaped reward, is all equal; else they stay, with the advantage that the
    estimator gives. None: with dynamic sampling."""
    max_groups: PositiveInt | None = None
    """Keep the first so many groups with spread, drop the surplus; None: what dynamic sampling fills, else all."""
    use_kl_in_reward: bool = False
    """Take the KL to the reference, the run's first policy, off the reward of each token."""
    kl_reward_coef: Coefficient = 0.001
    """Weight of that KL; where it adapts, of the first step."""
    kl_ctrl: Literal["fixed", "adaptive"] = "fixed"
    """fixed, or adaptive: from step to step the weight grows where the KL lies above kl_target, and falls below it."""
    kl_target: Annotated[float, Meta(gt=0, le=1000)] = 0.1
    """Nats a token, mean over tokens and then rows, that an adaptive weight steers to."""
    kl_horizon: PositiveInt = 10000
    """Rows over which an adaptive weight changes by at most a fifth."""
    kl_estimator_type: KlEstimator = "k1"
    """How that KL is estimated."""
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    """What ratios are taken against: rollout (the recorded log-probs, engine's drift and lag included), or
    recompute (under the policy that training starts from, by a forward pass here)."""
    ref_logprobs: bool | None = None
    """Write log-probs under the reference; None: where a KL asks for them, here or in train."""
    max_tokens_per_micro_batch: PositiveInt = 16384
    """Bound of a forward pass."""

    def check(self) -> None:
        """Refuse settings that do not go together."""
        if (
            self.overlong_max_length is not None
            and self.overlong_buffer_length is not None
            and self.overlong_buffer_length > self.overlong_max_length
        ):
            raise SettingsError(
                f"`advantage.overlong_buffer_length` is {self.overlong_buffer_length}, more than "
                f"`advantage.overlong_max_length`, {self.overlong_max_length}",
                hint="A fifth of the largest length is usual",
            )
        if self.kl_ctrl == "adaptive" and not self.use_kl_in_reward:
            raise SettingsError(
                "`advantage.kl_ctrl = adaptive` needs `advantage.use_kl_in_reward`", hint="Set both, or neither"
            )
        if self.use_kl_in_reward and self.ref_logprobs is False:
            raise SettingsError(
                "`advantage.use_kl_in_reward` needs `advantage.ref_logprobs`", hint="Leave ref_logprobs out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the rows were sampled, as far as `advantage` goes by it; the manifests of rollout and score say so."""

    groups: int
    """Prompts that a step was to fill."""
    max_generate_length: int
    dynamic_sampling: bool


def sampling_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `score` hands on of a rollout's settings."""
    return {
        "groups": len(settings.get("tasks") or ()) or settings.get("train_batch_size"),
        "max_generate_length": settings.get("max_generate_length"),
        "dynamic_sampling": bool(settings.get("dynamic_sampling")),
    }


def settled(config: AdvantageConfig, algorithm: Algorithm, train: TrainConfig, sampling: Sampling) -> AdvantageConfig:
    """Return the settings with everything decided that was left to the algorithm and to how the rows were sampled.

    Raises:
        SettingsError: the KL to the reference would stand both in the reward and in the loss.
    """
    if config.use_kl_in_reward and train.use_kl_loss:
        raise SettingsError(
            "`advantage.use_kl_in_reward` and `train.use_kl_loss` are both on", hint="Switch one of them off"
        )
    dynamic = sampling.dynamic_sampling
    length = config.overlong_max_length or sampling.max_generate_length
    buffer = config.overlong_buffer_length
    if buffer is None:
        buffer = max(1, length // 5) if algorithm.overlong_punishment else 0
    return replace(
        config,
        estimator=config.estimator or algorithm.estimator,
        overlong_buffer_length=buffer,
        overlong_max_length=length if buffer else None,
        drop_zero_variance=dynamic if config.drop_zero_variance is None else config.drop_zero_variance,
        max_groups=sampling.groups if config.max_groups is None and dynamic else config.max_groups,
        ref_logprobs=(
            config.use_kl_in_reward or train.use_kl_loss if config.ref_logprobs is None else config.ref_logprobs
        ),
    )
