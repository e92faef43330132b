"""DeepSearchQA: questions whose answer is one thing or a set, found by searching (Google, 2025).

A judge says which expected items an answer holds, and which it holds beyond them;
precision, recall and F1 follow by row. Success is fully correct: all items, and no more.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from nanoskyrl.envs.base import Score, Task
from nanoskyrl.eval.base import Scored, graded, unjudged, user, wrong
from nanoskyrl.eval.benchmarks.hle import Judged, answer_line
from nanoskyrl.eval.benchmarks.words import same_words
from nanoskyrl.eval.judge import JudgedConfig, filled, verdict_of
from nanoskyrl.eval.rows import Hub, Row
from nanoskyrl.stages.core.trajectory import Trajectory

TYPES = ("Single Answer", "Set Answer")
PROMPT = """Check which parts of a correct answer a response gives, and what it gives beyond them. Judge only the final
answer of the response, not its reasoning; do not search or solve anything yourself.

Question: {question}

Kind of answer: {answer_type}

Response: {response}

Correct answer: {correct_answer}

Reply with JSON alone, in this shape, with one entry in "Correctness Details" for every part of the correct answer (a
single answer is one part), true where the response gives it, in whatever words:
{"Answer Correctness": {"Explanation": "...", "Correctness Details": {"part": true}, "Excessive Answers": ["..."]}}"""
SCHEMA = {
    "type": "object",
    "properties": {
        "Answer Correctness": {
            "type": "object",
            "properties": {
                "Explanation": {"type": "string"},
                "Correctness Details": {"type": "object", "additionalProperties": {"type": "boolean"}},
                "Excessive Answers": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["Explanation", "Correctness Details", "Excessive Answers"],
        }
    },
    "required": ["Answer Correctness"],
}
"""The fields of the authors' rater."""
PARTS = ("precision", "recall", "f1", "fully_correct", "correct_with_excess", "fully_wrong")


class DeepSearchQa(Judged):
    """The `eval` split."""

    Config = JudgedConfig
    name = "deepsearchqa"
    hub = Hub(name="google/deepsearchqa", config="deepsearchqa", split="eval")
    columns = ("problem", "answer", "answer_type")
    judged = "fully_correct"

    def pose(self, row: Row, index: int) -> Task:
        """Return a row's question."""
        kind, question = row["answer_type"], str(row["problem"])
        if kind not in TYPES:
            raise ValueError(f"answer_type is {kind!r}")
        form = "one answer" if kind == TYPES[0] else "all answers, separated by commas"
        text = f"{question}\n\nEnd with a line of the form 'Answer: ...' that holds {form} and nothing else."
        return Task(
            task_id=str(row.get("example_id") or f"deepsearchqa-{index:04d}"), split="test", prompt=question,
            messages=user(self.asked(question, text)), ground_truth=str(row["answer"]),
            metadata={"question": question, "answer_type": kind, "category": row.get("problem_category", "")},
        )  # fmt: skip

    def gold(self, task: Task) -> str:
        """Answer in the asked line."""
        return f"I searched, and this is what I found.\nAnswer: {task.ground_truth}"

    def verdict(self, text: str, metadata: Mapping[str, Any], trajectory: Trajectory) -> Score:
        """Ask the judge, or compare the items of the answer line."""
        if not text.strip():
            return wrong(**dict.fromkeys(PARTS, 0.0) | {"fully_wrong": 1.0})
        gold, kind, answer = str(metadata["ground_truth"]), metadata["answer_type"], answer_line(text)
        if self.judge is None:
            return _by_words(answer, gold, kind)
        prompt = filled(
            self.config, PROMPT, question=str(metadata["question"]), response=text, correct_answer=gold,
            answer_type=kind,
        )  # fmt: skip
        whole = verdict_of(self.judge, prompt, SCHEMA, _check)
        if whole is None:
            return unjudged(answered=answer is not None)
        found = whole["Answer Correctness"]
        details = list(found["Correctness Details"].values())
        return rated(sum(details), len(details) - sum(details), len(found.get("Excessive Answers") or ()))

    def metrics(self, rows: Sequence[Scored]) -> dict[str, Any]:
        """Return the means over judged rows, and what could not be judged."""
        judged = [row for row in rows if row.success is not None]
        means = {
            name: sum(row.parts.get(name) or 0.0 for row in judged) / len(judged) if judged else None for name in PARTS
        }
        return {**means, "unjudged": len(rows) - len(judged)}


def rated(hit: int, missed: int, excess: int) -> Score:
    """Return the verdict on an answer: items found, items missed, and items beyond."""
    precision = hit / (hit + excess) if hit + excess else 0.0
    recall = hit / (hit + missed) if hit + missed else 0.0
    both = precision + recall
    return graded(
        missed == 0 and excess == 0 and hit > 0,
        precision=precision, recall=recall, f1=2 * precision * recall / both if both else 0.0,
        fully_correct=float(missed == 0 and excess == 0 and hit > 0),
        correct_with_excess=float(missed == 0 and excess > 0 and hit > 0), fully_wrong=float(hit == 0),
    )  # fmt: skip


def _by_words(answer: str | None, gold: str, kind: str) -> Score:
    if answer is None:
        return wrong(**dict.fromkeys(PARTS, 0.0) | {"fully_wrong": 1.0})
    wanted, given = ([gold], [answer]) if kind == TYPES[0] else (_items(gold), _items(answer))
    hit = sum(any(same_words(item, one) for one in given) for item in wanted)
    excess = sum(not any(same_words(item, one) for item in wanted) for one in given)
    return rated(hit, len(wanted) - hit, excess)


def _items(text: str) -> list[str]:
    return [item for piece in re.split(r"[,;\n]", text) if (item := piece.strip())]


def _check(found: Mapping[str, Any]) -> None:
    inner = found["Answer Correctness"]
    details, excess = inner["Correctness Details"], inner.get("Excessive Answers") or []
    if not isinstance(details, dict) or not details or not all(isinstance(value, bool) for value in details.values()):
        raise ValueError("no details")
    if not isinstance(excess, list):
        raise ValueError("no list")
