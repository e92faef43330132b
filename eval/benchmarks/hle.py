"""HLE: questions at the edge of what experts know (arXiv 2501.14249), exact and multiple choice.

The model gives explanation, answer and confidence in three lines; a judge with the authors'
fields compares. Without a judge the answer line must equal the gold but for spelling, and
the metric has another name. BrowseComp uses the same judge.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from nanoskyrl.envs.base import Score, Task
from nanoskyrl.envs.graders.judge import Judge
from nanoskyrl.envs.graders.reading import LINE, stated
from nanoskyrl.eval.base import Scored, WithTools, graded, unjudged, wrong
from nanoskyrl.eval.benchmarks.calibration import calibration_error, official_calibration_error
from nanoskyrl.eval.benchmarks.words import same_words
from nanoskyrl.eval.judge import WORKERS, JudgedConfig, filled, judge_of, verdict_of
from nanoskyrl.eval.passk import NORMAL_95
from nanoskyrl.eval.rows import Hub, Row
from nanoskyrl.stages.core.trajectory import Trajectory

FORMAT = "Answer in this format:\nExplanation: {{why}}\n{answer}: {{your answer}}\nConfidence: {{0% to 100%}}"
PROMPT = """Compare a [response] to a [question] with the [correct_answer]; decide whether they give the same answer.

[question]: {question}

[response]: {response}

[correct_answer]: {correct_answer}

Give these fields:
extracted_final_answer: the final answer that the response commits to, or 'None' if it commits to none.
reasoning: whether that answer and the correct one differ in a way that matters; do not solve the question yourself.
correct: 'yes' if they agree, or differ by a small numerical margin; 'no' in every other case, doubt included.
confidence: the confidence from 0 to 100 that the response states; 100 if it states none."""
SCHEMA = {
    "type": "object",
    "properties": {
        "extracted_final_answer": {"type": "string"},
        "reasoning": {"type": "string"},
        "correct": {"type": "string", "enum": ["yes", "no"]},
        "confidence": {"type": "integer"},
        "strict": {"type": "boolean"},
    },
    "required": ["extracted_final_answer", "reasoning", "correct", "confidence", "strict"],
    "additionalProperties": False,
}
"""The authors' fields."""
UNJUDGED = "exact_match_no_judge"

_CONFIDENCE = re.compile(
    r"^[\s*_#>]*confidence[\s*_]*[:：][\s*_]*(\d{1,3}(?:\.\d+)?)\s*%?", re.IGNORECASE | re.MULTILINE
)


@dataclass(frozen=True, kw_only=True)
class HleConfig(JudgedConfig):
    """Which questions, and who judges."""

    images: bool = False
    """Also ask the questions with a picture, of endpoints that see."""
    system_as_user: bool = False
    """Send the format as a user's message, to models that take no system message."""


class Judged(WithTools):
    """A benchmark whose answers a judge compares with the gold."""

    workers = WORKERS
    waits = True
    max_generate_length = 8192
    answer_line = "Answer"
    judged: ClassVar[str] = "accuracy"
    """What `success` is called where a judge says so."""
    judge: Judge | None

    def __init__(self, config: JudgedConfig) -> None:
        """Name the metric for what it will be."""
        super().__init__(config)
        self.judge = judge_of(config)

    @property
    def metric(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What decides."""
        return UNJUDGED if self.judge is None else self.judged

    def gold(self, task: Task) -> str:
        """Answer in the three lines."""
        return f"Explanation: it is known.\n{self.answer_line}: {task.ground_truth}\nConfidence: 90%"

    def verdict(self, text: str, metadata: Mapping[str, Any], trajectory: Trajectory) -> Score:
        """Ask the judge, or compare the answer line."""
        if not text.strip():
            return wrong()
        answer, stated = answer_line(text), confidence(text)
        if self.judge is None:
            right = answer is not None and same_words(answer, str(metadata["ground_truth"]))
            return graded(right, answered=answer is not None, confidence=stated)
        prompt = filled(
            self.config, PROMPT, question=str(metadata["question"]), response=text,
            correct_answer=str(metadata["ground_truth"]),
        )  # fmt: skip
        found = verdict_of(self.judge, prompt, SCHEMA, _check)
        if found is None:
            return unjudged(answered=answer is not None, confidence=stated)
        answered = found["extracted_final_answer"].strip().casefold() not in ("none", "")
        return graded(found["correct"] == "yes", answered=answered, confidence=found["confidence"] / 100)

    def metrics(self, rows: Sequence[Scored]) -> dict[str, Any]:
        """Return what the authors report: all questions count, judged or not, and the calibration."""
        right = [row.success is True for row in rows]
        judged = [row for row in rows if row.success is not None]
        stated = [1.0 if (c := row.parts.get("confidence")) is None else c for row in judged]
        was = [bool(row.success) for row in judged]
        share = sum(right) / len(rows) if judged else None  # with no judge's word at all there is no share of anything
        return {
            "accuracy_of_all": share,
            "accuracy_of_all_half_width": NORMAL_95 * math.sqrt(share * (1 - share) / len(rows))
            if share is not None
            else None,
            "unjudged": len(rows) - len(judged),
            "calibration_error": calibration_error(stated, was),
            "calibration_error_official": official_calibration_error(stated, was),
        }


class Hle(Judged):
    """The test split; its questions without a picture unless asked otherwise."""

    Config = HleConfig
    name = "hle"
    hub = Hub(name="cais/hle", terms="its terms must be accepted on the hub, and a token set")
    columns = ("id", "question", "answer", "answer_type")
    stays_local = "HLE's authors ask that its questions not be shown"

    @property
    def rows(self) -> list[Row]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The rows that are asked."""
        return [row for row in super().rows if self.config.images or not row.get("image")]

    def pose(self, row: Row, index: int) -> Task:
        """Return a row's question; a picture goes beside the text."""
        question, image = str(row["question"]), row.get("image") or ""
        told = FORMAT.format(answer=self.answer_line)
        text = self.asked(question, question)
        content: Any = (
            [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": image}}] if image else text
        )
        messages = (
            ({"role": "user" if self.config.system_as_user else "system", "content": told},) if text == question else ()
        )
        return Task(
            task_id=str(row["id"]), split="test", prompt=question, ground_truth=str(row["answer"]),
            messages=(*messages, {"role": "user", "content": content}),
            metadata={
                "question": question, "answer_type": row["answer_type"], "category": row.get("category", ""),
                "image": bool(image),
            },
        )  # fmt: skip


def answer_line(text: str) -> str | None:
    """Return what the last answer line states, or None."""
    found = stated(text, (LINE,))
    return found.text if found is not None else None


def confidence(text: str) -> float | None:
    """Return the last stated confidence in 0..1, or None."""
    found = [float(value) for value in _CONFIDENCE.findall(text) if float(value) <= 100]
    return found[-1] / 100 if found else None


def _check(found: Mapping[str, Any]) -> None:
    if found["correct"] not in ("yes", "no") or not isinstance(found["extracted_final_answer"], str):
        raise ValueError("no verdict")
    if isinstance(found["confidence"], bool) or not 0 <= found["confidence"] <= 100:
        raise ValueError("no confidence")
