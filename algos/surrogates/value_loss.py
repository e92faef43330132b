"""What a critic is trained to: the returns, without moving far from what it predicted before.

The clipped value loss of PPO's reference implementation; High-Dimensional Continuous Control
Using Generalized Advantage Estimation, arXiv 1506.02438, for the targets.
"""

from nanoskyrl.algos.ratios import masked
from nanoskyrl.algos.tensors import Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return half the squared error of each token's value, the worse of the value and its clipped self.

    Args:
        values: [B, T] of the critic that is trained; carries the gradient.
        old_values: [B, T] as `advantage` wrote them.
        returns: [B, T] targets.
        mask: [B, T] nonzero where trained.
        clip: How far a value counts as having moved from the old one; None: any distance.

    Returns:
        Loss [B, T], to be minimised, and 1 where the clip took the gradient away [B, T].
    """
    values, old_values, returns = (masked(of, mask) for of in (values, old_values, returns))
    free = (values - returns).square()
    if clip is None:
        return free / 2, free.new_zeros(free.shape)
    bound = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return free.maximum(bound) / 2, (bound > free).to(free.dtype)
