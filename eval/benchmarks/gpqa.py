"""GPQA: graduate questions in biology, physics and chemistry (arXiv 2311.12022).

Its terms ask that no example be shown in the open: the shards stay on this machine, and
export and report refuse their text. Options are shuffled by row, and the permutation is
kept; the gold is an index through it, for two options may have one text.
"""

import random
from dataclasses import dataclass
from typing import ClassVar, Literal

from nanoskyrl.envs.base import Task
from nanoskyrl.eval.base import BenchConfig
from nanoskyrl.eval.benchmarks.mmlu import MultipleChoice
from nanoskyrl.eval.rows import Hub, Row
from nanoskyrl.stages.core.digests import derive_seed

OPTIONS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


@dataclass(frozen=True, kw_only=True)
class GpqaConfig(BenchConfig):
    """Which subset is asked."""

    subset: Literal["gpqa_diamond", "gpqa_main", "gpqa_extended"] = "gpqa_diamond"
    """Of 198, 448 and 546 questions; the one of a file is the file's."""


class Gpqa(MultipleChoice):
    """One subset; all of them lie in a split called `train`."""

    Config = GpqaConfig
    name = "gpqa"
    columns = ("Question", *OPTIONS)
    groups: ClassVar = {"accuracy_by_domain": "domain"}
    stays_local = "GPQA's terms ask that its examples not be shown"

    @property
    def hub(self) -> Hub:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Where the subset lies."""
        terms = "its terms must be accepted on the hub, and a token set"
        return Hub(name="Idavidrein/gpqa", config=self.config.subset, split="train", terms=terms)

    def pose(self, row: Row, index: int) -> Task:
        """Return a row's question with its options in an order of their own."""
        task_id = str(row.get("Record ID") or f"gpqa-{index:04d}")
        order = list(range(len(OPTIONS)))
        random.Random(derive_seed("gpqa", 0, task_id)).shuffle(order)
        options = [str(row[OPTIONS[place]]).strip() for place in order]
        return self.question(
            task_id, str(row["Question"]).strip(), options, order.index(0), permutation=order,
            domain=row.get("High-level domain", ""),
        )  # fmt: skip
