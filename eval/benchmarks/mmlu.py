"""MMLU: 57 subjects, four options (arXiv 2009.03300), asked without examples, reasoning first."""

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from nanoskyrl.envs.base import Score, Task
from nanoskyrl.eval.base import Benchmark, Scored, by_group, graded, user
from nanoskyrl.eval.benchmarks.choices import LETTERS, answer_letter, question_text, shown
from nanoskyrl.eval.rows import Hub, Row
from nanoskyrl.stages.core.safe_text import shortened
from nanoskyrl.stages.core.trajectory import Trajectory


def options_in(row: Row, column: str) -> list[Any]:
    """Return the options of a row; the text of a CSV cell is read as a list of JSON or Python.

    Raises:
        ValueError: it is no list, or an empty one, or came as text and holds fewer than two.
    """
    value = row[column]
    found = _list_in(value) if isinstance(value, str) else value
    # numpy prints ['a' 'b'], which Python reads as a list of one text, 'ab'. In lists, five questions of MMLU-Pro have
    # one option.
    least = 2 if isinstance(value, str) else 1
    if not isinstance(found, list | tuple) or len(found) < least:
        raise ValueError(
            f"`{column}` must be a list of options, in a CSV cell written with commas as JSON or Python write it, "
            f"not {shortened(repr(value))}"
        )
    return list(found)


def _list_in(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    return None


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

    name = "mmlu"
    hub = Hub(name="cais/mmlu", config="all")
    columns = ("question", "choices", "answer")

    def check_row(self, row: Row) -> None:
        """Refuse a row without a list of options."""
        options_in(row, "choices")

    def pose(self, row: Row, index: int) -> Task:
        """Return a row's question; it has no id of its own, so its place is one."""
        gold = row["answer"]
        gold = LETTERS.index(gold) if isinstance(gold, str) and gold in LETTERS else int(gold)
        return self.question(
            f"mmlu-{index:05d}", row["question"], options_in(row, "choices"), gold, subject=row.get("subject", "")
        )

    def metrics(self, rows: Sequence[Scored]) -> dict[str, Any]:
        """Return accuracy by subject, and the mean over subjects."""
        subjects = by_group(rows, "subject")
        return {
            "accuracy_mean_of_subjects": sum(subjects.values()) / len(subjects) if subjects else None,
            "accuracy_by_subject": subjects,
        }
