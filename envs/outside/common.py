"""What environments made by others have in common: how they are found, and how their word becomes a score."""

import importlib
import json
from types import ModuleType
from typing import Any

from nanoskyrl.envs.base import Score
from nanoskyrl.stages.core.errors import SettingsError, told_as
from nanoskyrl.stages.core.rows import clean_text
from nanoskyrl.stages.core.trajectory import Trajectory


def need(module: str, extra: str) -> ModuleType:
    """Import and return a module of an extra.

    Raises:
        SettingsError: it is not installed.
    """
    with told_as(
        SettingsError,
        f"environment `{extra}` needs the package of `{module}`",
        ImportError,
        hint=f"Run `pip install 'nanoskyrl[{extra}]'`",
    ):
        return importlib.import_module(module)


def no_expert(env: str) -> SettingsError:
    """Return the error for a world that nobody here knows how to solve."""
    return SettingsError(
        f"{env} has no expert for this task",
        hint="Give its actions to the engine with `--set scripted.actions=FILE.jsonl`",
    )


def returned(trajectory: Trajectory, success_at: float) -> Score:
    """Return the sum of the rewards that the environment gave turn by turn; success is to reach `success_at`.

    None where an episode ended by itself and nobody ever gave a reward: that is no verdict. An
    episode that was cut off before there was one earned nothing.
    """
    given = [turn.reward for turn in trajectory.turns if turn.reward is not None]
    if not given and trajectory.status == "completed":
        return Score(reward=None)
    total = float(sum(given))
    return Score(reward=total, success=total >= success_at, parts={"return": total})


def json_ready(value: Any) -> Any:
    """Return a value as JSON can hold it; what it cannot hold becomes its text."""
    return json.loads(json.dumps(value, default=str))


def sendable(value: Any) -> Any:
    """Return a value of JSON as UTF-8 can hold it: a lone surrogate would break the connection, not the call."""
    return json.loads(clean_text(json.dumps(value, ensure_ascii=False)))
