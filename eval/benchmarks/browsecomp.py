"""BrowseComp: facts that are hard to find and easy to check (openai.com/index/browsecomp).

Questions and answers are encrypted in its file, each with the row's own canary, so that
they are not in the open web. They are decrypted in memory only: of a row, its id,
grade and counts are written down, and no text and no token.
"""

import base64
import hashlib
from itertools import cycle

from nanoskyrl.envs.base import Task
from nanoskyrl.eval.base import user
from nanoskyrl.eval.benchmarks.hle import FORMAT, Judged
from nanoskyrl.eval.judge import JudgedConfig
from nanoskyrl.eval.rows import Row


class BrowseComp(Judged):
    """All rows of its CSV file, which is on no hub."""

    Config = JudgedConfig
    name = "browsecomp"
    columns = ("problem", "answer", "canary")
    answer_line = "Exact Answer"
    secret = True
    stays_local = "BrowseComp's authors ask that its examples not be shown"

    def pose(self, row: Row, index: int) -> Task:
        """Return a row's question, decrypted."""
        question = decrypt(row["problem"], row["canary"])
        told = FORMAT.format(answer=self.answer_line)
        return Task(
            task_id=f"browsecomp-{index:04d}", split="test", prompt=question,
            messages=user(self.asked(question, f"{question}\n\n{told}")),
            ground_truth=decrypt(row["answer"], row["canary"]),
            metadata={"question": question},
        )  # fmt: skip


def decrypt(text: str, password: str) -> str:
    """Return the text behind base64 and a key stream of the password's SHA-256, repeated.

    Raises:
        ValueError: it is no base64, or another password's.
    """
    key = hashlib.sha256(password.encode()).digest()
    return bytes(a ^ b for a, b in zip(base64.b64decode(text, validate=True), cycle(key), strict=False)).decode()
