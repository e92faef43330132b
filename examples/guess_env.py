"""An environment in thirty lines: guess a number from 1 to 8, answered by higher or lower.

skyrl rollout --env guess_env:Guess --engine scripted --run runs/guess      (in this folder)
"""

import re
from dataclasses import dataclass

from nanoskyrl.envs.base import Observation, Score, Step, Task


@dataclass(frozen=True, kw_only=True)
class GuessConfig:
    """Settings; on the command line `--set guess_env:Guess.n_train=32`."""

    n_train: int = 64


class Guess:
    """A source of tasks and episodes; here the environment is its own episode's maker."""

    Config = GuessConfig

    def __init__(self, config):
        self.config = config

    def tasks(self, split):
        return [
            Task(task_id=f"guess-{i}", split=split, prompt="Guess my number from 1 to 8.")
            for i in range(self.config.n_train)
        ]

    def start(self):
        return GuessEpisode()

    def score(self, trajectory):
        found = any(turn.done for turn in trajectory.turns)
        return Score(reward=1 / len(trajectory.turns) if found else 0.0, success=found)

    def expert(self, task):
        return ["4", "6", "7", "8", "2", "3", "1", "5"]


class GuessEpisode:
    """One attempt. Whatever the policy writes is answered; nothing it writes raises."""

    def reset(self, task, seed):
        self.secret = seed % 8 + 1
        return Observation(messages=[{"role": "user", "content": task.prompt}])

    def step(self, action):
        numbers = re.findall(r"\d{1,3}", action)
        if numbers and int(numbers[-1]) == self.secret:
            return Step(done=True)
        word = "a number, please" if not numbers else "higher" if int(numbers[-1]) < self.secret else "lower"
        return Step(messages=[{"role": "user", "content": word}], done=False)

    def close(self):
        pass
