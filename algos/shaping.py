"""What changes a reward or leaves a trajectory out before advantages are estimated. DAPO, arXiv 2503.14476."""

from collections.abc import Iterable, Sequence

SPREAD_TOLERANCE = 1e-6
"""A group whose success or reward varies by no more than this teaches nothing."""


def overlong_punishment(length: int, *, max_length: int, buffer_length: int, factor: float = 1.0) -> float:
    """Return what is added to the reward of a response of this many tokens: 0, falling to -factor within the buffer.

    Equation 13. Past max_length it stays at -factor.

    Args:
        length: Sampled tokens, the stop token included.
        max_length: Where the punishment is whole.
        buffer_length: Tokens before it over which the punishment grows.
        factor: The whole punishment.
    """
    over = length - (max_length - buffer_length)
    return -factor * min(max(over / buffer_length, 0.0), 1.0)


def is_overlong(stop_reason: str) -> bool:
    """Say whether a response did not end by itself, whatever cut it off."""
    return stop_reason != "stop"


def groups_with_spread(
    groups: Sequence[str],
    metrics: Sequence[float | None],
    *,
    tolerance: float = SPREAD_TOLERANCE,
    keep_singletons: bool = False,
) -> set[str]:
    """Return the groups whose metric varies by more than the tolerance.

    Args:
        groups: Of each trajectory.
        metrics: Of each trajectory: its success, else its unshaped reward; None where neither is known. A reward
            shaped by length would vary in every group.
        tolerance: Largest difference that counts as none.
        keep_singletons: Whether a group with at most one known metric is kept.
    """
    known: dict[str, list[float]] = {}
    for group, metric in zip(groups, metrics, strict=True):
        of_group = known.setdefault(group, [])
        if metric is not None:
            of_group.append(metric)
    return {
        group
        for group, values in known.items()
        if (len(values) < 2 and keep_singletons) or (len(values) > 1 and max(values) - min(values) > tolerance)
    }


def metric_of(success: bool | None, reward: float | None) -> float | None:
    """Return what spread is looked for in: success where it is known, else the unshaped reward."""
    return reward if success is None else float(success)


def first_groups(order: Iterable[str], wanted: set[str], count: int | None) -> set[str]:
    """Return the first so many of the wanted groups, in the order given; all of them if count is None."""
    found = [group for group in dict.fromkeys(order) if group in wanted]
    return set(found if count is None else found[:count])
