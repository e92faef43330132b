"""PPO's clipped objective, which several algorithms share: min(r A, clip(r) A), with an optional dual clip.

Proximal Policy Optimization, arXiv 1707.06347; the dual clip is of arXiv 1912.09729.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from nanoskyrl.algos.base import SurrogateInputs
from nanoskyrl.algos.tensors import Tensor
from nanoskyrl.stages.core.checked import Checked, FiniteNonNegative, Share


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipConfig(Checked):
    """Where the ratio is clipped; the defaults are PPO's."""

    table: ClassVar[str] = "ppo"
    eps_clip_low: Share = 0.2
    """The ratio is clipped below 1 minus this."""
    eps_clip_high: FiniteNonNegative = 0.2
    """The ratio is clipped above 1 plus this."""
    clip_ratio_c: Annotated[float, Meta(gt=1)] | None = None
    """Dual clip: where the advantage is negative, the objective is at least this times it. 3 is usual; None is off."""


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
