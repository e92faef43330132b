"""Log-ratios between two policies, safe to exponentiate."""

from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""exp(20) is past anything a ratio can mean, and still finite in float32."""


def token_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return log p - log p_old on masked-in tokens, 0 elsewhere, bounded to +-LOG_RATIO_LIMIT.

    Masking comes before anything else: what stands in padding, NaN included, reaches
    neither value nor gradient.

    Args:
        logprobs: [B, T] nats; carries the gradient.
        old_logprobs: [B, T] nats.
        mask: [B, T] nonzero where trained.

    Returns:
        [B, T]
    """
    on = mask.bool()
    difference = logprobs.masked_fill(~on, 0.0) - old_logprobs.masked_fill(~on, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
