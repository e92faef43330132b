"""What an algorithm is: a surrogate, its settings, and the defaults that go with it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class SurrogateInputs:
    """What a surrogate sees of a micro-batch; [B, T], on sampled tokens only, 0 elsewhere."""

    log_ratio: "Tensor"
    """Nats, trained policy minus old policy, masked and guarded; carries the gradient."""
    advantages: "Tensor"
    mask: "Tensor"
    """1.0 on trained tokens."""


Surrogate = Callable[[SurrogateInputs, Any], tuple["Tensor", dict[str, "Tensor"]]]
"""Returns each token's objective [B, T], to be maximised, and named [B, T] values whose mean over trained tokens
is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One way to learn from trajectories, chosen by name."""

    name: str
    surrogate: Surrogate
    Config: type
    """Frozen settings of the surrogate."""
    estimator: str
    """Name of the advantage estimator it was published with."""
    loss_reduction: str
    """Name in `nanoskyrl.algos.aggregate` of the reduction it was published with."""
