"""HumanEval: 164 functions to complete (arXiv 2107.03374), each with tests that run in the sandbox."""

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from nanoskyrl.envs.base import Score, Task
from nanoskyrl.envs.graders.program_tests import parsed_tests, run_tests
from nanoskyrl.envs.sandbox.base import Limits, full_python
from nanoskyrl.eval.base import Benchmark, graded, user, wrong
from nanoskyrl.eval.benchmarks.code import fenced
from nanoskyrl.eval.rows import Hub, Row, needed_text
from nanoskyrl.stages.core.safe_text import shortened
from nanoskyrl.stages.core.trajectory import Trajectory

LIMITS = Limits(seconds=10.0, memory_mb=1024)
CHECK = "check"
"""The function of a row's tests, which takes the solution's."""


class HumanEval(Benchmark):
    """The test split; a sample passes where all of its task's tests do."""

    name = "humaneval"
    hub = Hub(name="openai/openai_humaneval")
    columns = ("task_id", "prompt", "canonical_solution", "test", "entry_point")
    metric = "passed"
    workers = 2
    max_generate_length = 1024

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks; without a sandbox none could be graded, so that comes first."""
        full_python()
        return super().tasks(split)

    def check_row(self, row: Row) -> None:
        """Refuse a row whose function or whose `check` is not there."""
        needed_text(row, "prompt", "canonical_solution", "test", "entry_point")
        name = row["entry_point"]
        if not name.isidentifier() or f"def {name}" not in row["prompt"]:
            raise ValueError(f"`entry_point` is {shortened(repr(name))}, a function that `prompt` does not begin")
        try:
            tree = parsed_tests(row["test"])
        except ValueError as error:
            raise ValueError(f"`test`: {error}") from error
        if not any(isinstance(node, ast.FunctionDef) and node.name == CHECK for node in tree.body):
            raise ValueError(f"`test` defines no function `{CHECK}`")

    def pose(self, row: Row, index: int) -> Task:
        """Return a row's function, asked for as a whole in a fenced block."""
        text = (
            "Complete this Python function. Reply with the whole function, imports included, in one fenced block."
            f"\n\n```python\n{row['prompt'].rstrip()}\n```"
        )
        return Task(
            task_id=str(row["task_id"]), split="test", prompt=row["prompt"],
            messages=user(self.asked(row["prompt"], text)), ground_truth=row["canonical_solution"],
            metadata={"prompt": row["prompt"], "test": row["test"], "entry_point": row["entry_point"]},
        )  # fmt: skip

    def gold(self, task: Task) -> str:
        """Write the canonical solution in a fenced block."""
        return f"Here it is:\n\n```python\n{task.metadata['prompt']}{task.ground_truth}\n```"

    def verdict(self, text: str, metadata: Mapping[str, Any], trajectory: Trajectory) -> Score:
        """Run the row's tests on the solution."""
        solution = completed(text, metadata["prompt"], metadata["entry_point"])
        if not solution:
            return wrong()
        passed, why = checked(solution, metadata)
        return graded(passed, timeout=float(why == "timeout"))


def checked(solution: str, metadata: Mapping[str, Any]) -> tuple[bool, str]:
    """Return whether a solution passes a row's `check`, and how it ended.

    The tests' helpers, such as `poly`, are those of the prompt and never the solution's.
    """
    name = metadata["entry_point"]
    before = metadata["prompt"][: metadata["prompt"].rfind(f"def {name}")]
    return run_tests(solution, f"{metadata['test']}\n\n{CHECK}({name})\n", LIMITS, before=before, names=[name])


def completed(text: str, prompt: str, entry_point: str) -> str:
    """Return the program that a reply makes of a prompt; nothing where it holds none.

    A block that defines the function stands behind the prompt's own imports and helpers; a
    reply that gives the body alone is put behind the prompt.
    """
    head = f"def {entry_point}"
    whole = [block for block in fenced(text) if head in block]
    if whole:
        return f"{prompt[: prompt.rfind(head)]}\n{whole[-1]}"
    if head in text and "```" not in text:
        return f"{prompt[: prompt.rfind(head)]}\n{text}"
    blocks = fenced(text)
    body = blocks[-1] if blocks else text
    return f"{prompt}{body}" if body.strip() else ""
