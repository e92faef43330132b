"""Estimates of the KL divergence between the policy and the reference, one number a token.

Schulman, "Approximating KL divergence", 2020. With d = log p - log p_ref: k1 = d, k2 = d^2 / 2,
k3 = exp(-d) + d - 1. k1 and k3 are unbiased in value; as a loss, k1 has no gradient in
expectation, k2 has that of KL(policy || reference), k3 that of KL(reference || policy).
"""

from typing import Literal

from nanoskyrl.algos.ratios import LOG_RATIO_LIMIT, masked, token_log_ratio
from nanoskyrl.algos.tensors import Tensor

KlEstimator = Literal["k1", "k2", "k3", "abs"]
K3_LIMIT = 10.0
"""verl and SkyRL bound k3 so: a single token that the policy has all but forgotten would outweigh a batch."""


def kl(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    estimator: str,
    *,
    straight_through: bool = False,
    log_limit: float | None = LOG_RATIO_LIMIT,
    value_limit: float | None = None,
) -> Tensor:
    """Return an estimate of KL(policy || reference) for each token, 0 where the mask is 0.

    Args:
        logprobs: [B, T] nats; carries the gradient.
        ref_logprobs: [B, T] nats.
        mask: [B, T] nonzero where trained.
        estimator: One of KlEstimator.
        straight_through: Keep the value, and take the gradient of k2.
        log_limit: Bound of d before it is exponentiated, in k3.
        value_limit: Bound of the estimate.

    Returns:
        [B, T] nats.
    """
    difference = token_log_ratio(logprobs, ref_logprobs, mask, None)
    square = difference.square() / 2
    if estimator == "k1":
        found = difference
    elif estimator == "k2":
        found = square
    elif estimator == "abs":
        found = difference.abs()
    elif estimator == "k3":
        bounded = difference if log_limit is None else difference.clamp(-log_limit, log_limit)
        found = (-bounded).expm1() + bounded  # exp(-d) - 1 of a small d is rounding alone
    else:
        raise ValueError(f"unknown KL estimator {estimator!r}")
    if value_limit is not None:
        found = found.clamp(-value_limit, value_limit)
    if straight_through:
        found = found.detach() + (square - square.detach())
    return masked(found, mask)


def adapted(coef: float, kl: float, rows: int, *, target: float, horizon: int) -> float:
    """Return the coefficient of the next step: larger where the KL lies above its target, smaller below.

    Fine-Tuning Language Models from Human Preferences, arXiv 1909.08593. The error, relative to
    the target, counts as no more than a fifth, and `horizon` rows of such an error change the
    coefficient by a fifth; so does one step of more rows.

    Args:
        coef: The one in force.
        kl: Nats, the mean over rows of their tokens' mean.
        rows: How many there were.
        target: Nats.
        horizon: Rows.
    """
    return coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * min(rows / horizon, 1.0))
