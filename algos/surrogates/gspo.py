"""GSPO: one ratio for a whole row, the geometric mean of its tokens' ratios, clipped as PPO's.

Group Sequence Policy Optimization, arXiv 2507.18071. The ratio is averaged over the row,
so its bounds are a thousand times narrower than PPO's.
"""

from dataclasses import dataclass
from typing import ClassVar

from nanoskyrl.algos.base import Algorithm, SurrogateInputs
from nanoskyrl.algos.ratios import SEQUENCE_LOG_RATIO_LIMIT, row_mean, row_mean_for_tokens
from nanoskyrl.algos.surrogates.clip import ClipConfig, clipped
from nanoskyrl.algos.tensors import Tensor
from nanoskyrl.stages.core.errors import check_numbers, check_words

FORMS = ("token", "sequence")


@dataclass(frozen=True, slots=True, kw_only=True)
class GspoConfig(ClipConfig):
    """Where a row's ratio is clipped, and whose gradient a token gets; the defaults are the paper's."""

    table: ClassVar[str] = "gspo"
    eps_clip_low: float = 3e-4
    """The ratio is clipped below 1 minus this."""
    eps_clip_high: float = 4e-4
    """The ratio is clipped above 1 plus this."""
    form: str = "token"
    """token (GSPO-token: a token is pushed by its own advantage) or sequence (by its row's mean advantage); the same
    where a row has one advantage."""
    seq_log_ratio_max: float | None = SEQUENCE_LOG_RATIO_LIMIT
    """Bound of a row's mean log-ratio, from above; None is none."""

    def __post_init__(self) -> None:
        """Refuse bounds that cross and forms that do not exist."""
        ClipConfig.__post_init__(self)
        check_words("gspo", self, form=FORMS)
        check_numbers("gspo", self, "seq_log_ratio_max", above=0, hint="10 is usual")


def surrogate(inputs: SurrogateInputs, config: GspoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped objective of each row's ratio at each of its tokens, to be maximised; [B, T]."""
    if config.form == "token":
        log_ratio = row_mean_for_tokens(inputs.log_ratio, inputs.mask, config.seq_log_ratio_max)
    else:
        log_ratio = row_mean(inputs.log_ratio, inputs.mask)
        if config.seq_log_ratio_max is not None:
            log_ratio = log_ratio.clamp(max=config.seq_log_ratio_max)
    return clipped(log_ratio.exp().expand_as(inputs.mask), inputs.advantages, config)


GSPO = Algorithm(
    name="gspo", surrogate=surrogate, Config=GspoConfig, source="arXiv 2507.18071",
    estimator="grpo", loss_reduction="sequence_mean", log_ratio_limit=None,
)  # fmt: skip
