"""PPO's clipped objective, which several algorithms share: min(r A, clip(r) A), with an optional dual clip.

Proximal Policy Optimization, arXiv 1707.06347; the dual clip is of arXiv 1912.09729.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from nanoskyrl.algos.base import SurrogateInputs
from nanoskyrl.algos.tensors import Tensor
from nanoskyrl.stages.core.errors import check_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipConfig:
    """Where the ratio is clipped; the defaults are PPO's."""

    table: ClassVar[str] = "ppo"
    """The table that these settings stand in, for messages."""
    eps_clip_low: float = 0.2
    """The ratio is clipped below 1 minus this."""
    eps_clip_high: float = 0.2
    """The ratio is clipped above 1 plus this."""
    clip_ratio_c: float | None = None
    """Dual clip: where the advantage is negative, the objective is at least this times it; above 1, None is off."""

    def __post_init__(self) -> None:
        """Refuse bounds that cross."""
        check_numbers(self.table, self, "eps_clip_low", least=0, most=1, hint="The ratio is clipped below 1 minus this")
        check_numbers(
            self.table, self, "eps_clip_high", least=0, below=math.inf, hint="The ratio is clipped above 1 plus this"
        )
        check_numbers(self.table, self, "clip_ratio_c", above=1, hint="3 is usual; leave it out for no dual clip")


def clipped(ratio: Tensor, advantages: Tensor, config: ClipConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the smaller of r A and clip(r) A, under the dual clip if it is on.

    Args:
        ratio: [B, T] of a token or of its row; carries the gradient.
        advantages: [B, T]
        config: The bounds.

    Returns:
        [B, T] objective, and `clip_ratio`: 1 where a clip took the gradient away.
    """
    free, bound = ratio * advantages, ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high) * advantages
    objective, gone = free.minimum(bound), bound < free
    if config.clip_ratio_c is not None:
        # Only where the advantage is negative: elsewhere the floor lies below everything.
        floor = (config.clip_ratio_c * advantages).masked_fill(advantages >= 0, -float("inf"))
        objective, gone = objective.maximum(floor), gone | (floor > objective)
    return objective, {"clip_ratio": gone.to(ratio.dtype)}


def token_surrogate(inputs: SurrogateInputs, config: ClipConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped objective of each token's own ratio, to be maximised; [B, T]."""
    return clipped(inputs.log_ratio.exp(), inputs.advantages, config)
