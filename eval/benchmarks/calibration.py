"""How far stated confidence is from how often it is right: root mean square over bins.

HLE's authors leave the last bin out of the sum, so that theirs cannot be computed below 100
rows, is always 0 from 100 to 199, and is a little low above. It is given from 200 rows on;
`calibration_error` has every bin, and is given always.
"""

from collections.abc import Sequence

import numpy as np

BIN = 100
"""Rows of a bin in HLE's own function."""
LEAST_OFFICIAL = 2 * BIN
MOST_BINS = 10


def calibration_error(confidence: Sequence[float], right: Sequence[bool]) -> float | None:
    """Return the error over bins of equally many rows, 10 rows or more each where there are enough; None of nothing.

    Args:
        confidence: [n] 0..1
        right: [n]
    """
    if not len(confidence):
        return None
    bins = max(1, min(MOST_BINS, len(confidence) // 10))
    order = np.argsort(np.asarray(confidence), kind="stable")
    return _root_mean_square(np.array_split(order, bins), confidence, right)


def official_calibration_error(confidence: Sequence[float], right: Sequence[bool]) -> float | None:
    """Return the error as HLE's authors compute it, its last bin left out; None below 200 rows."""
    if len(confidence) < LEAST_OFFICIAL:
        return None
    order = np.argsort(np.asarray(confidence), kind="stable")
    kept = [order[i * BIN : (i + 1) * BIN] for i in range(len(confidence) // BIN - 1)]
    return _root_mean_square(kept, confidence, right)


def _root_mean_square(bins: Sequence[np.ndarray], confidence: Sequence[float], right: Sequence[bool]) -> float:
    said, was = np.asarray(confidence, float), np.asarray(right, float)
    return float(np.sqrt(sum(len(rows) / len(said) * (said[rows].mean() - was[rows].mean()) ** 2 for rows in bins)))
