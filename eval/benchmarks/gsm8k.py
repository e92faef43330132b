"""GSM8K: word problems for children of school age with whole answers (arXiv 2110.14168).

The answer is the number behind the last `####`, which the prompt asks for, or in a box or
tags; a reply without any has not answered.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanoskyrl.envs.base import Score, Task
from nanoskyrl.envs.graders.kinds import grade
from nanoskyrl.envs.graders.reading import stated
from nanoskyrl.eval.base import BenchConfig, Benchmark, graded, user
from nanoskyrl.eval.rows import Hub, Row
from nanoskyrl.stages.core.trajectory import Trajectory

MARK = "####"
# Anchored on digits: a class of digits, commas and points would match a comma alone.
_NUMBER = re.compile(r"[-\u2212]?\$?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, kw_only=True)
class Gsm8kConfig(BenchConfig):
    """How the number is found."""

    last_number: bool = False
    """Where no answer is stated, take the last number, as lm-eval's flexible filter does."""


class Gsm8k(Benchmark):
    """The test split, asked without examples."""

    Config = Gsm8kConfig
    name = "gsm8k"
    hub = Hub(name="openai/gsm8k", config="main")
    columns = ("question", "answer")
    max_generate_length = 1024

    def pose(self, row: Row, index: int) -> Task:
        """Return a row's problem."""
        if MARK not in row["answer"]:
            raise ValueError(f"the answer has no {MARK}")
        question = str(row["question"])
        told = f"Work it out step by step, and end with a line '{MARK} N', where N is the answer as a number."
        text = f"{question}\n\n{told}"
        return Task(
            task_id=str(row.get("id") or f"gsm8k-test-{index}"), split="test", prompt=question,
            messages=user(self.asked(question, text)), ground_truth=row["answer"].rsplit(MARK, 1)[1].strip(),
            metadata={"solution": row["answer"]},
        )  # fmt: skip

    def gold(self, task: Task) -> str:
        """Write the row's own solution."""
        return task.metadata["solution"]

    def verdict(self, text: str, metadata: Mapping[str, Any], trajectory: Trajectory) -> Score:
        """Compare the number that is stated."""
        if self.config.last_number and stated(text) is None and (numbers := _NUMBER.findall(text)):
            text = numbers[-1]
        verdict = grade("number", metadata["ground_truth"], text)
        return graded(bool(verdict.correct), answered=verdict.why != "no number")
