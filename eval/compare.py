"""Two evaluations of the same tasks, set side by side: paired, so that hard tasks are hard for both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
SEED = 0
CHUNK = 1_000
"""Resamples drawn at once, so that many tasks do not fill the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What changed from the first to the second; shares are means over tasks."""

    tasks: int
    """Judged in both."""
    first: float
    second: float
    difference: float
    """Second minus first."""
    difference_95: tuple[float, float]
    """Percentile bootstrap over tasks."""
    improved: tuple[str, ...]
    """Tasks that the second solved more often."""
    worsened: tuple[str, ...]
    only_first: tuple[str, ...]
    """Tasks that the second has no verdict of; they count for neither."""
    only_second: tuple[str, ...]


def paired(first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]]) -> Comparison:
    """Return the paired difference of two evaluations.

    Args:
        first: 1 or 0 for each judged sample, by task.
        second: The same of the other.

    Raises:
        ValueError: no task was judged in both.
    """
    shared = sorted(first.keys() & second.keys())
    if not shared:
        raise ValueError("no task was judged in both")
    a, b = (np.array([np.mean(side[task]) for task in shared]) for side in (first, second))
    change = b - a
    return Comparison(
        tasks=len(shared),
        first=float(a.mean()),
        second=float(b.mean()),
        difference=float(change.mean()),
        difference_95=bootstrap_95(change),
        improved=tuple(task for task, by in zip(shared, change, strict=True) if by > 0),
        worsened=tuple(task for task, by in zip(shared, change, strict=True) if by < 0),
        only_first=tuple(sorted(first.keys() - second.keys())),
        only_second=tuple(sorted(second.keys() - first.keys())),
    )


def bootstrap_95(values: np.ndarray) -> tuple[float, float]:
    """Return the 2.5th and 97.5th percentile of the mean of values drawn with putting back.

    Args:
        values: [tasks] one number a task.
    """
    rng = np.random.default_rng(SEED)
    means = np.concatenate(
        [values[rng.integers(len(values), size=(CHUNK, len(values)))].mean(axis=1) for _ in range(RESAMPLES // CHUNK)]
    )
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
