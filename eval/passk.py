"""pass@k without bias, and a mean with its interval.

pass@k = 1 - C(n - c, k) / C(n, k) for c right of n samples (arXiv 2107.03374).
"""

import math
from collections.abc import Sequence

NORMAL_95 = 1.959963984540054
"""Standard deviations on either side of a mean that hold 95% of a normal distribution."""


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the chance that k of n samples, drawn without putting back, hold a right one.

    Raises:
        ValueError: k is below 1 or above n; fewer samples say nothing about it.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples, not {n}")
    if not 0 <= correct <= n:
        raise ValueError(f"{correct} of {n} samples cannot be right")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def mean_interval(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Return mean, lower and upper end of its 95% interval, by the spread between tasks; None of nothing.

    Args:
        values: one a task, in 0..1: samples of one task are not independent, tasks are.
    """
    n = len(values)
    if not n:
        return None
    mean = math.fsum(values) / n
    if n == 1 and values[0] not in (0.0, 1.0):
        return mean, 0.0, 1.0
    spread = math.fsum((value - mean) ** 2 for value in values)
    if spread == 0 or all(value in (0.0, 1.0) for value in values):
        # Wilson's interval: the normal one has no width where all tasks had the same outcome.
        square = NORMAL_95**2
        middle = (mean + square / (2 * n)) / (1 + square / n)
        half = NORMAL_95 / (1 + square / n) * math.sqrt(mean * (1 - mean) / n + square / (4 * n * n))
        return mean, max(0.0, middle - half), min(1.0, middle + half)
    half = NORMAL_95 * math.sqrt(spread / (n - 1) / n)
    return mean, max(0.0, mean - half), min(1.0, mean + half)
