"""What an algorithm is: a surrogate, its settings, and the defaults that go with it.

Three policies take part, and their log-probs never stand for one another in silence:
`rollout_logprobs`, under the policy that sampled (u); `old_logprobs`, under the policy at
the start of the update (o); `logprobs`, under the policy that is trained (l).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.random import Generator

from nanoskyrl.algos.ratios import LOG_RATIO_LIMIT, masked, token_log_ratio
from nanoskyrl.algos.tensors import Tensor


@dataclass(frozen=True, slots=True)
class SurrogateInputs:
    """What a surrogate sees of a micro-batch; [B, T], on trained tokens only, 0 elsewhere."""

    logprobs: Tensor
    """Nats under the trained policy; carries the gradient."""
    old_logprobs: Tensor
    """Nats under the old policy."""
    log_ratio: Tensor
    """Nats, trained policy minus old policy, guarded; carries the gradient."""
    advantages: Tensor
    mask: Tensor
    """1.0 on trained tokens."""
    marked: Tensor
    """1.0 on tokens that the algorithm's `marks` picked out of the whole mini-batch."""


Surrogate = Callable[[SurrogateInputs, Any], tuple[Tensor, dict[str, Tensor]]]
"""Returns each token's objective [B, T], to be maximised, and named [B, T] values whose mean over trained tokens
is reported; the first of them is the algorithm's own share: of tokens clipped or held, or of the gradient let
through."""

Marks = Callable[[SurrogateInputs, Any, Generator], Tensor]
"""Takes all trained tokens of a mini-batch, end to end as [1, N] and without gradient, and returns 1 on those that the
surrogate treats apart, 0 on others: so a rank or a mean over tokens hangs on no micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One way to learn from trajectories, chosen by name."""

    name: str
    surrogate: Surrogate
    Config: type
    """Frozen settings of the surrogate."""
    marks: Marks | None = None
    """Picks tokens by comparing all of a mini-batch, for a forward pass more; None: no token hangs on another row's."""
    source: str
    """Where it was published."""
    estimator: str
    """Name of the advantage estimator it was published with."""
    loss_reduction: str
    """Name in `nanoskyrl.algos.aggregate` of the reduction it was published with."""
    kl_place: str = "none"
    """Where its publication puts the KL to the reference: none, reward or loss. It is off until asked for."""
    kl_estimator: str = "k3"
    """Estimator of that KL."""
    overlong_punishment: bool = False
    """Whether it shapes rewards by length."""
    dynamic_sampling: bool = False
    """Whether it samples until enough groups have spread."""
    needs_critic: bool = False
    """Whether its estimator reads values."""
    uses_ratio: bool = True
    """Whether a wrong old log-prob makes a wrong gradient."""
    log_ratio_limit: float | None = LOG_RATIO_LIMIT
    """Bound of a token's log-ratio before it is exponentiated; None where the surrogate has a guard of its own."""

    @property
    def loss_kl_estimator(self) -> str:
        """Estimator of a KL in the loss: k1, published for rewards, has no gradient there."""
        return self.kl_estimator if self.kl_place == "loss" else "k3"

    def inputs(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        marked: Tensor | None = None,
    ) -> SurrogateInputs:
        """Return what the surrogate sees, masked before anything else: junk in padding reaches nothing.

        Args:
            logprobs: [B, T] nats; carries the gradient.
            old_logprobs: [B, T] nats.
            advantages: [B, T]
            mask: [B, T] nonzero where trained.
            marked: [B, T] nonzero on tokens that `marks` picked; None: on none.
        """
        on = mask.to(logprobs.dtype)
        return SurrogateInputs(
            logprobs=masked(logprobs, mask),
            old_logprobs=masked(old_logprobs, mask),
            log_ratio=token_log_ratio(logprobs, old_logprobs, mask, self.log_ratio_limit),
            advantages=masked(advantages, mask),
            mask=on,
            marked=on.new_zeros(on.shape) if marked is None else masked(marked.to(on.dtype), mask),
        )
