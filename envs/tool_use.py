"""`tool_use`: questions that want a tool, asked over several turns.

The policy writes `<tool_call>{"tool": ..., "args": {...}}</tool_call>`, sees what the
tool says as a `tool` message, and ends with its answer in `<answer>` tags.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

from nanoskyrl.envs.actions import TOOL_CALL, TOOL_CALL_END, tool_calls
from nanoskyrl.envs.base import Message, Observation, Score, Step, Task
from nanoskyrl.envs.datasets import read_tasks
from nanoskyrl.envs.graders import answer_verdict
from nanoskyrl.envs.problems import MAX_LEVEL, is_test
from nanoskyrl.envs.text_math import INSTRUCTION, check_counts
from nanoskyrl.envs.tools import carry_out, offer, passages
from nanoskyrl.stages.digests import derive_seed
from nanoskyrl.stages.errors import SettingsError
from nanoskyrl.stages.trajectory import ToolCall, Trajectory

KINDS = ("calculator", "search")
MAX_CALLS = 16
"""Carried out of one action; a policy that repeats the tag must not fill its own context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUseConfig:
    """Which tools are offered, and which tasks are posed."""

    tools: tuple[str, ...] = ("calculator", "search")
    """Offered to the policy."""
    kinds: tuple[str, ...] = ("calculator",)
    """Tasks posed: calculator (products past mental range), search (a fact from the corpus)."""
    level: int = 1
    """1 to 5: digits of the numbers; search tasks have one level."""
    n_train: int = 8192
    """Generated training tasks, at most."""
    n_test: int = 1024
    """Generated held-out tasks, at most."""
    call_weight: float = 0.1
    """Part of the reward given for calls that are all valid, with at least one; the rest is for the right answer."""
    data: str | None = None
    """A .jsonl or .parquet file of prompts and ground truths, in place of generated tasks."""

    def __post_init__(self) -> None:
        """Refuse kinds of tasks and levels that do not exist."""
        check_counts("tool_use", self.n_train, self.n_test)
        if not self.kinds:
            raise SettingsError("`tool_use.kinds` is empty", hint=f"Choose from {', '.join(KINDS)}")
        for kind in self.kinds:
            if kind not in KINDS:
                raise SettingsError(f"`tool_use.kinds` holds `{kind}`", hint=f"Choose from {', '.join(KINDS)}")
        if not 1 <= self.level <= MAX_LEVEL:
            raise SettingsError(
                f"`tool_use.level` must be 1 to {MAX_LEVEL}, not {self.level}", hint="Choose a level that exists"
            )
        if not 0 <= self.call_weight <= 1:
            raise SettingsError(
                f"`tool_use.call_weight` must be 0 to 1, not {self.call_weight}", hint="Give a share of the reward"
            )


@cache  # a loop asks again at every step
def products(level: int, split: str, count: int) -> tuple[Task, ...]:
    """Return up to `count` products of two numbers of level + 1 digits."""
    rng = random.Random(derive_seed("tool_use", level, split))
    low, high = 10**level, 10 ** (level + 1)
    answers: dict[str, str] = {}
    for _ in range(20 * count):  # level 1 has 8,100 questions in all
        a, b = rng.randrange(low, high), rng.randrange(low, high)
        question = f"What is {a} * {b}?"
        if is_test(question) == (split == "test"):
            answers[question] = str(a * b)
        if len(answers) == count:
            break
    return _as_tasks(f"calculator-{level}", "calculator", split, answers)


@cache
def facts(split: str, count: int) -> tuple[Task, ...]:
    """Return up to `count` questions that a passage of the corpus answers."""
    answers = {
        p["question"]: p["answer"]
        for p in passages()
        if "question" in p and is_test(p["question"]) == (split == "test")
    }
    return _as_tasks("search", "search", split, answers)[:count]


def _as_tasks(prefix: str, kind: str, split: str, answers: dict[str, str]) -> tuple[Task, ...]:
    return tuple(
        Task(task_id=f"{prefix}-{i:06d}", split=split, prompt=question, ground_truth=answer, metadata={"kind": kind})
        for i, (question, answer) in enumerate(answers.items())
    )


class ToolUse:
    """Questions, tools, and answers that count."""

    Config = ToolUseConfig

    def __init__(self, config: ToolUseConfig) -> None:
        """Look the tools up, so that a misspelt one fails at once."""
        self.config = config
        self.tools = offer(config.tools)

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of `train` or `test`; kinds take turns while they last."""
        if self.config.data is not None:
            return read_tasks(self.config.data, split)
        count = self.config.n_test if split == "test" else self.config.n_train
        share = -(-count // len(self.config.kinds))
        makers = {"calculator": partial(products, self.config.level), "search": facts}
        by_kind = [makers[kind](split, share) for kind in self.config.kinds]
        return [tasks[i] for i in range(share) for tasks in by_kind if i < len(tasks)][:count]

    def start(self) -> "ToolUseEpisode":
        """Return a fresh episode."""
        return ToolUseEpisode(self)

    def score(self, trajectory: Trajectory) -> Score:
        """Reward the right answer, and valid calls; an answer inside a tool's words does not count."""
        _, right = answer_verdict(trajectory)
        calls = [call for turn in trajectory.turns for call in turn.tool_calls]
        valid = bool(calls) and all(call.ok for call in calls)
        weight = self.config.call_weight
        return Score(
            reward=(1 - weight) * right + weight * valid,
            success=right,
            parts={"answer": float(right), "calls": float(valid)},
        )

    def expert(self, task: Task) -> list[str]:
        """Call the tool once, then answer."""
        if task.metadata.get("kind") == "search":
            call = f'{{"tool": "search", "args": {{"query": "{task.prompt}"}}}}'
        elif task.metadata.get("kind") == "calculator":
            expression = task.prompt.removeprefix("What is ").removesuffix("?").replace(" ", "")
            call = f'{{"tool": "calculator", "args": {{"expression": "{expression}"}}}}'
        else:
            return [f"<answer>{task.ground_truth}</answer>"]
        return [f"{TOOL_CALL}{call}{TOOL_CALL_END}", f"<answer>{task.ground_truth}</answer>"]


class ToolUseEpisode:
    """Answer calls until there is an answer, or neither."""

    def __init__(self, environment: ToolUse) -> None:
        """Share the environment's tools."""
        self.tools = environment.tools

    def reset(self, task: Task, seed: int) -> Observation:
        """Pose the question; the tools are shown by whoever renders the prompt."""
        messages = task.messages or ({"role": "user", "content": f"{task.prompt}\n{INSTRUCTION}"},)
        schemas = [tool.schema for tool in self.tools.values()]
        return Observation(
            messages=messages, tools=schemas, metadata={"ground_truth": task.ground_truth, **task.metadata}
        )

    def step(self, action: str) -> Step:
        """Carry out the calls; without any, the episode ends."""
        written = tool_calls(action)
        if not written:
            return Step(done=True)
        calls = [carry_out(call, self.tools) for call in written[:MAX_CALLS]]
        if len(written) > MAX_CALLS:
            detail = f"{len(written)} calls in one turn; only {MAX_CALLS} are carried out"
            calls.append(ToolCall(tool=None, result=detail, ok=False, error="too_many_calls"))
        replies: list[Message] = [
            {"role": "tool", "content": call.result if call.ok else f"error: {call.result}"} for call in calls
        ]
        return Step(messages=replies, done=False, tool_calls=calls)

    def close(self) -> None:
        """Nothing is held."""
