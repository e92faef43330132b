"""What a run's numbers say in words: whether it learns, and if it stalls, which numbers explain it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nanoskyrl.stages.looking.step_numbers import BY_NAME, Steps, outliers

Tone = Literal["good", "note", "warning"]
FEWEST = 6
"""Steps below which nothing is said of how it goes."""
WINDOW = 5
"""Steps, at most, whose mean is compared with another's."""
GAIN = 0.02
"""Of success: less is none."""
LITTLE_SIGNAL = 0.25
"""A share of groups with signal below it is the reading of SkyRL with Fleet for tasks too hard or too easy."""
SOLVED, HARD = 0.9, 0.1
COLLAPSED = 0.2
"""Of its beginning: what is left of entropy that has collapsed."""
OFTEN = 0.2
"""A share of cut attempts or failed calls that costs success."""


@dataclass(frozen=True, slots=True)
class Remark:
    """One thing that the numbers say."""

    tone: Tone
    text: str


def remarks(steps: Sequence[int], numbers: Steps) -> list[Remark]:
    """Return what a run's numbers say, the verdict first and then what explains it; [] of fewer than six steps."""
    name = "success" if any(value is not None for value in numbers["success"]) else "reward"
    values = [value for value in numbers[name] if value is not None]
    if len(values) < FEWEST:
        return []
    first, before, last = values[0], _mean(values[-2 * WINDOW : -WINDOW] or values[:1]), _mean(values[-WINDOW:])
    least = GAIN if name == "success" else GAIN * max(1.0, max(values) - min(values))
    found = [_verdict(name, first, before, last, least)]
    if last - before < least:
        found += _causes(steps, numbers, last if name == "success" else None)
    found += _spikes(steps, numbers)
    return found


def _verdict(name: str, first: float, before: float, last: float, least: float) -> Remark:
    went = f"{name} went from {first:.3g} to {last:.3g} (mean of the last {WINDOW} steps)"
    if last - before >= least:
        return Remark("good", f"It learns: {went}; the {WINDOW} steps before had {before:.3g}")
    if before - last >= 2 * least:
        return Remark("warning", f"It gets worse: {went}; the {WINDOW} steps before had {before:.3g}")
    if name == "success" and last >= SOLVED:
        return Remark("good", f"It has learnt: {went}, and there is little left to gain on these tasks")
    return Remark("warning", f"It stalls: {went}; the {WINDOW} steps before had {before:.3g}")


def _causes(steps: Sequence[int], numbers: Steps, success: float | None) -> list[Remark]:
    found = []
    signal = _ends(numbers.get("signal"))
    if signal and signal[1] < max(LITTLE_SIGNAL, signal[0] / 2):
        share = f"{signal[1]:.0%} of the groups have signal, where it began with {signal[0]:.0%}"
        why = (
            "" if success is None
            else ": nearly all attempts succeed, so harder tasks would teach more" if success >= SOLVED
            else ": nearly all attempts fail, so easier tasks, or rewards for parts of them, would teach more"
            if success <= HARD
            else ": most tasks are either always solved or never"
        )  # fmt: skip
        found.append(Remark("warning" if signal[1] < LITTLE_SIGNAL else "note", share + why))
    entropy = _ends(numbers.get("entropy"))
    if entropy and 0 < entropy[1] < COLLAPSED * entropy[0]:
        text = f"entropy fell from {entropy[0]:.3g} to {entropy[1]:.3g} nats a token: attempts hardly differ any more"
        found.append(Remark("note", text))
    cut = _ends(numbers.get("cut"))
    if cut and cut[1] >= OFTEN:
        text = f"{cut[1]:.0%} of the attempts are cut off by a limit of tokens (first {cut[0]:.0%})"
        found.append(Remark("warning", f"{text}: raise rollout.max_generate_length, or punish length"))
    failed = _ends(numbers.get("failed"))
    if failed and failed[1] >= OFTEN:
        text = f"{failed[1]:.0%} of the tool calls fail (first {failed[0]:.0%}): `skyrl show RUN --failed-calls`"
        found.append(Remark("warning", text))
    tokens = _ends(numbers.get("tokens"))
    if tokens and tokens[1] > 2 * tokens[0]:
        found.append(Remark("note", f"attempts grew from {tokens[0]:.0f} to {tokens[1]:.0f} sampled tokens"))
    return found


def _spikes(steps: Sequence[int], numbers: Steps) -> list[Remark]:
    found = []
    for name in ("kl", "grad", "entropy", "tokens", "gap", "success", "failed", "cut"):
        marked = [index for index, out in enumerate(outliers(name, numbers.get(name, []))) if out]
        if marked:
            values = numbers[name]
            shown = ", ".join(f"{values[index]:.3g} at step {steps[index]}" for index in marked[:3])
            more = f" and {len(marked) - 3} more" if len(marked) > 3 else ""
            found.append(Remark("warning", f"{name} ({BY_NAME[name].meaning}) stands out: {shown}{more}"))
    return found


def _ends(values: Sequence[float | None] | None) -> tuple[float, float] | None:
    """Return a number's first value and the mean of its last ones; None without any."""
    known = [value for value in values or () if value is not None]
    return (known[0], _mean(known[-WINDOW:])) if known else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
