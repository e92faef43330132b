"""GMPO: one ratio for a whole row, the geometric mean of its tokens' ratios, each clipped before it enters.

Geometric-Mean Policy Optimization, arXiv 2507.20673. GSPO clips the mean; here a token that
has moved too far counts with the bound, and the row's other tokens keep their gradient.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from nanoskyrl.algos.base import Algorithm, SurrogateInputs
from nanoskyrl.algos.ratios import row_mean
from nanoskyrl.algos.tensors import Tensor
from nanoskyrl.stages.core.checked import Checked

Nats = Annotated[float, Meta(ge=0, le=20)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GmpoConfig(Checked):
    """Where a token's log-ratio is clipped, in nats; the defaults are the paper's, (e^-0.4, e^0.4)."""

    log_clip_low: Nats = 0.4
    """Where the advantage is negative, a token's log-ratio counts as no less than minus this."""
    log_clip_high: Nats = 0.4
    """Where it is positive, as no more than this."""


def surrogate(inputs: SurrogateInputs, config: GmpoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean ratio of each row times its mean advantage, at each of its tokens, to be maximised.

    Returns:
        [B, T] objective, and `clip_ratio`: 1 where a token's log-ratio was clipped.
    """
    rising = inputs.advantages > 0
    capped = inputs.log_ratio.clamp(max=config.log_clip_high)
    log_ratio = capped.where(rising, inputs.log_ratio.clamp(min=-config.log_clip_low))
    objective = row_mean(log_ratio, inputs.mask).exp() * row_mean(inputs.advantages, inputs.mask)
    clipped = (log_ratio != inputs.log_ratio).to(log_ratio.dtype)
    return objective.expand_as(inputs.mask), {"clip_ratio": clipped}


GMPO = Algorithm(
    name="gmpo", surrogate=surrogate, Config=GmpoConfig, source="arXiv 2507.20673",
    estimator="grpo", loss_reduction="sequence_mean",
)  # fmt: skip
