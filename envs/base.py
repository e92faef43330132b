"""What an environment is: it poses tasks, answers actions, and scores trajectories.

An environment is a class made from its settings. `start` gives one `Episode` a task;
the turn loop calls `reset`, then `step` with whatever the policy wrote, then `close`.
What the policy wrote is data: no text of any kind raises. Scoring is apart from acting,
pure, and can be run again on stored trajectories.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nanoskyrl.envs.messages import tidy_messages
from nanoskyrl.stages.core.trajectory import ToolCall, Trajectory

Message = dict[str, Any]
"""`role` (system, user, assistant or tool) and `content`, a text; an assistant's may have `tool_calls` apart and a null
content, a tool's the `tool_call_id` and `name` of its call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Something to be done, and how it will be judged."""

    task_id: str
    """Unique in its environment and split; the same id always poses the same task."""
    split: str
    prompt: str
    """What the user asks, or a JSON-ready list of messages given by a data set."""
    ground_truth: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    """Kept in the trajectory table; JSON-ready."""
    messages: Sequence[Message] = ()
    """A conversation to begin with, where a data set brings one; replaces `prompt`."""
    env: str | None = None
    """Name of the environment that poses it, in a run of several; filled by the rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the policy sees before its first action."""

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] = ()
    """JSON schemas of the tools on offer, as `{"type": "function", "function": {...}}`."""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the environment answers to one action."""

    messages: Sequence[Message] = ()
    """Observations, role `tool` or `user`; the policy does not see those of a step that ends the episode."""
    reward: float | None = None
    """The environment's own word about this action; None where it says nothing."""
    done: bool
    truncated: bool = False
    """With `done`: a limit of the environment's ended the episode, not what was done in it."""
    tool_calls: Sequence[ToolCall] = ()
    summary: str | None = None
    """What the attempt knows by now, for policies that see no history; None: as it was."""
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def observation(self) -> str:
        """The observations as one text."""
        return "\n".join(str(message["content"]) for message in self.messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A verdict on one trajectory."""

    reward: float | None
    """None: could not be judged. Never 0 for that."""
    success: bool | None = None
    parts: dict[str, float | None] = field(default_factory=dict)
    """Components of the reward by name; `answered` beside them, where an environment knows."""


class VerifierTimeout(TimeoutError):
    """Nobody came to a verdict in time: the row says `verifier_timeout`, and has no reward."""


def check_task(task: Any) -> None:
    """Raise TypeError unless this is a Task that the table can hold."""
    if not isinstance(task, Task):
        raise TypeError(f"a task is a {type(task).__name__}, not a Task")
    for name, of in (("task_id", str), ("split", str), ("metadata", dict)):
        if not isinstance(getattr(task, name), of):
            raise TypeError(f"`{name}` of task {task.task_id!r} is {getattr(task, name)!r}, not a {of.__name__}")
    check_metadata(task.metadata)


def check_observation(observation: Any) -> None:
    """Raise TypeError unless this is an Observation whose messages can be shown and stored."""
    if not isinstance(observation, Observation):
        raise TypeError(f"reset() returned {type(observation).__name__}, not an Observation")
    check_messages(observation.messages)
    check_metadata(observation.metadata)


def check_step(step: Any) -> None:
    """Raise TypeError unless this is a Step that can be shown and stored."""
    if not isinstance(step, Step):
        raise TypeError(f"step() returned {type(step).__name__}, not a Step")
    check_messages(step.messages)
    check_metadata(step.metadata)
    if step.summary is not None and not isinstance(step.summary, str):
        raise TypeError(f"step() gave the summary {step.summary!r}, which is no text")
    if step.reward is not None and not isinstance(step.reward, int | float):
        raise TypeError(f"step() gave the reward {step.reward!r}, which is no number")


def check_messages(messages: Any) -> None:
    """Raise TypeError unless these are messages with a role and a content that can be shown and stored."""
    json.dumps(tidy_messages(messages, pictures=True))


def check_metadata(metadata: Any) -> None:
    """Raise TypeError unless this is a dictionary that JSON can hold."""
    if not isinstance(metadata, dict):
        raise TypeError(f"metadata is a {type(metadata).__name__}, not a dictionary")
    json.dumps(metadata)


class Episode(Protocol):
    """One attempt at one task."""

    def reset(self, task: Task, seed: int) -> Observation:
        """Begin, and return what the policy sees first."""
        ...

    def step(self, action: str) -> Step:
        """Answer one action; never raises for what the action says."""
        ...

    def close(self) -> dict[str, Any] | None:
        """Let go of whatever the episode holds; what is returned goes into the metadata, as a step's does.

        Called once, however the episode ended: what only the end can tell, of an episode that a limit
        of the turn loop cut off too, is reported here.
        """
        ...


class Environment(Protocol):
    """A source of tasks and episodes, made from its settings."""

    def tasks(self, split: str) -> Sequence[Task]:
        """Return all tasks of a split, always in the same order."""
        ...

    def start(self) -> Episode:
        """Return a fresh episode."""
        ...

    def score(self, trajectory: Trajectory) -> Score:
        """Judge a stored trajectory from what is in its row alone."""
        ...

    def expert(self, task: Task) -> Sequence[str]:
        """Return actions that solve the task, for demonstrations and upper bounds."""
        ...
