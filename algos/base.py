"""What an algorithm is: a surrogate, its settings, and the defaults that go with it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SurrogateInputs:
    """What a surrogate sees of a micro-batch; [B, T], on sampled tokens only, 0 elsewhere."""

    log_ratio: Tensor
    """Nats, trained policy minus old policy, masked and guarded; carries the gradient."""
    advantages: Tensor
    mask: Tensor
    """1.0 on trained tokens."""


class Surrogate(Protocol):
    """Returns each token's objective, to be maximised, and what to report of it."""

    def __call__(self, inputs: SurrogateInputs, config: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the objective [B, T] and named [B, T] values whose mean over trained tokens is reported."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One way to learn from trajectories, chosen by name."""

    name: str
    surrogate: Callable[[SurrogateInputs, Any], tuple[Tensor, dict[str, Tensor]]]
    Config: type
    """Frozen settings of the surrogate."""
    estimator: str
    """Name of the advantage estimator it was published with."""
    loss_reduction: str
    """Name in `nanoskyrl.algos.aggregate` of the reduction it was published with."""
