"""Engine `scripted`: actions from an environment's expert or from a file.

For tests, demonstrations and upper bounds. It knows no tokens, so its trajectories are
untrainable.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nanoskyrl.envs.base import Environment, Task
from nanoskyrl.stages.core.checked import FILE, Checked
from nanoskyrl.stages.core.errors import InputError, told_as
from nanoskyrl.stages.core.storage import read_named
from nanoskyrl.stages.engines.base import TextEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedConfig(Checked):
    """Where the actions come from."""

    actions: str | None = field(default=None, metadata=FILE)
    """A JSONL file of `task_id` and `actions` (a list of texts); without it the environment's expert acts."""


class ScriptedEngine(TextEngine):
    """Writes what it was given; nothing, once that is used up."""

    Config = ScriptedConfig

    def __init__(self, config: ScriptedConfig) -> None:
        """Read the file, if there is one."""
        self._scripts = _read_scripts(config.actions) if config.actions else None

    def reply(self, environment: Environment, task: Task, turn: int) -> str:
        """Return the action of this turn."""
        script: Sequence[str] = (
            environment.expert(task) if self._scripts is None else self._scripts.get(task.task_id, ())
        )
        return script[turn] if turn < len(script) else ""


def _read_scripts(name: str) -> dict[str, list[str]]:
    text = read_named(name, "file of actions", "Write JSON lines of task_id and actions")
    scripts: dict[str, list[str]] = {}
    lines = ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
    for number, line in lines:
        with told_as(
            InputError,
            f"line {number} of `{name}` has no task_id and actions",
            ValueError,
            KeyError,
            TypeError,
            hint="Write one JSON object a line",
        ):
            row: dict[str, Any] = json.loads(line)
            scripts[str(row["task_id"])] = [str(action) for action in row["actions"]]
    return scripts
