"""`text_math`: one question, one answer in tags; right or wrong.

Questions are generated (arithmetic, multi-step, logic, with levels) or come from a data
set. Level 1 of addition, two numbers from 0 to 99, is the starter policy's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated

from msgspec import Meta

from nanoskyrl.envs.base import Observation, Score, Step, Task
from nanoskyrl.envs.datasets import TaskSourceConfig
from nanoskyrl.envs.graders.golds import golds_of
from nanoskyrl.envs.graders.kinds import ANSWERED, answer_in, answer_verdict, unanswered
from nanoskyrl.envs.graders.reading import REASONING, Marks
from nanoskyrl.envs.tools import replies_to
from nanoskyrl.envs.worlds.text_math import reasoning
from nanoskyrl.envs.worlds.text_math.problems import MAX_LEVEL, generate
from nanoskyrl.stages.core.checked import Share
from nanoskyrl.stages.core.trajectory import Trajectory

INSTRUCTION = "Give the final answer in <answer></answer> tags."


@dataclass(frozen=True, slots=True, kw_only=True)
class TextMathConfig(TaskSourceConfig):
    """Which questions are asked, and what a tidy answer is worth."""

    family: str = "addition"
    """arithmetic, multi_step, logic, a generator of theirs (addition, ordering, ...), or `reasoning_gym:TASK`."""
    level: Annotated[int, Meta(ge=1, le=MAX_LEVEL)] = 1
    """Higher is harder."""
    format_weight: Share = 0.1
    """Part of the reward given for an answer in tags; the rest is for the right one."""


@cache  # a loop asks again at every step
def generated_tasks(family: str, level: int, split: str, count: int) -> tuple[Task, ...]:
    """Return up to `count` generated tasks of a split."""
    return tuple(
        Task(
            task_id=f"{family}-{level}-{i:06d}", split=split, prompt=problem.question, ground_truth=problem.answer,
            metadata={"kind": problem.kind},
        )
        for i, problem in enumerate(generate(family, level, split, count))
    )  # fmt: skip


class TextMath:
    """Questions with one short answer."""

    Config = TextMathConfig

    def __init__(self, config: TextMathConfig) -> None:
        """Keep the settings; tasks are made when they are asked for."""
        self.config = config

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of `train` or `test`; a data set serves both, unless `test_data` names another."""
        if (tasks := self.config.read(split)) is not None:
            return tasks
        count = self.config.count(split)
        if self.config.family.startswith(reasoning.PREFIX):
            return reasoning.tasks(self.config.family.removeprefix(reasoning.PREFIX), split, count)
        return generated_tasks(self.config.family, self.config.level, split, count)

    def start(self) -> "TextMathEpisode":
        """Return a fresh episode."""
        return TextMathEpisode(self.config.reasoning_marks)

    def score(self, trajectory: Trajectory) -> Score:
        """Reward the right answer, and an answer in tags; success is the right answer."""
        if which := trajectory.metadata.get("reasoning_gym"):
            answer = answer_in(trajectory.last_action, None, self.config.reasoning_marks)
            mark, right = reasoning.verdict(which, answer)
            answered = answer is not None
        else:
            answered, right = answer_verdict(trajectory, self.config.reasoning_marks)
            mark = float(right)
        tidy = answered and trajectory.status == "completed"
        weight = self.config.format_weight
        return Score(
            reward=(1 - weight) * right + weight * tidy,
            success=right,
            parts={"answer": mark, "format": float(tidy), ANSWERED: float(answered)},
        )

    def expert(self, task: Task) -> list[str]:
        """Answer at once."""
        return [f"<answer>{golds_of(task.ground_truth)[0]}</answer>"]


class TextMathEpisode:
    """Ask, and end with the first reply."""

    _grader: str | None = None
    _marks: Marks = REASONING  # of the class, for subclasses that do not call this constructor

    def __init__(self, reasoning_marks: Marks = REASONING) -> None:
        """Begin without a question."""
        self._marks = reasoning_marks

    def reset(self, task: Task, seed: int) -> Observation:
        """Pose the question."""
        self._grader = task.metadata.get("grader")
        messages = task.messages or ({"role": "user", "content": f"{task.prompt}\n{INSTRUCTION}"},)
        return Observation(messages=messages, metadata={"ground_truth": task.ground_truth, **task.metadata})

    def step(self, action: str) -> Step:
        """End: whatever was written is the answer, or it holds none, and that is recorded."""
        calls = unanswered(action, self._grader, self._marks)
        return Step(messages=replies_to(calls, "user"), done=True, tool_calls=calls)

    def close(self) -> None:
        """Nothing is held."""
