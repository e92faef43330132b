"""Tasks of reasoning-gym by name: `text_math.family = "reasoning_gym:chain_sum"` (extra `reasoning_gym`).

A row keeps which entry it is, not the entry: the same version of the package makes the same one again, and scores it.
Some entries depend on the order of sets of strings, so all are made in workers, which have one seed for hashes.
"""

import importlib.metadata
import importlib.util
from functools import cache
from typing import Any

from nanoskyrl.envs.base import Task, VerifierTimeout
from nanoskyrl.envs.graders.workers import WorkerDied, Workers, WorkerTimeout
from nanoskyrl.envs.worlds.text_math.problems import DRAWS_PER_TASK, is_test
from nanoskyrl.stages.core.digests import derive_seed
from nanoskyrl.stages.core.errors import InputError, SettingsError, did_you_mean, told_as

PREFIX = "reasoning_gym:"
SEED = derive_seed("reasoning_gym") % 2**31
SIZE = 1 << 20
"""Entries are made one by one when they are asked for; this is only their number."""
SIZES = {"acre": 1 << 13, "word_ladder": 1 << 14}
"""Of tasks that make or check all entries at the start: acre would take minutes for them, word_ladder refuses."""
SECONDS = 10.0
MAKING_SECONDS = 3600.0
"""For all tasks of a split; some generators need a second for each."""

POOL = Workers(quiet=True)


@cache
def tasks(name: str, split: str, count: int) -> tuple[Task, ...]:
    """Return up to `count` tasks of a split; its questions are not in the other one.

    Raises:
        SettingsError: the package is not installed, or has no such task, or it is a mixture of others.
    """
    _check(name)
    with told_as(
        SettingsError,
        f"reasoning-gym could not make {count} tasks of `{name}`",
        WorkerTimeout,
        WorkerDied,
        hint="Ask for fewer with `text_math.n_train` and `n_test`",
    ):
        return POOL.call("nanoskyrl.envs.worlds.text_math.reasoning:make", name, split, count, seconds=MAKING_SECONDS)


def make(name: str, split: str, count: int) -> tuple[Task, ...]:
    """Return what `tasks` does. Runs in a worker."""
    dataset = _dataset(name)
    version = importlib.metadata.version("reasoning-gym")
    found: dict[str, Task] = {}
    misses = 0
    for index in range(_size(name)):
        entry = dataset[index]
        question, answer = str(entry["question"]), entry["answer"]
        if question in found or is_test(question) != (split == "test"):
            misses += 1
            if misses == DRAWS_PER_TASK:
                break
            continue
        misses = 0
        found[question] = Task(
            task_id=f"{name}-{index:06d}", split=split, prompt=question,
            ground_truth=None if answer is None else str(answer),
            metadata={"kind": name, "reasoning_gym": {"name": name, "index": index, "version": version}},
        )  # fmt: skip
        if len(found) == count:
            break
    return tuple(found.values())


def _check(name: str) -> None:
    """Refuse names without tasks; done here, so that the worker has nothing to refuse."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise SettingsError("reasoning-gym is not installed", hint="pip install 'nanoskyrl[reasoning_gym]'")
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise SettingsError(
            f"reasoning-gym has no task `{name}`",
            hint=did_you_mean(name, DATASETS) or "Its README lists them; `chain_sum` is one",
        )
    if name == "composite":
        raise SettingsError(
            "reasoning-gym's `composite` is no task: it mixes others, which must be named",
            hint="Name one of the others, such as `chain_sum`",
        )


@cache
def _dataset(name: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, size=_size(name), seed=SEED)


def _size(name: str) -> int:
    return SIZES.get(name, SIZE)


def score_answer(name: str, index: int, answer: str | None) -> float:
    """Return the package's mark, 0 to 1. Runs in a worker: some tasks search for a proof."""
    dataset = _dataset(name)
    return float(dataset.score_answer(answer, dataset[index]))


def verdict(which: dict[str, Any], answer: str | None) -> tuple[float, bool]:
    """Return the mark, and whether the answer is right: several tasks give part marks to wrong ones, or to none.

    Raises:
        InputError: the row was made by another version of the package.
        VerifierTimeout: the package did not come to a verdict.
    """
    here = importlib.metadata.version("reasoning-gym") if importlib.util.find_spec("reasoning_gym") else "not installed"
    if which["version"] != here:
        raise InputError(
            f"the task is of reasoning-gym {which['version']}, and here it is {here}",
            hint=f"pip install reasoning-gym=={which['version']}",
        )
    if answer is None:
        return 0.0, False
    try:
        mark = POOL.call(
            "nanoskyrl.envs.worlds.text_math.reasoning:score_answer",
            which["name"],
            which["index"],
            answer,
            seconds=SECONDS,
        )
    except WorkerTimeout as error:
        raise VerifierTimeout("reasoning-gym did not come to a verdict in time, and was killed") from error
    return mark, mark == 1.0
