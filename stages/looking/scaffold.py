"""What `skyrl init --env` writes: an environment with one tool, and its test, to be changed into one of your own."""

from pathlib import Path

from nanoskyrl.stages.core.errors import ConflictError, SettingsError
from nanoskyrl.stages.core.storage import write_whole

ENVIRONMENT = '''"""`{name}`: which of two cities is larger? The sizes are in a tool."""

import random
from dataclasses import dataclass

from nanoskyrl.envs.actions import final_answer, tool_calls
from nanoskyrl.envs.base import Observation, Score, Step, Task
from nanoskyrl.envs.tools import Tool, carry_out_all

SIZES = {{"Arden": 31, "Borel": 87, "Cadiz": 11, "Dover": 52, "Elgin": 24, "Fargo": 68, "Genoa": 95, "Hilo": 45}}


def size(city: str) -> int:
    """Return how many thousand people live in a city."""
    return SIZES[city]


@dataclass(frozen=True, kw_only=True)
class {cls}Config:
    """Settings: `--set {name}:{cls}.n_train=10`."""

    n_train: int = 100
    """Tasks."""


class {cls}:
    """Poses tasks, plays them, and judges what was written."""

    Config = {cls}Config

    def __init__(self, config: {cls}Config) -> None:
        self.config = config

    def tasks(self, split: str) -> list[Task]:
        """Return the tasks of `train` or `test`, always in the same order."""
        rng, found = random.Random(split), []
        for i in range(self.config.n_train):
            one, other = rng.sample(sorted(SIZES), 2)
            question = f"Which city is larger, {{one}} or {{other}}? Answer in <answer></answer> tags."
            larger = max(one, other, key=SIZES.__getitem__)
            found.append(
                Task(task_id=f"{{split}}-{{i}}", split=split, prompt=question, ground_truth=larger,
                     metadata={{"cities": [one, other]}})
            )
        return found

    def start(self) -> "Episode":
        """Return a fresh episode."""
        return Episode()

    def score(self, trajectory) -> Score:
        """Judge a stored attempt, from its row alone."""
        answer = final_answer(trajectory.turns[-1].action) if trajectory.turns else None
        right = answer == trajectory.metadata["ground_truth"]
        return Score(reward=float(right), success=right)

    def expert(self, task: Task) -> list[str]:
        """Return actions that solve a task."""
        calls = "".join(
            f'<tool_call>{{{{"name": "size", "arguments": {{{{"city": "{{city}}"}}}}}}}}</tool_call>'
            for city in task.metadata["cities"]
        )
        return [calls, f"<answer>{{task.ground_truth}}</answer>"]


class Episode:
    """One attempt: calls are answered until there is none."""

    tools = {{"size": Tool("size", size)}}

    def reset(self, task: Task, seed: int) -> Observation:
        """Begin."""
        return Observation(
            messages=[{{"role": "user", "content": task.prompt}}],
            tools=[tool.schema for tool in self.tools.values()],
            metadata={{"ground_truth": task.ground_truth, **task.metadata}},
        )

    def step(self, action: str) -> Step:
        """Answer what the policy wrote, whatever it is."""
        calls = tool_calls(action)
        if not calls:
            return Step(done=True)
        records, replies = carry_out_all(calls, self.tools, 4)
        return Step(messages=replies, done=False, tool_calls=records)

    def close(self) -> None:
        """Let go of what the episode holds."""
'''
TEST = '''"""Run with `python -m pytest {test}`."""

from {name} import {cls}, {cls}Config

from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.engines.rollout_config import RolloutConfig
from nanoskyrl.stages.rollout import rollout
from nanoskyrl.stages.score import ScoreConfig, score


def test_the_expert_is_right_and_uses_the_tool(tmp_path):
    rollout(None, tmp_path / "rollout", RolloutConfig(env="{name}:{cls}", engine="scripted", train_batch_size=4))
    manifest = score(tmp_path / "rollout", tmp_path / "score", ScoreConfig())
    rows = [row for table in read_parts(tmp_path / "score", manifest) for row in table.to_pylist()]
    assert [row["reward"] for row in rows] == [1.0] * len(rows)
    assert all(len(row["turns"]) == 2 for row in rows)


def test_whatever_is_written_is_answered():
    environment = {cls}({cls}Config())
    for action in ("", "<answer>", '<tool_call>{{"name": "size", "arguments": {{"city": "Atlantis"}}}}</tool_call>'):
        episode = environment.start()
        episode.reset(environment.tasks("train")[0], seed=0)
        episode.step(action)
        episode.close()
'''


def write_environment(file: Path) -> tuple[Path, Path]:
    """Write an environment and its test beside it, and return both paths.

    Raises:
        SettingsError: the file's name is no name of a module.
        ConflictError: one of the two is there already.
    """
    if file.suffix != ".py" or not file.stem.isidentifier():
        raise SettingsError(f"`{file}` is no name of a module", hint="Name it like my_env.py")
    test = file.with_name(f"test_{file.name}")
    for path in (file, test):
        if path.exists():
            raise ConflictError(f"`{path}` is there already", hint="Name another file")
    cls = class_of(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, ENVIRONMENT.format(name=file.stem, cls=cls).encode())
    write_whole(test, TEST.format(name=file.stem, cls=cls, test=test.name).encode())
    return file, test


def class_of(file: Path) -> str:
    """Return the name of the class in a file: `my_env.py` holds MyEnv."""
    return "".join(word.capitalize() for word in file.stem.split("_"))
