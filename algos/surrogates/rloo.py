"""RLOO: each answer against the mean of its siblings, the whole answer one action.

arXiv 2402.14740. A row has one ratio, the product of its tokens' ratios, under PPO's clip; on
policy that is REINFORCE on whole rows. The product leaves the clip's band after a few
hundred tokens of small drift, so `ratio = token` is there for long rows.
"""

from dataclasses import dataclass
from typing import Literal

from nanoskyrl.algos.base import Algorithm, SurrogateInputs
from nanoskyrl.algos.ratios import LOG_RATIO_LIMIT, row_mean, row_product, row_tokens
from nanoskyrl.algos.surrogates.clip import ClipConfig, clipped
from nanoskyrl.algos.tensors import Tensor
from nanoskyrl.stages.core.checked import PositiveFloat


@dataclass(frozen=True, slots=True, kw_only=True)
class RlooConfig(ClipConfig):
    """Where the ratio is clipped, and whose ratio it is."""

    ratio: Literal["sequence", "token"] = "sequence"
    """sequence (the product over a row) or token."""
    log_ratio_max: PositiveFloat | None = LOG_RATIO_LIMIT
    """Bound of the log-ratio, a row's or a token's, on both sides; None is none."""


def surrogate(inputs: SurrogateInputs, config: RlooConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped objective, spread evenly over a row's tokens where the row has one ratio; [B, T]."""
    if config.ratio == "token":
        limit = config.log_ratio_max
        log_ratio = inputs.log_ratio if limit is None else inputs.log_ratio.clamp(-limit, limit)
        return clipped(log_ratio.exp(), inputs.advantages, config)
    ratio = row_product(inputs.log_ratio, inputs.mask, config.log_ratio_max).exp()
    objective, reported = clipped(ratio, row_mean(inputs.advantages, inputs.mask), config)
    spread = objective / row_tokens(inputs.mask)
    return spread.expand_as(inputs.mask), {name: value.expand_as(inputs.mask) for name, value in reported.items()}


RLOO = Algorithm(
    name="rloo", surrogate=surrogate, Config=RlooConfig, source="arXiv 2402.14740", estimator="rloo",
    loss_reduction="seq_mean_token_sum", kl_place="reward", kl_estimator="k1", log_ratio_limit=None,
)  # fmt: skip
