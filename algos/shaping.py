"""What changes a reward or leaves a trajectory out before advantages are estimated. DAPO, arXiv 2503.14476."""

from collections.abc import Iterable, Sequence

from nanoskyrl.stages.core.metrics import grouped

ZERO_SPREAD = 1e-6
"""Rewards closer than this, relative to the largest, are equal: twelve times 0.7 has a variance only by rounding."""


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


def has_spread(rewards: Sequence[float], tolerance: float = ZERO_SPREAD) -> bool:
    """Say whether the rewards of a group differ by more than the tolerance, which is relative to the largest.

    The one definition of a group with signal: groups without it have advantages of 0, are what dynamic sampling
    replaces and `drop_zero_variance` leaves out, and count as such in metrics.
    """
    scale = max((abs(reward) for reward in rewards), default=0.0)
    return len(rewards) > 1 and max(rewards) - min(rewards) > tolerance * scale


def groups_with_spread(
    groups: Sequence[str],
    metrics: Sequence[float | None],
) -> set[str]:
    """Return the groups whose metric varies, as `has_spread` has it.

    Args:
        groups: Of each trajectory.
        metrics: Of each trajectory: its success, else its unshaped reward; None where neither is known. A reward
            shaped by length would vary in every group.
    """
    known = grouped((group, metric) for group, metric in zip(groups, metrics, strict=True) if metric is not None)
    return {group for group, values in known.items() if has_spread(values)}


def metric_of(success: bool | None, reward: float | None) -> float | None:
    """Return what spread is looked for in: success where it is known, else the unshaped reward."""
    return reward if success is None else float(success)


def first_groups(order: Iterable[str], wanted: set[str], count: int | None) -> set[str]:
    """Return the first so many of the wanted groups, in the order given; all of them if count is None."""
    found = [group for group in dict.fromkeys(order) if group in wanted]
    return set(found if count is None else found[:count])
