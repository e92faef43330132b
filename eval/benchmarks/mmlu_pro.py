"""MMLU-Pro: 14 categories, up to ten options (arXiv 2406.01574).

Its authors ask with five worked examples of the category from the validation split;
`shots_data` names them. Without, the question is asked alone. A prompt of the user's takes the
place of the words around examples and question, which stand where it says `{question}`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, ClassVar

from msgspec import Meta

from nanoskyrl.envs.base import Task
from nanoskyrl.eval.base import BenchConfig, user
from nanoskyrl.eval.benchmarks.choices import LETTERS, official_chain
from nanoskyrl.eval.benchmarks.mmlu import MultipleChoice, options_in
from nanoskyrl.eval.rows import Hub, Row, bench_rows, place_of
from nanoskyrl.stages.core.checked import FILE
from nanoskyrl.stages.core.errors import InputError

NOT_AN_OPTION = "N/A"
SHOTS_HUB = Hub(name="TIGER-Lab/MMLU-Pro", split="validation")
SHOTS_NEED = ("question", "options", "cot_content", "category")


@dataclass(frozen=True, kw_only=True)
class MmluProConfig(BenchConfig):
    """How it is asked, and how the letter is found."""

    shots: Annotated[int, Meta(ge=0, le=5)] = 0
    """Worked examples of the same category before the question; the authors give 5, all that there are."""
    shots_data: str | None = field(default=None, metadata=FILE)
    """A file with the rows of the validation split; None: the hub's."""
    official_chain: bool = False
    """Find the letter as the authors' scorer does, stray letters and a random guess included."""


class MmluPro(MultipleChoice):
    """The test split."""

    Config = MmluProConfig
    name = "mmlu_pro"
    hub = Hub(name="TIGER-Lab/MMLU-Pro")
    columns = ("question_id", "question", "options", "answer_index", "category")
    groups: ClassVar = {"accuracy_by_category": "category"}

    @cached_property
    def shots(self) -> dict[str, list[str]]:
        """Worked examples by category."""
        if not self.config.shots:
            return {}
        found: dict[str, list[str]] = {}
        for row in bench_rows(self.config.shots_data, SHOTS_HUB, self.name, SHOTS_NEED, self.check_row):
            worked = str(row["cot_content"]).removeprefix("A: ")
            found.setdefault(row["category"], []).append(f"{_asked(row['question'], _options(row))} {worked}")
        return {category: worked[: self.config.shots] for category, worked in found.items()}

    def check_row(self, row: Row) -> None:
        """Refuse a row without a list of options."""
        options_in(row, "options")

    def _worked(self, category: str) -> list[str]:
        """Return the worked examples of a category.

        Raises:
            InputError: there are fewer than the settings ask for.
        """
        worked, wanted = self.shots.get(category, []), self.config.shots
        if len(worked) < wanted:
            raise InputError(
                f"{place_of(self.config.shots_data, SHOTS_HUB)} has {len(worked)} worked examples of the category "
                f"`{category}`, and `mmlu_pro.shots` is {wanted}",
                hint="Add some, or ask for fewer",
            )
        return worked

    def pose(self, row: Row, index: int) -> Task:
        """Return a row's question; options that are "N/A" are none."""
        category, options = row["category"], _options(row)
        task = self.question(
            str(row["question_id"]), row["question"], options, int(row["answer_index"]), category=category
        )
        if not self.config.shots:
            return task
        told = (
            f"These are multiple choice questions about {category}. Think step by step, and end with "
            '"The answer is (X)", where X is the letter of the right option.'
        )
        shown = "\n\n".join([*self._worked(category), _asked(row["question"], options)])
        text = self.asked(shown, f"{told}\n\n{shown} Let's think step by step.")
        return replace(task, messages=user(text))

    def letter(self, text: str, count: int) -> str | None:
        """Return the letter, by our rule or the authors'."""
        return official_chain(text, count) if self.config.official_chain else super().letter(text, count)


def _options(row: Row) -> list[str]:
    return [option for option in options_in(row, "options") if option != NOT_AN_OPTION]


def _asked(question: str, options: Sequence[str]) -> str:
    lines = "\n".join(f"{LETTERS[i]}. {option}" for i, option in enumerate(options))
    return f"Question:\n{question}\nOptions:\n{lines}\nAnswer:"
