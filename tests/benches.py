"""Benchmarks on sample rows, and what tests make of them."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
from running import ROOT, data_file

from nanoskyrl.stages.core.shards import read_part
from nanoskyrl.stages.engines.base import Engine
from nanoskyrl.stages.engines.rollout_config import RolloutConfig
from nanoskyrl.stages.engines.scripted import ScriptedConfig, ScriptedEngine
from nanoskyrl.stages.eval import EvalConfig, evaluate
from nanoskyrl.stages.models.policy import STARTER_DIRECTORY

OURS = ROOT / "tests" / "eval" / "data"
SAMPLES = {
    "hle": "format_fixtures/hle.jsonl",
    "browsecomp": "format_fixtures/browsecomp.csv",
    "deepsearchqa": "format_fixtures/deepsearchqa.csv",
    "livecodebench": "format_fixtures/livecodebench.jsonl",
    "humaneval": "humaneval/humaneval_shared.jsonl",
    "mmlu": "format_fixtures/mmlu.jsonl",
    "mmlu_pro": "mmlu_pro/mmlu_pro_shared.jsonl",
    "gpqa": "format_fixtures/gpqa.csv",
    "math": "format_fixtures/math500.jsonl",
    "math500": "format_fixtures/math500.jsonl",
    "gsm8k": "gsm8k/test_shared.jsonl",
    "swe_bench_verified": "swebench_verified/rows_shared.jsonl",
}
"""Sample rows of each benchmark in the folder of shared data."""
OWN = {"swe_bench_multilingual": "swe_bench_multilingual.jsonl"}
"""Rows of our own, for layouts that have no shared ones."""
JUDGED = ("hle", "browsecomp", "deepsearchqa")
UNGRADED = ("swe_bench_verified", "swe_bench_multilingual")
"""Only the harness, in Docker, says what is right."""
LCB_SOLUTIONS = {
    "fix_a": "n = int(input())\nprint(sum(map(int, input().split())))",
    "fix_b": (
        "class Solution:\n    def countPairs(self, nums: List[int], target: int) -> int:\n"
        "        return sum(nums[i] + nums[j] == target for i in range(len(nums)) for j in range(i + 1, len(nums)))"
    ),
    "fix_c": "n = int(input())\nprint(round(sum(map(float, input().split())) / n, 10))",
}
"""Programs for the sample rows of LiveCodeBench, which come without."""


def rows_file(name: str) -> Path:
    """Return the sample rows of a benchmark, or skip the test."""
    return OURS / OWN[name] if name in OWN else data_file(SAMPLES[name])


def run_bench(
    name: str,
    output: Path,
    *,
    engine: Engine | None = None,
    engine_name: str = "scripted",
    policy: Path | None = None,
    rollout: dict[str, Any] | None = None,
    tables: dict[str, dict[str, Any]] | None = None,
    **config: Any,
) -> dict[str, Any]:
    """Evaluate a benchmark on its sample rows, and return its summary."""
    settings = {name: {"data": str(rows_file(name))}}
    for table, values in (tables or {}).items():
        settings[table] = {**settings.get(table, {}), **values}
    evaluate(
        policy, output, EvalConfig(**{"limit": 0, **config}), RolloutConfig(engine=engine_name, **(rollout or {})),
        name=name, settings=settings, engine=engine,
    )  # fmt: skip
    return json.loads((output / "_summary.json").read_text())


def table_of(output: Path) -> pa.Table:
    """Return all rows of an evaluation."""
    return pa.concat_tables([read_part(path) for path in sorted(output.glob("part-*.parquet"))])


class Says(ScriptedEngine):
    """Answers every task by a function of the task."""

    def __init__(self, answer: Any) -> None:
        super().__init__(ScriptedConfig())
        self.answer = answer

    def reply(self, environment: Any, task: Any, turn: int) -> str:
        return self.answer(task)


def right(name: str) -> Engine:
    """Return an engine that gives the gold answers in the wording of a model."""
    if name == "livecodebench":
        return Says(lambda task: f"I read the input.\n\n```python\n{LCB_SOLUTIONS[task.task_id]}\n```\nThat is all.")
    return ScriptedEngine(ScriptedConfig())


WRONG = {
    "hle": "Explanation: a guess.\nAnswer: the eleventh of never\nConfidence: 40%",
    "browsecomp": "Explanation: a guess.\nExact Answer: nobody\nConfidence: 40%",
    "deepsearchqa": "Answer: nothing of the kind",
    "livecodebench": (
        "```python\nprint('no')\nclass Solution:\n    def countPairs(self, nums, target):\n        return -1\n```"
    ),
    "humaneval": "```python\ndef nothing():\n    return None\n```",
    "math": "So it is \\boxed{123456789}.",
    "gsm8k": "So it is\n#### 123456789",
}


def wrong(name: str) -> Engine:
    """Return an engine whose every answer is wrong, and well formed."""
    if name in ("mmlu", "mmlu_pro", "gpqa"):
        return Says(lambda task: f"Answer: {'A' if task.ground_truth != 'A' else 'B'}")
    if name == "humaneval":
        return Says(lambda task: f"```python\ndef {task.metadata['entry_point']}(*_, **__):\n    return object()\n```")
    return Says(lambda task: WRONG.get(name, WRONG["math"]))


STARTER = STARTER_DIRECTORY
