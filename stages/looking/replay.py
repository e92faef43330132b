"""Recorded actions through the environment again: what no longer matches."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nanoskyrl.envs.base import Environment, Step, Task
from nanoskyrl.envs.graders.verdicts import ENV_REWARD
from nanoskyrl.envs.messages import tidy_messages
from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.core.manifest import differences
from nanoskyrl.stages.core.rows import calls_to_json, clean_text, from_table, to_json
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.trajectory import Trajectory, Turn
from nanoskyrl.stages.engines.rollout_config import RolloutConfig
from nanoskyrl.stages.engines.turns import FAILURES
from nanoskyrl.stages.looking.database import finished_outputs
from nanoskyrl.stages.looking.diff_columns import shown
from nanoskyrl.stages.looking.find_rows import located_rows, whole_rows
from nanoskyrl.stages.rollout import make_environment, tasks_of
from nanoskyrl.stages.running.run_settings import settings_for

CUT_OFF = ("length", "max_sequence_length", "error")
"""Reasons to stop after which the environment may not have been asked to act on the last turn."""


@dataclass(slots=True)
class Replay:
    """What came of playing a trajectory again."""

    trajectory_id: str
    turns: int = 0
    """That were played."""
    differences: list[str] = field(default_factory=list)
    """Where it is, what was recorded, and what comes now."""

    def note(self, place: str, then: Any, now: Any) -> None:
        """Note each place where two values differ."""
        for name, a, b in differences(_plain(then), _plain(now)):
            self.differences.append(f"{place}{f' {name}' if name else ''}: {shown(a)} -> {shown(b)}")


def replay(run: Run, start: str) -> Replay:
    """Play the recorded actions of a trajectory in its environment again.

    The environment has the settings that the rollout recorded, and those of the run for what is not recorded, such as
    paths. Nothing is sampled, and nothing is written.

    Args:
        run: Its run.
        start: Of its id, any that is unique; or its task, if that has one attempt.

    Raises:
        InputError: there is no such trajectory, or several.
        SettingsError: the environment or the task is not there any more.
    """
    rows, step = _find(run, start)
    last = rows[-1]
    settings = {
        output.directory.name: output.manifest.settings for output in finished_outputs(run.root) if output.step == step
    }
    environment, task = _environment(run, last, settings.get("rollout", {}))
    found = Replay(last.trajectory_id)
    metadata = _play(environment, task, rows, found)
    if metadata is None:
        return found
    found.note("metadata", last.metadata, metadata)
    rewards = settings.get("score", {}).get("score", {}).get("rewards")
    if last.score_status == "scored" and rewards == {ENV_REWARD: 1.0}:
        try:
            verdict = environment.score(replace(last, metadata=metadata))
        except FAILURES as error:
            found.differences.append(f"score: now raises {type(error).__name__}: {shown(str(error))}")
            return found
        then = {"reward": last.reward, "success": last.success}
        found.note("score", then, {"reward": verdict.reward, "success": verdict.success})
    return found


def _find(run: Run, start: str) -> tuple[list[Trajectory], int | None]:
    """Return the rows of a trajectory, in order, and its step."""
    sources, found = located_rows(run.root, start)
    ids = sorted(set(found.column("trajectory_id").to_pylist()))
    if len(ids) > 1:
        raise InputError(f"`{start}` has {len(ids)} attempts: {', '.join(ids[:3])}", hint="Name one by its id")
    rows = from_table(whole_rows(sources, found))
    return sorted(rows, key=lambda row: row.step_index), found.column("step")[0].as_py()


def _environment(run: Run, row: Trajectory, recorded: Mapping[str, Any]) -> tuple[Environment, Task]:
    """Return the environment of a row with the settings that its rollout recorded, and its task."""
    of_env = {row.env: recorded[row.env]} if row.env in recorded else {}
    environment = make_environment(row.env, merge(settings_for(run), of_env))
    config = RolloutConfig(env=row.env, split=row.split, tasks=(row.task_id,), train_batch_size=1)  # pyright: ignore[reportArgumentType]
    return environment, tasks_of(environment, config)[0]


def _play(environment: Environment, task: Task, rows: list[Trajectory], found: Replay) -> dict[str, Any] | None:
    """Play all turns, noting what differs; return the metadata at the end, or None where something was raised."""
    last = rows[-1]
    episode = environment.start()
    place = "reset"
    try:
        observation = episode.reset(task, last.seed)
        metadata = {**task.metadata, **observation.metadata}
        first = tidy_messages(observation.messages, pictures=True)
        found.note("first messages", rows[0].messages[: len(first)], first)
        turns = [turn for row in rows for turn in row.turns]
        for number, turn in enumerate(turns):
            if (
                number == len(turns) - 1
                and last.stop_reason in CUT_OFF
                and not turn.observation
                and not turn.tool_calls
            ):
                break
            place = f"turn {number}"
            step = episode.step(turn.action)
            metadata |= step.metadata
            found.turns += 1
            found.note(place, _seen(turn, turn.observation), _seen(step, clean_text(step.observation)))
            if step.done and number < len(turns) - 1:
                found.differences.append(f"{place}: the episode ends, and {len(turns) - 1 - number} turns are left")
                break
        place = "close"
        return metadata | (episode.close() or {})
    except FAILURES as error:  # whatever an environment raises is what is looked for here
        found.differences.append(f"{place}: now raises {type(error).__name__}: {shown(str(error))}")
        return None


def _seen(turn: Turn | Step, observation: str) -> dict[str, Any]:
    """Return what a turn came to, with its observation as the table keeps it."""
    calls = {str(number): call for number, call in enumerate(json.loads(calls_to_json(turn.tool_calls)))}
    return {"observation": observation, "reward": turn.reward, "done": turn.done, "calls": calls}


def _plain(value: Any) -> Any:
    """Return a value as the table keeps it."""
    return json.loads(to_json(value))


def lines(found: Replay) -> Iterator[str]:
    """Yield what differs, and what was played."""
    yield from found.differences
    count = len(found.differences)
    yield f"{found.trajectory_id}: {found.turns} turns played again, {count} difference{'s' * (count != 1)}"
