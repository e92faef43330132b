"""Rows as a rollout would store them, without an engine."""

from collections.abc import Sequence
from typing import Any

from nanoskyrl.envs.base import Task
from nanoskyrl.stages.core.trajectory import Trajectory, Turn


def row_for(environment: Any, task: Task, actions: Sequence[str]) -> Trajectory:
    """Play the actions against a fresh episode until it is done, and return the row."""
    episode = environment.start()
    observation = episode.reset(task, 0)
    metadata, turns = {**task.metadata, **observation.metadata}, []
    for action in actions:
        step = episode.step(action)
        metadata |= step.metadata
        turns.append(
            Turn(action=action, observation=step.observation, done=step.done, tool_calls=tuple(step.tool_calls))
        )
        if step.done:
            break
    metadata |= episode.close() or {}
    done = bool(turns) and turns[-1].done
    return Trajectory(
        trajectory_id=task.task_id, group_id="g", sample=0, env="env", task_id=task.task_id, split=task.split, seed=0,
        policy_version=None, policy_digest=None, temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed",
        prompt_ids=None, response_ids=None, loss_mask=None, rollout_logprobs=None, prompt="", response="",
        messages=list(observation.messages), turns=turns, status="completed" if done else "max_turns",
        stop_reason="stop" if done else "max_turns", trainable=False, prompt_tokens=0, completion_tokens=0,
        metadata=metadata,
    )  # fmt: skip
