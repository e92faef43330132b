"""The numbers of a run's steps that tell how it learns: what they are called, and which stand out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nanoskyrl.stages.core.metrics import latest, number_in, read_metrics, seconds_of_stages
from nanoskyrl.stages.core.pipeline import STAGES
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.looking.timings import stages_in

Steps = dict[str, list[float | None]]
"""A list for each number, an element a step; None where there is none."""
CUT = ("length", "max_input_length", "max_sequence_length")
"""Reasons why an attempt ended that are no decision of the policy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumber:
    """A number of each step."""

    name: str
    label: str
    """At the head of a column."""
    meaning: str
    stage: str
    key: str
    """In the lines of metrics.jsonl."""
    kind: Literal["share", "size", "noise", "plain"] = "plain"
    """How it stands out among its neighbours; see `outliers`. share: from 0 to 1; size: above 0, of one order of
    magnitude; noise: above 0, of several; plain: it does not."""


NUMBERS = (
    StepNumber(name="success", label="success", meaning="share of the attempts that succeeded", stage="score", key="reward/success", kind="share"),
    StepNumber(name="reward", label="reward", meaning="mean reward", stage="score", key="reward/avg_raw_reward"),
    StepNumber(name="signal", label="signal", meaning="share of groups whose attempts came out differently: only they teach", stage="score", key="reward/groups_with_signal", kind="share"),
    StepNumber(name="tokens", label="tokens", meaning="sampled tokens of an attempt, mean", stage="rollout", key="rollout/response_tokens/mean", kind="size"),
    StepNumber(name="turns", label="turns", meaning="turns of an attempt, mean", stage="rollout", key="rollout/turns/mean", kind="size"),
    StepNumber(name="cut", label="cut", meaning="share of attempts that a limit of tokens cut off", stage="rollout", key="", kind="share"),
    StepNumber(name="failed", label="failed", meaning="share of tool calls that failed", stage="rollout", key="", kind="share"),
    StepNumber(name="entropy", label="entropy", meaning="nats a token, of the policy that is trained", stage="train", key="policy/policy_entropy", kind="size"),
    StepNumber(name="kl", label="kl", meaning="nats a token, from the policy that sampled to the one trained", stage="train", key="policy/ppo_kl", kind="noise"),
    StepNumber(name="clipped", label="clipped", meaning="share of tokens that the algorithm clips or holds, or its mean gate", stage="train", key="", kind="share"),
    StepNumber(name="gap", label="gap", meaning="nats a token, between the engine's and the trainer's log-probs, mean", stage="train", key="policy/rollout_train_logprobs_abs_diff_mean", kind="noise"),
    StepNumber(name="grad", label="grad", meaning="norm of the gradient", stage="train", key="train/grad_norm", kind="noise"),
    StepNumber(name="loss", label="loss", meaning="the loss", stage="train", key="train/loss"),
    StepNumber(name="seconds", label="seconds", meaning="seconds of the step", stage="loop", key="timing/total", kind="noise"),
)  # fmt: skip
BY_NAME = {number.name: number for number in NUMBERS}
PARTS = "reward/part/"
CLIPS = ("clip_ratio", "gate", "held_ratio")
"""What algorithms report of the tokens that they clip, gate or hold near the old policy."""
TIMES, NOISE_TIMES = 3.0, 10.0
"""A size, or noise, stands out where it is so many times its neighbours'."""
DROP = 0.25
"""A share stands out where it lies so far from its neighbours'."""
FLOOR, NOISE_FLOOR = 1e-5, 1e-2
"""Sizes, and noise, below are taken for so much: ratios of next to nothing say nothing."""
AROUND = 3
"""Neighbours on either side."""


def step_numbers(run: Run) -> tuple[list[int], Steps]:
    """Return a run's steps and their numbers, those of the parts of its reward by `part.NAME` among them."""
    lines = read_metrics(run.metrics)
    by_stage = {stage: latest(lines, stage) for stage in (*STAGES, *stages_in(lines), "loop")}
    steps = sorted({*run.steps(), *(step for found in by_stage.values() for step in found)})
    numbers: Steps = {
        number.name: [number_in(by_stage[number.stage].get(step, {}), number.key) for step in steps]
        for number in NUMBERS
        if number.key
    }
    rollouts = [by_stage["rollout"].get(step, {}) for step in steps]
    numbers["cut"] = [_cut(line) for line in rollouts]
    numbers["failed"] = [_ratio(line, "rollout/failed_calls", "rollout/tool_calls") for line in rollouts]
    numbers["clipped"] = [_clipped(by_stage["train"].get(step, {})) for step in steps]
    of_stages = [lines for stage, lines in by_stage.items() if stage != "loop"]
    numbers["seconds"] = [
        seconds if seconds is not None else seconds_of_stages(of_stages, step)
        for seconds, step in zip(numbers["seconds"], steps, strict=True)
    ]
    scores = [by_stage["score"].get(step, {}) for step in steps]
    for key in sorted({key for line in scores for key in line if key.startswith(PARTS)}):
        numbers[f"part.{key.removeprefix(PARTS)}"] = [number_in(line, key) for line in scores]
    return steps, {name: numbers[name] for name in (*BY_NAME, *numbers) if name in numbers}


def _cut(line: Mapping[str, Any]) -> float | None:
    rows = number_in(line, "rollout/rows")
    return sum(number_in(line, f"rollout/stop_reason/{reason}") or 0 for reason in CUT) / rows if rows else None


def _ratio(line: Mapping[str, Any], part: str, whole: str) -> float | None:
    part_of, of = number_in(line, part), number_in(line, whole)
    return None if part_of is None or not of else part_of / of


def _clipped(line: Mapping[str, Any]) -> float | None:
    """Return the share of tokens that an algorithm clips, gates or holds, whichever it does."""
    found = (number_in(line, f"policy/{name}") for name in CLIPS)
    return next((share for share in found if share is not None), None)


def outliers(name: str, values: Sequence[float | None]) -> list[bool]:
    """Return which values of a number lie far from those of the steps around them.

    A size stands out where it is more than 3 times all but one of its six neighbours, or less than a third; noise
    where it is more than 10 times; a share where it lies more than 0.25 beyond them, with steps on both sides. All but
    one: two steps in a row that stand out do not hide each other.
    """
    kind = BY_NAME[name].kind if name in BY_NAME else "plain"
    return [_stands_out(values, index, kind) for index in range(len(values))]


def _stands_out(values: Sequence[float | None], index: int, kind: str) -> bool:
    value = values[index]
    before = [v for v in values[max(0, index - AROUND) : index] if v is not None]
    after = [v for v in values[index + 1 : index + 1 + AROUND] if v is not None]
    around = sorted([*before, *after])
    if value is None or len(around) < 3 or kind == "plain":
        return False
    low, high = around[1], around[-2]
    if kind == "share":
        return bool(before and after) and (value > high + DROP or value < low - DROP)
    if kind == "noise":
        return value > NOISE_TIMES * max(high, NOISE_FLOOR)
    return value > TIMES * max(high, FLOOR) or max(value, FLOOR) * TIMES < low
