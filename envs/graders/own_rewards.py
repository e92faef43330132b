"""Reward functions of the user's, in a process that can be killed, in either of two signatures.

Ours takes a Trajectory and returns a Score, a number or None. TRL's takes `prompts`, `completions` and columns, lists
of one group's, and returns a list of numbers. Either may be asynchronous: a group's then run at once.
"""

import asyncio
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from nanoskyrl.envs.base import Score
from nanoskyrl.envs.graders.workers import Made, Workers
from nanoskyrl.stages.core.metrics import grouped
from nanoskyrl.stages.core.registry import load_attribute
from nanoskyrl.stages.core.rows import BrokenRow
from nanoskyrl.stages.core.trajectory import Trajectory

POOL = Workers(256)
GIVE = "nanoskyrl.envs.graders.own_rewards:give"
"""What runs in a worker."""
TRUTHS = ("ground_truth", "answer", "solution", "final")
"""Names under which functions of TRL's signature look for the right answer."""


class RewardError(Exception):
    """A reward function raised; says what, and in which line of which file."""


class OwnReward:
    """One reward function, as a scorer."""

    def __init__(self, name: str, timeout_seconds: float, *, conversational: bool = False) -> None:
        """Import the function here once, so that a misspelt name fails before anything is scored.

        Args:
            name: `module:function`.
            timeout_seconds: For one trajectory.
            conversational: Whether functions of TRL's signature get messages, and not text.

        Raises:
            SettingsError: it does not import.
        """
        self.name, self._seconds, self._conversational = name, timeout_seconds, conversational
        function = load_attribute(name, what="reward")
        self._by_group = takes_groups(function)
        self._at_once = self._by_group or any(
            inspect.iscoroutinefunction(part)
            for part in (function, getattr(function, "__call__", None))  # noqa: B004
        )
        self._given: dict[str, tuple[str, Any]] = {}
        self._made = Made()

    def begin(self, trajectories: Sequence[Trajectory], most: int = 1) -> None:
        """Ask about all of them, in at most so many processes; their scores are called for one by one.

        Whole groups go together where the function takes them, or is asynchronous.
        """
        groups = grouped((one.group_id if self._at_once else one.trajectory_id, one) for one in trajectories)
        asked = list(groups.values())
        seconds = [self._seconds * (len(group) if self._by_group else 1) for group in asked]
        calls = [(self.name, group, self._conversational) for group in asked]
        for group, answers in zip(asked, POOL.each(GIVE, calls, seconds, most, self._made), strict=True):
            if isinstance(answers, BaseException):
                answers = [("lost", answers)] * len(group)
            self._given |= {one.trajectory_id: answer for one, answer in zip(group, answers, strict=True)}

    def __call__(self, trajectory: Trajectory) -> Score:
        """Return the score of a trajectory.

        Raises:
            RewardError: the function raised.
            WorkerTimeout, WorkerDied: it did not return in time, or its process ended.
        """
        if trajectory.trajectory_id not in self._given:
            self.begin([trajectory])
        kind, value = self._given.pop(trajectory.trajectory_id)
        if kind == "raised":
            raise RewardError(value)
        if kind == "lost":
            raise value
        return value if isinstance(value, Score) else Score(reward=None if value is None else float(value))


def takes_groups(function: Callable[..., Any]) -> bool:
    """Say whether a function has TRL's signature."""
    try:
        return "completions" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def give(name: str, group: list[Trajectory], conversational: bool) -> list[tuple[str, Any]]:
    """Return for each trajectory of a group what a function gave, or what it raised. Runs in a worker."""
    function, by_group = _function(name)
    try:
        if by_group:
            found = function(**columns(function, group, conversational))
            found = list(asyncio.run(_all([found]))[0] if inspect.isawaitable(found) else found)
            if len(found) != len(group):
                return [("raised", f"`{name}` returned {len(found)} rewards for {len(group)} completions")] * len(group)
        else:
            found = [function(one) for one in group]
            if any(map(inspect.isawaitable, found)):
                found = asyncio.run(_all(found))
    except BrokenRow:  # no failure of the function
        raise
    except Exception as error:
        return [("raised", _told(error, function))] * len(group)
    return [("raised", _told(one, function)) if isinstance(one, BaseException) else ("gave", one) for one in found]


@cache
def _function(name: str) -> tuple[Callable[..., Any], bool]:
    """Return a function, and whether it takes groups; a worker looks once."""
    function = load_attribute(name, what="reward")
    return function, takes_groups(function)


async def _all(values: list[Any]) -> list[Any]:
    """Wait for those that are to be awaited, all at once; an error takes its place."""
    waiting = [value for value in values if inspect.isawaitable(value)]
    if len(values) == 1 and waiting:
        return [await waiting[0]]
    done = iter(await asyncio.gather(*waiting, return_exceptions=True))
    return [next(done) if inspect.isawaitable(value) else value for value in values]


def columns(function: Callable[..., Any], group: Sequence[Trajectory], conversational: bool) -> dict[str, list[Any]]:
    """Return the arguments of TRL's signature: each a list with an item a trajectory."""
    asked: list[Any] = [_before(one) for one in group]
    said: list[Any] = [_after(one) for one in group]
    if not conversational:
        asked = [str(messages[-1]["content"]) if messages else "" for messages in asked]
        said = ["\n".join(str(message["content"]) for message in messages) for messages in said]
    found: dict[str, Any] = {
        "prompts": asked,
        "completions": said,
        "completion_ids": [[] if one.response_ids is None else list(map(int, one.response_ids)) for one in group],
        "task_id": [one.task_id for one in group],
    }
    for key in dict.fromkeys(key for one in group for key in one.metadata):
        found.setdefault(key, [one.metadata.get(key) for one in group])
    truths = [one.metadata.get("ground_truth") for one in group]
    found = dict.fromkeys(TRUTHS, truths) | found
    parameters = inspect.signature(function).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return found
    return {name: value for name, value in found.items() if name in parameters}


def _before(trajectory: Trajectory) -> list[dict[str, Any]]:
    messages = trajectory.messages or []
    first = next((i for i, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
    return messages[:first]


def _after(trajectory: Trajectory) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []
    for turn in trajectory.turns or ():
        said.append({"role": "assistant", "content": turn.action})
        if turn.observation:
            said.append({"role": "tool" if turn.tool_calls else "user", "content": turn.observation})
    return said


def _told(error: BaseException, function: Callable[..., Any]) -> str:
    file = getattr(sys.modules.get(function.__module__), "__file__", None)
    return f"{type(error).__name__}: {error}{place_of(error, file)}"


def place_of(error: BaseException, file: str | None = None) -> str:
    """Return ` (file.py:7)`, where an error was raised: the innermost line in a file, or of all; no folder is named."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if file is not None and frame.filename == file] or frames
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
