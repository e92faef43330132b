"""MMLU: 57 subjects, four options (arXiv 2009.03300), asked without examples, reasoning first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoskyrl.envs.base import Score, Task
from nanoskyrl.eval.base import BenchConfig, Benchmark, Scored, graded, user
from nanoskyrl.eval.choices import LETTERS, answer_letter, question_text, shown
from nanoskyrl.eval.rows import Hub, Row
from nanoskyrl.stages.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True)
class MmluConfig(BenchConfig):
    """Where the rows are."""


def by_group(rows: Sequence[Scored], key: str) -> dict[str, float]:
    """Return the share of right samples for each value of a metadata key, in the order of their names."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        if row.success is not None:
            groups.setdefault(str(row.metadata.get(key)), []).append(float(row.success))
    return {name: sum(values) / len(values) for name, values in sorted(groups.items())}


class MultipleChoice(Benchmark):
    """Options, and one letter that is right."""

    def question(self, task_id: str, question: str, options: Sequence[str], gold: int, **metadata: Any) -> Task:
        """Return the task of a question.

        Raises:
            ValueError: the gold index is not one of the options.
        """
        if not 0 <= gold < len(options) <= len(LETTERS):
            raise ValueError(f"the right option is {gold} of {len(options)}")
        text = self.asked(f"{question}\n\n{shown(options)}", question_text(question, options))
        return Task(
            task_id=task_id, split="test", prompt=question, messages=user(text), ground_truth=LETTERS[gold],
            metadata={"options": len(options), **metadata},
        )  # fmt: skip

    def letter(self, text: str, count: int) -> str | None:
        """Return the letter that a text answers with."""
        return answer_letter(text, count)

    def verdict(self, text: str, metadata: Mapping[str, Any], trajectory: Trajectory) -> Score:
        """Compare the letter."""
        found = self.letter(text, metadata["options"])
        return graded(found == metadata["ground_truth"], answered=found is not None)

    def gold(self, task: Task) -> str:
        """Reason in a sentence that holds stray letters, and answer."""
        return f"I compare the options; A first look settles it.\nAnswer: {task.ground_truth}"


class Mmlu(MultipleChoice):
    """The test split of all subjects."""

    Config = MmluConfig
    name = "mmlu"
    hub = Hub(name="cais/mmlu", config="all")
    columns = ("question", "choices", "answer")

    def pose(self, row: Row, index: int) -> Task:
        """Return a row's question; it has no id of its own, so its place is one."""
        gold = row["answer"]
        gold = LETTERS.index(gold) if isinstance(gold, str) and gold in LETTERS else int(gold)
        return self.question(
            f"mmlu-{index:05d}", row["question"], list(row["choices"]), gold, subject=row.get("subject", "")
        )

    def metrics(self, rows: Sequence[Scored]) -> dict[str, Any]:
        """Return accuracy by subject, and the mean over subjects."""
        subjects = by_group(rows, "subject")
        return {
            "accuracy_mean_of_subjects": sum(subjects.values()) / len(subjects) if subjects else None,
            "accuracy_by_subject": subjects,
        }
