"""Recursions over the trained tokens of trajectories: returns, generalised advantages, whitening.

Tokens that were observed are skipped, not stepped over: discount and value pass from one
trained token to the next, and whatever stands on the others, NaN included, reaches nothing.
"""

from collections.abc import Sequence

import numpy as np

WHITEN_EPS = 1e-8
"""Added to the variance."""

Ragged = Sequence[np.ndarray | None]
"""One array a trajectory; None where there is nothing to say."""


def discounted_returns(rewards: Ragged, masks: Sequence[np.ndarray], *, gamma: float) -> list[np.ndarray | None]:
    """Return the discounted sum of rewards from each trained token on, 0 on others; REINFORCE++, arXiv 2501.03262.

    It is the generalised advantage over a critic that says 0 of everything, with lambda 1.

    Args:
        rewards: [T] by token.
        masks: [T] nonzero on trained tokens.
        gamma: Discount from one trained token to the next.
    """
    return gae(rewards, [np.zeros(len(mask)) for mask in masks], masks, gamma=gamma, lambd=1.0)[0]


def gae(
    rewards: Ragged, values: Ragged, masks: Sequence[np.ndarray], *, gamma: float, lambd: float
) -> tuple[list[np.ndarray | None], list[np.ndarray | None]]:
    """Return generalised advantages and returns, 0 on tokens that are not trained; GAE, arXiv 1506.02438.

    The value after the last trained token is 0, of truncated trajectories too.

    Args:
        rewards: [T] by token.
        values: [T] of the critic before each token is drawn.
        masks: [T] nonzero on trained tokens.
        gamma: Discount from one trained token to the next.
        lambd: Decay of later surprises.

    Returns:
        Advantages [T], and returns [T] = advantages + values.
    """
    packed, predicted = _pack(rewards, masks), _pack(values, masks)
    running, following = np.zeros(len(packed)), np.zeros(len(packed))
    found = np.zeros_like(packed)
    # Past a trajectory's end all is 0, and stays so.
    for t in range(packed.shape[1] - 1, -1, -1):
        surprise = packed[:, t] + gamma * following - predicted[:, t]
        running = surprise + gamma * lambd * running
        following = predicted[:, t]
        found[:, t] = running
    return _unpack(found, rewards, masks), _unpack(found + predicted, rewards, masks)


def whiten(values: Ragged, masks: Sequence[np.ndarray], *, ddof: int = 1) -> list[np.ndarray | None]:
    """Return (value - mean) / sqrt(variance + WHITEN_EPS) over all trained tokens of the batch, 0 on others.

    Every token counts equally, so long trajectories weigh more.

    Args:
        values: [T] by token.
        masks: [T] nonzero on trained tokens.
        ddof: Taken off the count in the variance.
    """
    parts = [value[mask != 0] for value, mask in zip(values, masks, strict=True) if value is not None]
    flat = np.concatenate(parts) if parts else np.zeros(0)
    if len(flat) <= ddof or flat.max() == flat.min():
        return [None if value is None else np.zeros(len(value)) for value in values]
    mean, scale = flat.mean(), 1 / np.sqrt(flat.var(ddof=ddof) + WHITEN_EPS)
    return [
        None if value is None else np.where(mask != 0, (np.where(mask != 0, value, mean) - mean) * scale, 0.0)
        for value, mask in zip(values, masks, strict=True)
    ]


def _pack(rows: Ragged, masks: Sequence[np.ndarray]) -> np.ndarray:
    """Return the trained tokens of each row, side by side and padded with 0; [B, N] float64."""
    width = max((np.count_nonzero(mask) for mask in masks), default=0)
    packed = np.zeros((len(rows), width))
    for index, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        if row is not None:
            trained = row[mask != 0]
            packed[index, : len(trained)] = trained
    return packed


def _unpack(packed: np.ndarray, rows: Ragged, masks: Sequence[np.ndarray]) -> list[np.ndarray | None]:
    """Put packed numbers back on the tokens they belong to."""
    return [
        None if row is None else _on_trained(numbers, mask)
        for numbers, row, mask in zip(packed, rows, masks, strict=True)
    ]


def _on_trained(numbers: np.ndarray, mask: np.ndarray) -> np.ndarray:
    line = np.zeros(len(mask))
    line[mask != 0] = numbers[: np.count_nonzero(mask)]
    return line
