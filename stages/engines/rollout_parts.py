"""Parts of a rollout: whole groups of attempts, played together, and the numbers of what came of them.

A part is written when all of its attempts have ended, so a killed rollout resumes at the
next one and ends with the same bytes.
"""

# pyarrow makes the functions of pyarrow.compute at import, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from nanoskyrl.envs.base import Environment, Task
from nanoskyrl.envs.graders.kinds import UNANSWERED
from nanoskyrl.envs.memory import Memory
from nanoskyrl.stages.core.at_once import AtOnce
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.metrics import Stopwatch, Value, mean
from nanoskyrl.stages.core.rows import calls_to_json
from nanoskyrl.stages.core.trajectory import Trajectory
from nanoskyrl.stages.engines.base import AsyncEngine, Engine, SamplingParams, TokenEngine
from nanoskyrl.stages.engines.concurrent_turns import play_concurrently, threads_for
from nanoskyrl.stages.engines.listening import Listener
from nanoskyrl.stages.engines.turns import Attempt, Identity, TurnLimits, play
from nanoskyrl.stages.models.chat_template import AUTO
from nanoskyrl.stages.models.rendering import Renderer

SUMMARY_COLUMNS = ("stop_reason", "completion_tokens", "turns")


def in_parts(tasks: Sequence[Task], rows_per_part: int, n_samples: int, first: int = 0) -> dict[int, Sequence[Task]]:
    """Return the tasks of each part by its index, which begins at first: whole groups, of at least so many rows."""
    groups = -(-rows_per_part // n_samples)
    return {first + start // groups: tasks[start : start + groups] for start in range(0, len(tasks), groups)}


def load_policy(engine: Engine, policy: Path | None, name: str, watch: Stopwatch) -> None:
    """Give a policy to an engine that takes one.

    Raises:
        SettingsError: there is none, and the engine of this name needs one.
    """
    if isinstance(engine, TokenEngine):
        if policy is None:
            raise SettingsError(f"engine `{name}` needs a policy", hint="Name one with `--policy`")
        with watch("load"):
            engine.load(policy)


def play_parts(
    parts: Mapping[int, Sequence[tuple[Task, Identity]]],
    environment: Environment,
    engine: Engine,
    sampling: SamplingParams,
    limits: TurnLimits,
    watch: Stopwatch,
    *,
    memory: Memory,
    trajectory_mode: str,
    tool_format: str = AUTO,
    template_arguments: Mapping[str, Any] | None = None,
    concurrency: int = 1,
) -> Iterator[tuple[int, list[Trajectory]]]:
    """Yield each part's index and trajectories, group after group; an asynchronous engine may end a later one first.

    Args:
        parts: The attempts of each.
        environment: What the tasks are of.
        engine: One that holds its policy.
        sampling: How tokens are drawn.
        limits: Where an attempt is cut off, if the engine's context does not end before.
        watch: Where time is noted.
        memory: What later prompts show of earlier turns.
        trajectory_mode: whole (a row an attempt), step (a row a turn), or auto.
        tool_format: How calls are read; auto: as the policy's template writes them.
        template_arguments: What the chat template is given beside the messages.
        concurrency: Episodes that step at once, where the environment allows it.
    """
    stepwise = trajectory_mode == "step"
    speech: Renderer | Listener
    if isinstance(engine, TokenEngine):
        limits = replace(
            limits,
            max_input_length=min(limits.max_input_length, engine.context_length),
            max_sequence_length=min(limits.max_sequence_length, engine.context_length),
        )
        speech = engine.renderer.under(template_arguments or {}, tool_format)
        stepwise |= trajectory_mode == "auto" and (memory.kind != "full" or not speech.keeps_prefix)
    else:
        speech = Listener(tool_format, template_arguments)
    begins = {
        index: [
            partial(
                Attempt, *whose, environment, engine, sampling, limits, stepwise=stepwise, memory=memory, speech=speech
            )
            for whose in attempts
        ]
        for index, attempts in parts.items()
    }
    threads = threads_for(environment, concurrency)
    if isinstance(engine, AsyncEngine):
        names = list(begins)
        done = play_concurrently(list(begins.values()), engine, sampling, watch, threads=threads)
        for place, attempts in done:
            yield names[place], [row for attempt in attempts for row in attempt.rows()]
        return
    starting, stepping = AtOnce(threads), AtOnce(threads)
    for index, begin in begins.items():
        with watch("env"):
            attempts = starting.map(lambda make: make(), begin)
        play(attempts, engine, sampling, watch, stepping)
        yield index, [row for attempt in attempts for row in attempt.rows()]


def failed(table: pa.Table) -> dict[str, int]:
    """Return how many rows failed, if any."""
    count = sum(status == "failed" for status in table.column("status").to_pylist())
    return {"failed": count} if count else {}


def summary(tables: Iterator[pa.Table]) -> dict[str, Value]:
    """Return the numbers of a rollout: counts, lengths, turns, and how the attempts ended."""
    reasons: Counter[str] = Counter()
    rows, tokens, turns, calls = 0, [], [], 0
    no_calls = {calls_to_json([]), calls_to_json([UNANSWERED])}
    for table in tables:
        reasons.update(table.column("stop_reason").to_pylist())
        rows += table.num_rows
        tokens += [count for count in table.column("completion_tokens").to_pylist() if count is not None]
        turns += pc.list_value_length(table.column("turns")).to_pylist()
        flat = table.column("turns").combine_chunks().flatten()
        calls += sum(text not in no_calls for text in flat.field("tool_calls").to_pylist())
    return {
        "rollout/rows": rows,
        "rollout/response_tokens/mean": mean(tokens),
        "rollout/response_tokens/total": sum(tokens) if tokens else None,
        "rollout/turns/mean": mean(turns),
        "rollout/turns_with_tool_calls": calls,
        **{f"rollout/stop_reason/{reason}": count for reason, count in sorted(reasons.items())},
    }
