"""Playing an episode by hand, and the same again from the same task."""

from collections.abc import Callable, Sequence
from typing import Any

from nanoskyrl.envs.base import Step, Task, check_observation


def play(environment: Any, task: Task, actions: Sequence[str]) -> list[Step]:
    """Return the steps of one episode that begins anew."""
    episode = environment.start()
    check_observation(episode.reset(task, 0))
    steps = [episode.step(action) for action in actions]
    episode.close()
    return steps


def check_determinism(make: Callable[[], Any]) -> None:
    """Tasks, first observations and every step are the same in two environments, whatever the trajectory's seed."""
    one, two = make(), make()
    for split in ("train", "test"):
        assert list(one.tasks(split)) == list(two.tasks(split))
    assert len({task.task_id for task in one.tasks("train")}) == len(one.tasks("train"))
    for task in one.tasks("train")[:8]:
        first, second = one.start(), two.start()
        assert first.reset(task, 1) == second.reset(task, 2)
        for action in ("", "<action>look</action>", "click[buy now]", *one.expert(task)):
            assert first.step(action) == second.step(action)
