"""What a benchmark is: an environment whose tasks are for evaluation alone.

It poses its authors' questions, and judges what was written from the row alone; the
rollout's turn loop, shards and resuming serve it as they serve training. `expert` writes
the gold answers in the wording of a model, which must score 1.0.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from nanoskyrl.envs.actions import tool_calls
from nanoskyrl.envs.base import Episode, Message, Observation, Score, Step, Task
from nanoskyrl.envs.graders.kinds import ANSWERED
from nanoskyrl.envs.graders.reading import REASONING, without_reasoning
from nanoskyrl.envs.worlds.tool_use.environment import ToolUse, ToolUseConfig
from nanoskyrl.eval.rows import Hub, Row, bench_rows
from nanoskyrl.stages.core.checked import FILE, Checked
from nanoskyrl.stages.core.digests import digest_json
from nanoskyrl.stages.core.errors import InputError, SettingsError
from nanoskyrl.stages.core.metrics import grouped
from nanoskyrl.stages.core.storage import read_named
from nanoskyrl.stages.core.trajectory import Trajectory

SPLIT = "test"
JUDGE_FAILED = "judge_failed"
"""Part of a score: 1 where a judge was asked and gave no verdict."""


@dataclass(frozen=True, kw_only=True)
class BenchConfig(Checked):
    """What every benchmark takes."""

    data: str | None = field(default=None, metadata=FILE)
    """A file or folder in the benchmark's own columns; None: the hub."""
    prompt: str | None = field(default=None, metadata=FILE)
    """A text file with `{question}` in it that takes the place of our words, to ask in others'."""
    reasoning_marks: tuple[tuple[str, str], ...] = REASONING
    """Pairs of texts between which a model thinks; nothing there is judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One judged attempt, as the metrics of a benchmark see it."""

    task_id: str
    sample: int
    success: bool | None
    reward: float | None
    parts: Mapping[str, float | None] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Benchmark:
    """One benchmark; a subclass says what its rows ask, and what is right."""

    Config: ClassVar[type] = BenchConfig
    name: ClassVar[str]
    hub: ClassVar[Hub | None] = None
    columns: ClassVar[tuple[str, ...]] = ()
    """Needed in every row."""
    metric: ClassVar[str] = "accuracy"
    """What `success` is called in the summary."""
    max_turns: ClassVar[int] = 1
    max_generate_length: ClassVar[int] = 2048
    """Tokens of one turn, unless the user says otherwise."""
    workers: ClassVar[int] = 1
    """Verdicts that are worth finding at once."""
    secret: ClassVar[bool] = False
    """Whether neither questions nor answers may be written down: rows keep ids, grades and counts."""
    groups: ClassVar[Mapping[str, str]] = {}
    """Names of its numbers that are the share of right samples for each value of a metadata key, and that key."""
    stays_local: ClassVar[str | None] = None
    """Why the text of the shards must not leave this machine; None: it may."""

    def __init__(self, config: Any) -> None:
        """Hold the settings; rows are read when they are asked for."""
        self.config = config

    # What a subclass gives

    def pose(self, row: Row, index: int) -> Task:
        """Return the task of a row: id, messages, ground truth and metadata.

        Raises:
            KeyError, ValueError, TypeError: the row does not hold what its columns mean.
        """
        raise NotImplementedError

    def check_row(self, row: Row) -> None:
        """Refuse a row by which right answers would count as wrong.

        Raises:
            ValueError: names the column, and what was found.
        """

    def check_chosen(self, tasks: Sequence[Task]) -> None:
        """Refuse chosen tasks by what is too dear to look at in every row.

        Raises:
            InputError: names the row, the column, and what was found.
        """

    def verdict(self, text: str, metadata: Mapping[str, Any], trajectory: Trajectory) -> Score:
        """Judge the last words of an attempt."""
        raise NotImplementedError

    def gold(self, task: Task) -> str:
        """Return a right answer as a model would write it."""
        raise NotImplementedError

    def metrics(self, rows: Sequence[Scored]) -> dict[str, Any]:
        """Return the benchmark's own numbers, by name."""
        return {name: by_group(rows, key) for name, key in self.groups.items()}

    def files(self, rows: Iterable[Trajectory]) -> dict[str, bytes]:
        """Return what is to lie beside the shards, by name."""
        return {}

    # What the turn loop, `score` and `eval` call

    @cached_property
    def rows(self) -> list[Row]:
        """All rows of the benchmark, in its own order."""
        return bench_rows(self.config.data, self.hub, self.name, self.columns, self.check_row)

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of `test`.

        Raises:
            SettingsError: another split was asked for.
            InputError: a row does not hold what its columns mean, or an id comes twice.
        """
        if split != SPLIT:
            raise SettingsError(
                f"{self.name} has no split `{split}`: a benchmark is not trained on", hint="Use `skyrl eval --bench`"
            )
        return self._tasks

    @cached_property
    def _tasks(self) -> list[Task]:
        tasks: dict[str, Task] = {}
        for index, row in enumerate(self.rows):
            try:
                task = self.pose(row, index)
            except (KeyError, ValueError, TypeError, IndexError, AttributeError, OverflowError) as error:
                raise InputError(
                    f"row {index} of {self.name} does not hold what its columns mean: {type(error).__name__}: {error}",
                    hint="docs/evaluations.md gives the layout",
                ) from error
            if task.task_id in tasks:
                raise InputError(f"row {index} of {self.name} repeats the id `{task.task_id}`", hint="Ids must differ")
            tasks[task.task_id] = task
        return list(tasks.values())

    def start(self) -> Episode:
        """Return a fresh episode: one question, one reply."""
        return OneReply()

    def score(self, trajectory: Trajectory) -> Score:
        """Judge a stored trajectory by its last reply; one without any has no answer, which is wrong."""
        if not trajectory.turns:
            return wrong()
        return self.verdict(self.said(trajectory.turns[-1].action), trajectory.metadata, trajectory)

    def said(self, reply: str) -> str:
        """Return a reply without its reasoning."""
        return without_reasoning(reply, self.config.reasoning_marks)

    def expert(self, task: Task) -> list[str]:
        """Answer right, at once."""
        return [self.gold(task)]

    def asked(self, question: str, ours: str) -> str:
        """Return what is asked: in our words, or in those of the user's file.

        Raises:
            InputError: the file is missing, or has no place for the question.
        """
        return ours if self._template is None else self._template.replace("{question}", question)

    @cached_property
    def _template(self) -> str | None:
        if self.config.prompt is None:
            return None
        text = read_named(self.config.prompt, "prompt", "Name a text file")
        if "{question}" not in text:
            raise InputError(f"`{self.config.prompt}` has no {{question}} in it", hint="Say where the question goes")
        return text.rstrip("\n")

    def inputs(self, tasks: Sequence[Task]) -> dict[str, str]:
        """Return the digest of what is asked, for the manifest: the hub's copy of a benchmark may change."""
        asked = [[task.task_id, list(task.messages), task.ground_truth] for task in tasks]
        return {"tasks": digest_json(json.loads(json.dumps(asked)))}


class OneReply:
    """Ask, and end with the first reply."""

    def reset(self, task: Task, seed: int) -> Observation:
        """Pose the question."""
        return Observation(messages=task.messages, metadata={"ground_truth": task.ground_truth, **task.metadata})

    def step(self, action: str) -> Step:
        """End: whatever was written is the answer."""
        return Step(done=True)

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, kw_only=True)
class ToolsConfig(BenchConfig):
    """What benchmarks for agents take."""

    tools: tuple[str, ...] = ()
    """Tools on offer, as `tool_use` names them, or `module:function`; none: the model answers from what it knows."""
    corpus: str | None = None
    """A .jsonl or .parquet file of title and text that `search` and `wiki` look in; None: the one that ships."""
    turns: int = 16
    """Turns of an attempt, where there are tools."""


class WithTools(Benchmark):
    """A benchmark that may offer tools, from the registry that environments use."""

    def __init__(self, config: Any) -> None:
        """Look the tools up, so that a misspelt one fails before anything is asked."""
        super().__init__(config)
        if config.tools:
            _ = self._tool_use

    @cached_property
    def _tool_use(self) -> ToolUse:
        """The environment whose episodes carry the calls out."""
        return ToolUse(ToolUseConfig(tools=self.config.tools, corpus=self.config.corpus))

    @property
    def max_turns(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """One reply, or as many turns as tools are given."""
        return self.config.turns if self.config.tools else 1

    def start(self) -> Episode:
        """Return a fresh episode: calls are answered until there is a reply without any."""
        return self._tool_use.start(in_tags=False) if self.config.tools else OneReply()

    def score(self, trajectory: Trajectory) -> Score:
        """Judge the last reply; one that only calls a tool answers nothing."""
        if not trajectory.turns or tool_calls(trajectory.turns[-1].action):
            return wrong()
        return super().score(trajectory)


def by_group(rows: Sequence[Scored], key: str) -> dict[str, float]:
    """Return the share of right samples for each value of a metadata key, in the order of their names."""
    groups = grouped((str(row.metadata.get(key)), float(row.success)) for row in rows if row.success is not None)
    return {name: sum(values) / len(values) for name, values in sorted(groups.items())}


def wrong(**parts: float | None) -> Score:
    """Return the verdict on an attempt that gave no answer."""
    return Score(reward=0.0, success=False, parts={ANSWERED: 0.0, **parts})


def graded(right: bool, *, answered: bool = True, **parts: float | None) -> Score:
    """Return the verdict on an answer that is right or wrong."""
    return Score(reward=float(right), success=right, parts={ANSWERED: float(answered), **parts})


def unjudged(*, answered: bool = True, **parts: float | None) -> Score:
    """Return the word on an answer for which no verdict could be had: neither right nor wrong."""
    return Score(reward=None, parts={ANSWERED: float(answered), JUDGE_FAILED: 1.0, **parts})


def user(text: str, system: str | None = None) -> tuple[Message, ...]:
    """Return a conversation that begins with one question."""
    begin = () if system is None else ({"role": "system", "content": system},)
    return (*begin, {"role": "user", "content": text})
