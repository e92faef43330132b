"""Signs in a run's numbers that its policy is collapsing, and which settings to try against it.

One number says little: entropy falls in every run that learns, and single ratios are large in good ones. A
collapse is what success tells, over several steps; the other numbers say where it comes from.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from nanoskyrl.stages.core.config import Settings, stage_config
from nanoskyrl.stages.core.metrics import latest, number_in

STEPS = 5
"""Steps over which success is averaged, and the other numbers compared."""
FALL = 0.1
"""How far such a mean must lie below the best before it. On sums with 128 rows a step this is so in every run that
ended below its start, first at steps 13 to 25 of 30, and in none that rose steadily (docs/offpolicy.md)."""
RATIO_GROWTH, SAMPLE_LOSS, ENTROPY_CHANGE = 4.0, 0.1, 2.0
"""By how much the largest ratio must have grown since the best steps, the effective sample shrunk, entropy either."""
SUCCESS, RATIO, SAMPLE = "reward/success", "train/ratio/max", "policy/effective_sample_share"
ENTROPY = "policy/policy_entropy"
NUMBERS = (SUCCESS, RATIO, SAMPLE, ENTROPY)


@dataclass(frozen=True, slots=True)
class Collapse:
    """What was seen at a step."""

    best: float
    """Mean success of the best steps, and of the last."""
    last: float
    signs: tuple[str, ...]
    """Of other numbers; empty: success alone falls."""

    def __str__(self) -> str:
        """Return it in one line."""
        why = f"; {', '.join(self.signs)}" if self.signs else ""
        return f"success fell from {self.best:.2f} to {self.last:.2f}, means of {STEPS} steps{why}"


class CollapseWatch:
    """The numbers of a run's steps, as they come."""

    def __init__(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Begin with what `metrics.jsonl` holds of earlier steps."""
        self._steps: dict[int, dict[str, Any]] = {}
        lines = list(lines)
        for stage in ("score", "train"):
            for step, numbers in latest(lines, stage).items():
                self._take(step, numbers)
        self._told: int | None = None

    def _take(self, step: int, numbers: Mapping[str, Any]) -> None:
        self._steps.setdefault(step, {}).update({name: numbers[name] for name in NUMBERS if name in numbers})

    def after(self, step: int, numbers: Mapping[str, Any]) -> Collapse | None:
        """Return what a step shows of a collapse; None: nothing, too little is known, or it was reported just now."""
        self._take(step, numbers)
        found = collapse_of([self._steps[at] for at in sorted(self._steps) if at <= step])
        if found is None or (self._told is not None and step < self._told + STEPS):
            return None
        self._told = step
        return found


def collapse_of(steps: Sequence[Mapping[str, Any]]) -> Collapse | None:
    """Return what the last of these steps show of a collapse; None: nothing, or too little is known.

    Args:
        steps: The numbers of each, in order.
    """
    success = _numbers(steps, SUCCESS)
    if len(success) < 2 * STEPS:
        return None
    means = [mean(success[i : i + STEPS]) for i in range(len(success) - STEPS + 1)]
    best = max(range(len(means) - STEPS + 1), key=means.__getitem__)
    if means[best] - means[-1] < FALL:
        return None
    return Collapse(means[best], means[-1], tuple(_signs(steps[best : best + STEPS], steps[-STEPS:])))


def _signs(then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Yield what the other numbers say of the last steps, beside the best ones."""
    for name, worst in ((RATIO, max), (SAMPLE, min), (ENTROPY, mean)):
        before, after = _numbers(then, name), _numbers(now, name)
        if not (before and after):
            continue
        was, is_now = worst(before), worst(after)
        if name == RATIO and is_now > RATIO_GROWTH * was:
            yield f"the largest ratio rose from {was:.3g} to {is_now:.3g}"
        if name == SAMPLE and is_now < was - SAMPLE_LOSS:
            yield f"the effective sample fell from {was:.0%} to {is_now:.0%}"
        if name == ENTROPY and is_now > ENTROPY_CHANGE * was:
            yield f"entropy rose from {was:.2g} to {is_now:.2g}"
        if name == ENTROPY and ENTROPY_CHANGE * is_now < was:
            yield f"entropy fell from {was:.2g} to {is_now:.2g}"


def _numbers(lines: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Return a number of each line; empty where one lacks it."""
    found = [value for line in lines if (value := number_in(line, name)) is not None]
    return found if len(found) == len(lines) else []


def remedy(settings: Settings, lr: float) -> str:
    """Return the setting to try first, of those that are not in force.

    Args:
        settings: Of the run, what follows from its lag included.
        lr: Rate of the last update.
    """
    run, train = (stage_config(settings, name) for name in ("run", "train"))
    if run.lag and not run.lag_defaults:
        return "run.lag_defaults=true"
    if not train.target_kl and (train.update_epochs_per_batch > 1 or train.policy_mini_batch_size is not None):
        return "train.target_kl=0.02"
    return f"train.lr={lr / 2:.2g}"
