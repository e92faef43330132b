"""GRPO: PPO's clipped surrogate on token ratios, with group-normalised advantages.

DeepSeekMath, arXiv 2402.03300. The paper averages tokens in a row, then rows.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanoskyrl.algos.base import Algorithm, SurrogateInputs
from nanoskyrl.stages.errors import SettingsError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoConfig:
    """Where the ratio is clipped; the defaults are PPO's."""

    eps_clip_low: float = 0.2
    """The ratio is clipped below 1 minus this."""
    eps_clip_high: float = 0.2
    """The ratio is clipped above 1 plus this."""

    def __post_init__(self) -> None:
        """Refuse bounds that cross."""
        if not (0 <= self.eps_clip_low <= 1 and self.eps_clip_high >= 0):
            raise SettingsError(
                f"`grpo.eps_clip_low` is {self.eps_clip_low} and `grpo.eps_clip_high` {self.eps_clip_high}",
                hint="The low one is 0 to 1, the high one at least 0",
            )


def surrogate(inputs: SurrogateInputs, config: GrpoConfig) -> tuple["Tensor", dict[str, "Tensor"]]:
    """Return the smaller of r A and clip(r) A for each token, to be maximised.

    Returns:
        [B, T] objective, and `clip_ratio`: 1 where the clip took the gradient away.
    """
    ratio = inputs.log_ratio.exp()
    clipped = ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high)
    free, bound = ratio * inputs.advantages, clipped * inputs.advantages
    return free.minimum(bound), {"clip_ratio": (bound < free).to(ratio.dtype)}


GRPO = Algorithm(name="grpo", surrogate=surrogate, Config=GrpoConfig, estimator="grpo", loss_reduction="sequence_mean")
