"""Corrections for rows that another policy sampled than the one training starts from.

The engine's arithmetic differs from the trainer's, and rows may be some policies old. Each
token's ratio rho = p_old / p_rollout, frozen, weighs its loss (truncated importance
sampling, or IcePop's band), or decides whether its row counts at all (masked importance
sampling). This is beside the ratio of trained to old policy, which the surrogate bounds.
Masking of whole rows: arXiv 2512.23075; the mask for negative rows: DeepSeek-V3.2, arXiv
2512.02556; the band is known as IcePop. What compares the trained policy itself with the one that sampled is beside any
surrogate, as in prime-rl's loss: a mask of tokens that have moved too far the way they are pushed (there by
probability, here where PPO's clip has no gradient, arXiv 1707.06347), and the squared log-ratio as a pull back.
"""

from dataclasses import dataclass
from typing import Literal

from nanoskyrl.algos.ratios import LOG_RATIO_LIMIT, masked, row_mean, row_product, token_log_ratio
from nanoskyrl.algos.tensors import Tensor
from nanoskyrl.stages.core.checked import Checked, Coefficient, NonNegativeFloat, PositiveFloat
from nanoskyrl.stages.core.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyConfig(Checked):
    """How rows of another policy are weighed and left out; the default does neither."""

    weight: Literal["none", "token", "sequence"] = "none"
    """none, token (each token's ratio), or sequence (the product over its row)."""
    cap: PositiveFloat = 2.0
    """Weights are at most this, where there is no band."""
    band: tuple[NonNegativeFloat, NonNegativeFloat] | None = None
    """Tokens whose ratio lies outside weigh nothing, others their ratio (IcePop); with weight = token."""
    normalize: bool = False
    """Divide the weights by their mean over the mini-batch's trained tokens."""
    reject: Literal["none", "product", "geometric", "any_token"] = "none"
    """Leave whole rows out: none, by their product, by their geometric mean, or if any_token lies outside."""
    reject_band: tuple[NonNegativeFloat, NonNegativeFloat] | None = None
    """Rows inside it stay; needed by reject. 0.5 to 2 suits product, 0.99 to 1.01 geometric, 1e-4 to 100 any_token."""
    denominator: Literal["all", "kept"] = "all"
    """What the loss is divided by: all tokens, or those kept by reject."""
    negative_threshold: PositiveFloat | None = None
    """Leave out rows of negative advantage whose sampled tokens are, on average, so many nats less likely now."""
    trust_band: tuple[NonNegativeFloat, NonNegativeFloat] | None = None
    """A token whose ratio of trained to sampling policy has left it the way its advantage pushes gets no gradient: 0.8
    to 1.2 is where PPO's clip lets go."""
    kl_coef: Coefficient = 0.0
    """Weight in the loss of the KL to the sampling policy, estimated by k2: a pull back to where the rows came from."""

    def check(self) -> None:
        """Refuse bands that hold nothing, and settings that do not go together."""
        for name in ("band", "reject_band", "trust_band"):
            found = getattr(self, name)
            if found is not None and not found[0] < found[1]:
                raise SettingsError(
                    f"`off_policy.{name}` is {list(found)}", hint="Give the lower and the upper bound of the ratio"
                )
        if self.band is not None and self.weight != "token":
            raise SettingsError("`off_policy.band` needs `off_policy.weight = token`", hint="Set both")
        if self.normalize and self.weight == "none":
            raise SettingsError("`off_policy.normalize` needs `off_policy.weight`", hint="Set both")
        if self.denominator == "kept" and self.reject == "none":
            raise SettingsError("`off_policy.denominator = kept` needs `off_policy.reject`", hint="Set both")
        if (self.reject == "none") != (self.reject_band is None):
            raise SettingsError(
                "`off_policy.reject` and `off_policy.reject_band` go together", hint="Set both or neither"
            )

    @property
    def on(self) -> bool:
        """Whether anything is corrected by the old policy's ratio to the one that sampled."""
        return self.weight != "none" or self.reject != "none"

    @property
    def follows_sampler(self) -> bool:
        """Whether the trained policy is compared with the one that sampled, as it learns."""
        return self.negative_threshold is not None or self.trust_band is not None or self.kl_coef > 0


def correction(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    config: OffPolicyConfig,
    *,
    limit: float | None = LOG_RATIO_LIMIT,
) -> tuple[Tensor, Tensor]:
    """Return what each token's loss is multiplied by, and which tokens stay.

    Args:
        old_logprobs: [B, T] nats at the start of the update.
        rollout_logprobs: [B, T] nats under the policy that sampled.
        mask: [B, T] nonzero where trained.
        config: The rule.
        limit: Bound of log-ratios, of a token and of a row's sum, before they are exponentiated.

    Returns:
        Weights [B, T], 0 on tokens and rows left out, before `normalize`; and the mask [B, T] without the rows that
        are rejected.
    """
    on = mask.bool()
    log_ratio = token_log_ratio(old_logprobs, rollout_logprobs, mask, limit).detach()
    ratio = log_ratio.exp()
    product = row_product(log_ratio, mask, limit).exp()
    if config.weight == "sequence":
        weights = product.clamp(max=config.cap).expand_as(ratio)
    elif config.weight == "token":
        weights = ratio if config.band else ratio.clamp(max=config.cap)
    else:
        weights = ratio.new_ones(ratio.shape)
    if config.band is not None:
        weights = weights.masked_fill(~inside(ratio, config.band), 0.0)
    kept = on
    if config.reject_band is not None:
        if config.reject == "any_token":
            rows = (inside(ratio, config.reject_band) | ~on).all(-1, keepdim=True)
        else:
            whole = product if config.reject == "product" else row_mean(log_ratio, mask).exp()
            rows = inside(whole, config.reject_band)
        kept = on & rows
    return masked(weights, kept), kept.to(ratio.dtype)


def mean_weight(weights: Tensor, mask: Tensor) -> float:
    """Return what the weights of a mini-batch are divided by to make their mean over trained tokens 1."""
    mean = float(masked(weights, mask).sum() / mask.sum().clamp(min=1))
    return mean if mean > 0 else 1.0


def inside(ratio: Tensor, band: tuple[float, float]) -> Tensor:
    """Say where a ratio lies in a band, its bounds included."""
    return (ratio >= band[0]) & (ratio <= band[1])


def negative_rows_gone(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    """Return 0 for rows of negative advantage that the trained policy has left behind, 1 for others; [B, 1]."""
    drift = -row_mean(token_log_ratio(logprobs, rollout_logprobs, mask, None).detach(), mask)
    gone = (row_mean(advantages, mask) < 0) & (drift > threshold)
    return 1 - gone.to(advantages.dtype)


def trusted(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, mask: Tensor, band: tuple[float, float]
) -> Tensor:
    """Return 0 for tokens that were pushed out of the band, 1 for others; [B, T].

    Args:
        logprobs: [B, T] nats under the trained policy.
        rollout_logprobs: [B, T] nats under the policy that sampled.
        advantages: [B, T]
        mask: [B, T] nonzero where trained.
        band: Lower and upper ratio of the two.
    """
    ratio = token_log_ratio(logprobs, rollout_logprobs, mask).detach().exp()
    gone = ((advantages > 0) & (ratio > band[1])) | ((advantages < 0) & (ratio < band[0]))
    return 1 - gone.to(advantages.dtype)
