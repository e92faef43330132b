"""Log-ratios between two policies, safe to exponentiate: of a token, and of a whole row."""

from nanoskyrl.algos.tensors import Tensor

LOG_RATIO_LIMIT = 20.0
"""exp(20) is past anything a ratio can mean, and still finite in float32."""
SEQUENCE_LOG_RATIO_LIMIT = 10.0
"""The same for a row's mean, from above only, as verl and SkyRL have it."""


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Return the values where the mask is nonzero, and 0 elsewhere, whatever stood there, NaN included."""
    return values.masked_fill(~mask.bool(), 0.0)


def token_log_ratio(
    logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, limit: float | None = LOG_RATIO_LIMIT
) -> Tensor:
    """Return log p - log p_old on masked-in tokens, 0 elsewhere, bounded to +-limit.

    Masking comes before anything else: what is in padding, NaN included, reaches
    neither value nor gradient. Past the limit the gradient is 0.

    Args:
        logprobs: [B, T] nats; carries the gradient.
        old_logprobs: [B, T] nats.
        mask: [B, T] nonzero where trained.
        limit: None leaves the difference as it is.

    Returns:
        [B, T]
    """
    difference = masked(logprobs, mask) - masked(old_logprobs, mask)
    return difference if limit is None else difference.clamp(-limit, limit)


def row_tokens(mask: Tensor) -> Tensor:
    """Return how many tokens of each row are trained, at least 1; [B, 1]."""
    return mask.sum(-1, keepdim=True).clamp(min=1)


def row_mean(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Return the mean log-ratio of each row's trained tokens, the log of their geometric mean; [B, 1]."""
    return masked(log_ratio, mask).sum(-1, keepdim=True) / row_tokens(mask)


def row_product(log_ratio: Tensor, mask: Tensor, limit: float | None = LOG_RATIO_LIMIT) -> Tensor:
    """Return the summed log-ratio of each row's trained tokens, the log of their product, bounded to +-limit; [B, 1].

    A thousand tokens of ratio 1.01 make a product of 20,000.
    """
    total = masked(log_ratio, mask).sum(-1, keepdim=True)
    return total if limit is None else total.clamp(-limit, limit)


def row_mean_for_tokens(log_ratio: Tensor, mask: Tensor, limit: float | None = SEQUENCE_LOG_RATIO_LIMIT) -> Tensor:
    """Return each row's mean log-ratio at each of its tokens, where the gradient is the token's own; [B, T].

    GSPO-token, arXiv 2507.18071: sg(s) exp(l - sg(l)).
    """
    mean = row_mean(log_ratio, mask).detach()
    # The difference is exactly 0; added to the mean first, the small mean would be lost in the large log-prob.
    found = (log_ratio - log_ratio.detach()) + mean
    return found if limit is None else found.clamp(max=limit)
