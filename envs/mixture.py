"""Several environments in one run: each task is of one of them, which plays and scores it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanoskyrl.envs.base import Environment, Episode, Observation, Score, Step, Task
from nanoskyrl.stages.core.trajectory import Trajectory


class Mixture:
    """Environments by name; a task's `env` says whose it is, and a row's."""

    def __init__(self, environments: Mapping[str, Environment]) -> None:
        """Take environments that are ready."""
        self.environments = dict(environments)
        self.serial = any(getattr(each, "serial", False) for each in environments.values())

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of all of them, one environment after the other."""
        return [replace(task, env=name) for name, each in self.environments.items() for task in each.tasks(split)]

    def start(self) -> Episode:
        """Return an episode that is of the environment of the task it is given."""
        return EpisodeOfTask(lambda task: self.environments[str(task.env)].start())

    def score(self, trajectory: Trajectory) -> Score:
        """Let the row's own environment judge it."""
        return self.environments[trajectory.env].score(trajectory)

    def expert(self, task: Task) -> Sequence[str]:
        """Return what the task's own environment would do."""
        return self.environments[str(task.env)].expert(task)


class EpisodeOfTask:
    """An episode whose kind is not known before its task is."""

    def __init__(self, choose: Callable[[Task], Episode]) -> None:
        """Wait for a task, for which an episode is chosen."""
        self._choose = choose
        self._inner: Episode | None = None

    def reset(self, task: Task, seed: int) -> Observation:
        """Begin the episode of the task."""
        self._inner = self._choose(task)
        return self._inner.reset(task, seed)

    def step(self, action: str) -> Step:
        """Let it answer."""
        assert self._inner is not None
        return self._inner.step(action)

    def close(self) -> dict[str, Any] | None:
        """Close it, if it was begun."""
        return None if self._inner is None else self._inner.close()
