"""Multiple choice: how options are shown, and which letter a text answers with.

The letter is read as every grader reads it (`envs/graders/reading.py`), never from a stray "I" or "A" in a
sentence. MMLU-Pro's own chain, whose last step does just that, is an option for numbers to be set beside its board.
"""

import random
import re
from collections.abc import Sequence

from nanoskyrl.envs.graders.reading import chosen

LETTERS = "ABCDEFGHIJKLMNOP"
GUESS_SEED = 12345
"""With which MMLU-Pro's scorer draws an option where it finds no letter, again for every question."""


def shown(options: Sequence[str]) -> str:
    """Return options one a line, each behind its letter."""
    return "\n".join(f"{LETTERS[i]}) {option}" for i, option in enumerate(options))


def question_text(question: str, options: Sequence[str]) -> str:
    """Return a question, its options, and how to answer: reason, and give the letter in the last line."""
    letters = LETTERS[: len(options)]
    told = (
        f"This is a multiple choice question. Reason step by step, and end with a line of the form "
        f"'Answer: $LETTER' (no quotes), where LETTER is one of {letters}."
    )
    return f"{told}\n\n{question}\n\n{shown(options)}"


def answer_letter(text: str, count: int) -> str | None:
    """Return the letter that a text answers with, or None.

    Args:
        text: What the model wrote.
        count: Options there are; a letter beyond them is no answer.
    """
    found = chosen(text)
    return found.text if found is not None and found.text in LETTERS[:count] else None


def official_chain(text: str, count: int) -> str:
    """Return what MMLU-Pro's scorer reads: three patterns one after the other, then a guess.

    The last pattern takes "I" and "A" for letters; the guess is right one time in `count`.
    """
    for pattern, flags in (
        (r"answer is \(?([A-J])\)?", 0),
        (r".*[aA]nswer:\s*([A-J])", 0),
        (r"\b([A-J])\b(?!.*\b[A-J]\b)", re.DOTALL),
    ):
        if found := re.search(pattern, text, flags):
            return found[1]
    return LETTERS[random.Random(GUESS_SEED).randint(0, count - 1)]
