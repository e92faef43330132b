"""REINFORCE: the plain policy gradient, without a ratio. What every surrogate is on policy.

Williams, 1992, Machine Learning 8, 229-256. Right for one optimizer step on fresh rows only.
"""

from dataclasses import dataclass

from nanoskyrl.algos.base import Algorithm, SurrogateInputs
from nanoskyrl.algos.tensors import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforceConfig:
    """There is nothing to set."""


def surrogate(inputs: SurrogateInputs, config: ReinforceConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return A log p for each token, to be maximised; [B, T]."""
    return inputs.advantages * inputs.logprobs, {}


REINFORCE = Algorithm(
    name="reinforce", surrogate=surrogate, Config=ReinforceConfig, source="Williams, 1992",
    estimator="reinforce_pp", loss_reduction="token_mean", kl_place="reward", kl_estimator="k1", uses_ratio=False,
)  # fmt: skip
