"""GSPO: one ratio for a whole row, the geometric mean of its tokens' ratios, clipped as PPO's.

Group Sequence Policy Optimization, arXiv 2507.18071. The ratio is averaged over the row,
so its bounds are a thousand times narrower than PPO's.
"""

from dataclasses import dataclass
from typing import Literal

from nanoskyrl.algos.base import Algorithm, SurrogateInputs
from nanoskyrl.algos.ratios import SEQUENCE_LOG_RATIO_LIMIT, row_mean, row_mean_for_tokens
from nanoskyrl.algos.surrogates.clip import ClipConfig, clipped
from nanoskyrl.algos.tensors import Tensor
from nanoskyrl.stages.core.checked import FiniteNonNegative, Share


@dataclass(frozen=True, slots=True, kw_only=True)
class GspoConfig(ClipConfig):
    """Where a row's ratio is clipped, and whose gradient a token gets; the defaults are the paper's."""

    eps_clip_low: Share = 3e-4
    """The ratio is clipped below 1 minus this."""
    eps_clip_high: FiniteNonNegative = 4e-4
    """The ratio is clipped above 1 plus this."""
    form: Literal["token", "sequence"] = "token"
    """token (GSPO-token: a token is pushed by its own advantage) or sequence (by its row's mean advantage); the same
    where a row has one advantage."""


def surrogate(inputs: SurrogateInputs, config: GspoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped objective of each row's ratio at each of its tokens, to be maximised; [B, T]."""
    if config.form == "token":
        log_ratio = row_mean_for_tokens(inputs.log_ratio, inputs.mask, SEQUENCE_LOG_RATIO_LIMIT)
    else:
        log_ratio = row_mean(inputs.log_ratio, inputs.mask).clamp(max=SEQUENCE_LOG_RATIO_LIMIT)
    return clipped(log_ratio.exp().expand_as(inputs.mask), inputs.advantages, config)


GSPO = Algorithm(
    name="gspo", surrogate=surrogate, Config=GspoConfig, source="arXiv 2507.18071",
    estimator="grpo", loss_reduction="sequence_mean", log_ratio_limit=None,
)  # fmt: skip
