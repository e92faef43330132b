"""MATH and MATH-500: competition problems whose answer is in a box (arXiv 2103.03874).

The answer is what the reply states, in a box as a rule. Equality is math-verify's behind our layer, not
the authors' comparison of strings: a fraction and its decimal are the same number.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from nanoskyrl.envs.base import Score, Task
from nanoskyrl.envs.graders.kinds import grade, judged
from nanoskyrl.envs.graders.reading import last_box, stated
from nanoskyrl.eval.base import Benchmark, graded, user
from nanoskyrl.eval.rows import Hub, Row
from nanoskyrl.stages.core.trajectory import Trajectory


class Math(Benchmark):
    """The test split; the gold is the last box of a row's solution."""

    name = "math"
    # Seven configs, one a subject, on one page; the copy with all in one is read.
    hub = Hub(name="DigitalLearningGmbH/MATH-lighteval")
    columns = ("problem", "solution")
    groups: ClassVar = {"accuracy_by_level": "level", "accuracy_by_subject": "subject"}
    workers = 2

    def pose(self, row: Row, index: int) -> Task:
        """Return a row's problem."""
        gold = row.get("answer") or last_box(row["solution"])
        if not gold:
            raise ValueError("the solution has no box")
        text = f"{row['problem']}\n\nReason step by step, and put the final answer into \\boxed{{}}."
        return Task(
            task_id=str(row.get("unique_id") or f"math-{index:05d}"), split="test", prompt=row["problem"],
            messages=user(self.asked(row["problem"], text)), ground_truth=gold,
            metadata={
                "solution": row["solution"], "level": str(row.get("level", "")).removeprefix("Level "),
                "subject": row.get("subject") or row.get("type") or "",
            },
        )  # fmt: skip

    def gold(self, task: Task) -> str:
        """Write the row's own solution."""
        return task.metadata["solution"]

    def verdict(self, text: str, metadata: Mapping[str, Any], trajectory: Trajectory) -> Score:
        """Compare the stated answer with the gold."""
        if stated(text) is None:
            return graded(False, answered=False)
        return graded(judged(grade("stated_answer", metadata["ground_truth"], text)))


class Math500(Math):
    """500 problems of the test split, with the answers apart."""

    name = "math500"
    hub = Hub(name="HuggingFaceH4/MATH-500")
    columns = ("problem", "solution", "answer")
