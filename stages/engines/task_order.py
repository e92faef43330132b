"""Which tasks a step of a run attempts, and what each attempt is called and seeded with.

Tasks come from one seeded permutation of the environment's, with a cursor of
step x count: each is attempted once before any comes again. Further rounds of dynamic
sampling have permutations of their own. Everything is a digest of the run's seed and of
what it is for, so nothing depends on what ran before.

In a run of several environments a seeded draw by their weights says of which one each
prompt of the run is; each environment has its own permutation, and its own cursor.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nanoskyrl.envs.base import Environment, Task
from nanoskyrl.stages.core.digests import canonical_json, derive_seed, digest_text
from nanoskyrl.stages.core.errors import InputError, SettingsError
from nanoskyrl.stages.core.runs import version_of
from nanoskyrl.stages.engines.turns import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOrder:
    """What a step's tasks, names and seeds follow from."""

    seed: int
    """The run's."""
    step: int
    env: str
    split: str

    def choose(
        self,
        tasks: Sequence[Task],
        count: int,
        named: Sequence[str] = (),
        sampling_round: int = 0,
        start: int | None = None,
    ) -> list[Task]:
        """Return the tasks of a step: those named, else the next of the permutation of this round.

        Args:
            tasks: All tasks of the split.
            count: Tasks of a step.
            named: Ids, in their order; none: those of the permutation.
            sampling_round: Each has a permutation of its own.
            start: Tasks of earlier steps; None: as many a step as now.

        Raises:
            InputError: one that is named is not there, or none is.
            SettingsError: there are fewer than a step needs.
        """
        if named:
            by_id = {task.task_id: task for task in tasks}
            for task_id in named:
                if task_id not in by_id:
                    raise InputError(
                        f"{self.env} has no task `{task_id}` in split {self.split}",
                        hint=f"For instance `{next(iter(by_id), '')}`",
                    )
            return [by_id[task_id] for task_id in named]
        if not tasks:
            raise InputError(f"{self.env} has no tasks in split {self.split}", hint="Give it at least one")
        if count > len(tasks):
            raise SettingsError(
                f"`rollout.train_batch_size` is {count}, but {self.env} has {len(tasks)} tasks in split {self.split}",
                hint=f"Lower it with `--train-batch-size {len(tasks)}`, or give more tasks",
            )
        # One permutation, gone through again and again: a batch never holds a task twice.
        order = permutation(len(tasks), self.seed, self.env, self.split, sampling_round)
        start = self.step * count if start is None else start
        return [tasks[order[(start + i) % len(order)]] for i in range(count)]

    def identities(
        self, task: Task, n_samples: int, policy: Path | None, policy_digest: str | None, sampling_round: int = 0
    ) -> Iterator[Identity]:
        """Yield who each of the attempts at a task is: one group, and a seed for each."""
        whose = canonical_json([self.seed, self.step, self.env, self.split, task.task_id, sampling_round])
        group_id = digest_text(f"group {whose}")[:16]
        for sample in range(n_samples):
            trajectory = digest_text(f"trajectory {whose} {sample}")
            yield Identity(
                trajectory_id=trajectory[:32],
                group_id=group_id,
                sample=sample,
                env=self.env,
                seed=int(trajectory[32:48], 16) >> 1,
                policy_version=version_of(policy) if policy else None,
                policy_digest=policy_digest,
            )


def tasks_in(environment: Environment, split: str) -> Sequence[Task]:
    """Return all tasks of a split.

    Raises:
        TypeError: the environment returned no sequence.
    """
    tasks = environment.tasks(split)
    if not isinstance(tasks, Sequence):
        raise TypeError(f"tasks() returned {type(tasks).__name__}, no sequence")
    return tasks


def weights_of(env: str | Mapping[str, float]) -> dict[str, float]:
    """Return the weight of each environment of `rollout.env`, by name."""
    return {env: 1.0} if isinstance(env, str) else dict(env)


def sole_environment(env: str | Mapping[str, float]) -> str:
    """Return the environment of a run that has one.

    Raises:
        SettingsError: it has several.
    """
    if isinstance(env, str):
        return env
    raise SettingsError(
        f"the run has the environments {', '.join(sorted(env))}", hint="Name the one that is meant with `--env`"
    )


def drawn(weights: Mapping[str, float], seed: int, split: str, step: int, count: int) -> tuple[list[str], Counter[str]]:
    """Return the environment of each prompt of a step, and how many prompts of each there were in earlier steps.

    Args:
        weights: Of the environments, by name.
        seed: The run's.
        split: train or test.
        step: Of the run.
        count: Prompts of a step.
    """
    names = sorted(weights)
    draws = random.Random(derive_seed(seed, "mixture", split)).choices(
        names, [weights[name] for name in names], k=(step + 1) * count
    )
    return draws[step * count :], Counter(draws[: step * count])


@cache
def permutation(count: int, seed: int, env: str, split: str, sampling_round: int = 0) -> list[int]:
    """Return the order in which a run goes through so many tasks."""
    order = list(range(count))
    rounds = (sampling_round,) if sampling_round else ()
    random.Random(derive_seed(seed, "tasks", env, split, *rounds)).shuffle(order)
    return order
