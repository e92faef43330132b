"""RLOO: each reward against the mean of its siblings', its own left out; arXiv 2402.14740."""

from nanoskyrl.algos.estimators.base import Numbers, group_estimator, group_normalized


def leave_one_out(rewards: Numbers, *, singleton: str = "zero") -> Numbers:
    """Return each reward minus the mean of its siblings'.

    Returns:
        One advantage a member: None where the reward is None; 0, or the reward itself, for a group of one.
    """
    scored = [reward for reward in rewards if reward is not None]
    centred = group_normalized(rewards, divide_by_std=False, singleton=singleton)
    if len(scored) < 2:
        return centred
    return [None if value is None else value * len(scored) / (len(scored) - 1) for value in centred]


RLOO = group_estimator("rloo", lambda rewards, config: leave_one_out(rewards, singleton=config.singleton))
