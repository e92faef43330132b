"""SAPO: a smooth gate on the token ratio in place of a hard clip.

Soft Adaptive Policy Optimization, arXiv 2511.20347. f(r) = 4 / tau * sigmoid(tau (r - 1)),
with a temperature of its own for negative advantages; f'(1) = 1 for every temperature.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from nanoskyrl.algos.base import Algorithm, SurrogateInputs
from nanoskyrl.algos.tensors import Tensor
from nanoskyrl.stages.core.checked import Checked

Temperature = Annotated[float, Meta(gt=0, le=1000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SapoConfig(Checked):
    """Temperatures of the gate; the defaults are the paper's."""

    tau_pos: Temperature = 1.0
    """Where the advantage is positive; 1 is the paper's. A larger value narrows the gate."""
    tau_neg: Temperature = 1.05
    """Elsewhere; 1.05 is the paper's. Larger than tau_pos: pushing one token down raises many unsampled ones."""


def surrogate(inputs: SurrogateInputs, config: SapoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return f(r) A for each token, to be maximised.

    Its value at r = 1 is 2 A / tau, so losses under different temperatures do not compare.

    Returns:
        [B, T] objective, and `gate`: f'(r), the share of the gradient that is let through.
    """
    rising = (inputs.advantages > 0).to(inputs.log_ratio.dtype)
    tau = rising * config.tau_pos + (1 - rising) * config.tau_neg
    level = (tau * (inputs.log_ratio.exp() - 1)).sigmoid()
    return 4 / tau * level * inputs.advantages, {"gate": (4 * level * (1 - level)).detach()}


SAPO = Algorithm(
    name="sapo", surrogate=surrogate, Config=SapoConfig, source="arXiv 2511.20347",
    estimator="grpo", loss_reduction="sequence_mean",
)  # fmt: skip
