"""CISPO: the ratio is clipped and then only weighs the log-prob, so no token loses its whole gradient.

MiniMax-M1, arXiv 2506.13585; ScaleRL, arXiv 2510.13786, caps the ratio at 5. The loss holds
the log-prob itself: its value means nothing, its gradient does.
"""

from dataclasses import dataclass
from typing import Literal

from nanoskyrl.algos.base import Algorithm, SurrogateInputs
from nanoskyrl.algos.tensors import Tensor
from nanoskyrl.stages.core.checked import Checked, NonNegativeFloat, PositiveFloat
from nanoskyrl.stages.core.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class CispoConfig(Checked):
    """Absolute bounds of the ratio, not distances from 1."""

    ratio_min: NonNegativeFloat = 0.0
    """The ratio weighs at least this."""
    ratio_max: PositiveFloat = 5.0
    """The ratio weighs at most this."""
    outside: Literal["clip", "drop"] = "clip"
    """What a token outside the bounds weighs: clip (the bound), or drop (nothing, and on the bound neither)."""

    def check(self) -> None:
        """Refuse bounds that cross."""
        if not self.ratio_min <= self.ratio_max:
            raise SettingsError(
                f"`cispo.ratio_min` is {self.ratio_min} and `cispo.ratio_max` {self.ratio_max}",
                hint="0 and 5 are usual; they are bounds of the ratio itself",
            )


def surrogate(inputs: SurrogateInputs, config: CispoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return sg(clip(r)) A log p for each token, to be maximised.

    Returns:
        [B, T] objective, and `clip_ratio`: 1 where the ratio lay outside the bounds.
    """
    ratio = inputs.log_ratio.detach().exp()
    if config.outside == "drop":
        outside = (ratio <= config.ratio_min) | (ratio >= config.ratio_max)
        weight = ratio.masked_fill(outside, 0.0)
    else:
        outside = (ratio < config.ratio_min) | (ratio > config.ratio_max)
        weight = ratio.clamp(config.ratio_min, config.ratio_max)
    return weight * inputs.advantages * inputs.logprobs, {"clip_ratio": outside.to(ratio.dtype)}


CISPO = Algorithm(
    name="cispo", surrogate=surrogate, Config=CispoConfig, source="arXiv 2506.13585",
    estimator="grpo", loss_reduction="token_mean",
)  # fmt: skip
