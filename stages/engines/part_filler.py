"""The parts of a rollout that are missing: played here with an engine, or by workers elsewhere.

Either way a part is what `run_parts` makes of its tasks, so its bytes do not depend on who made it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from nanoskyrl.envs.base import Environment, Task
from nanoskyrl.envs.memory import Memory
from nanoskyrl.envs.mixture import Mixture
from nanoskyrl.stages.core.at_once import AtOnce
from nanoskyrl.stages.core.config import plugin_config
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.executor import Executor, Job, Maker
from nanoskyrl.stages.core.manifest import Head
from nanoskyrl.stages.core.metrics import Stopwatch
from nanoskyrl.stages.core.output import Count, Output, Written, commit_part
from nanoskyrl.stages.core.registry import lookup, plugin_errors
from nanoskyrl.stages.core.rows import to_table
from nanoskyrl.stages.core.trajectory import Trajectory
from nanoskyrl.stages.engines.base import AsyncEngine, Engine, SamplingParams, TokenEngine, make_engine
from nanoskyrl.stages.engines.concurrent_turns import play_concurrently, threads_for
from nanoskyrl.stages.engines.listening import Listener
from nanoskyrl.stages.engines.rollout_config import NO_LIMIT, RolloutConfig
from nanoskyrl.stages.engines.rollout_parts import load_policy
from nanoskyrl.stages.engines.task_order import TaskOrder, weights_of
from nanoskyrl.stages.engines.turns import Attempt, TurnLimits, play
from nanoskyrl.stages.models.rendering import Renderer


@dataclass(frozen=True, slots=True)
class Plan:
    """A rollout ready to run: everything but the generating."""

    config: RolloutConfig
    environment: Environment
    tasks: Sequence[Task]
    head: Head


def make_environment(env: str | Mapping[str, float], settings: Mapping[str, Mapping[str, Any]]) -> Environment:
    """Return the environment of `rollout.env`, or a mixture of several.

    Raises:
        SettingsError, InputError: an unknown one, or its settings or files cannot be used.
    """
    made: dict[str, Environment] = {}
    for name in weights_of(env):
        with plugin_errors(f"environment `{name}`"):
            made[name] = lookup("env", name)(plugin_config(settings, "env", name))
    return made[env] if isinstance(env, str) else Mixture(made)


def order_of(config: RolloutConfig, env: str) -> TaskOrder:
    """Return what the tasks and seeds of an environment follow from."""
    return TaskOrder(seed=config.seed, step=config.step, env=env, split=config.split)


TableOf = Callable[[Environment, list[Trajectory]], pa.Table | list[str]]
"""Makes the table of a part, or says why it is left out."""


def as_they_are(environment: Environment, rows: list[Trajectory]) -> pa.Table:
    """Return the table of trajectories."""
    return to_table(rows)


class PartFiller:
    """Writes the parts of a rollout that are missing, with an engine that is brought to the policy for the first."""

    def __init__(
        self, out: Output, plan: Plan, policy: Path | None, settings: dict[str, dict[str, Any]], engine: Engine | None,
        watch: Stopwatch, executor: Executor | None = None,
    ) -> None:  # fmt: skip
        """Start nothing.

        Args:
            out: Where the parts go.
            plan: What is attempted.
            policy: Who attempts it; None for engines that need none.
            settings: The engine's table.
            engine: One that is up; None: it is made when it is needed, and closed in the end.
            watch: Where time is noted.
            executor: Makes the parts elsewhere, with engines of its own.
        """
        self.out, self.plan, self.policy, self.settings, self.watch = out, plan, policy, settings, watch
        self.engine, self._made, self.executor = engine, engine is None, executor

    def fill(
        self,
        parts: Mapping[int, Sequence[Task]],
        table_of: TableOf = as_they_are,
        *,
        sampling_round: int = 0,
        journal: Path | None = None,
    ) -> list[str]:
        """Write those that are missing, and return why some were left out.

        Args:
            parts: The tasks of each.
            table_of: Makes the table of a part.
            sampling_round: Of dynamic sampling.
            journal: Where the engine keeps replies until their part is written, if it can and is here.
        """
        missing = {index: tasks for index, tasks in parts.items() if not self.out.has_part(index)}
        if not missing:
            return []
        name = self.plan.config.engine
        if self.executor is not None:
            with self.watch("generate"):
                return self.executor.fill(self.out, self._job(table_of, sampling_round), missing.items())
        if self.engine is None:
            self.engine = make_engine(name, plugin_config(self.settings, "engine", name))
        load_policy(self.engine, self.policy, name, self.watch)
        self.engine.keep_replies(journal)
        left: list[str] = []
        for index, rows in run_parts(self.plan, missing, self.engine, self.policy, self.watch, sampling_round):
            with self.watch("score" if table_of is not as_they_are else "write"):
                table = table_of(self.plan.environment, rows)
            if isinstance(table, list):
                left += table
            else:
                with self.watch("write"):
                    self.out.write_part(index, table)
        return left

    def _job(self, table_of: TableOf, sampling_round: int) -> Job:
        name = self.plan.config.engine
        return Job(
            begin=begin_parts, engine=(name, plugin_config(self.settings, "engine", name)),
            arguments={
                "config": self.plan.config, "head": self.plan.head, "settings": self.settings,
                "policy": self.policy and self.policy.absolute(), "output": self.out.directory.absolute(),
                "dropped": self.out.dropped, "table_of": table_of, "sampling_round": sampling_round,
            },
        )  # fmt: skip

    def facts(self) -> Mapping[str, float | int | str | None]:
        """Return the engine's numbers, or those of the workers."""
        if self.executor is not None:
            return self.executor.facts()
        return self.engine.facts() if self.engine is not None else {}

    def close(self) -> None:
        """Close an engine that was made here."""
        if self._made and self.engine is not None:
            self.engine.close()


def begin_parts(
    *,
    config: RolloutConfig,
    head: Head,
    settings: dict[str, dict[str, Any]],
    policy: Path | None,
    output: Path,
    dropped: Count | None,
    table_of: TableOf,
    sampling_round: int,
    engine: Engine,
) -> Maker:
    """Return what plays the tasks of a part and commits it, in a worker."""
    environment = make_environment(config.env, settings)
    plan, watch = Plan(config, environment, (), head), Stopwatch()
    load_policy(engine, policy, config.engine, watch)

    def make(index: int, tasks: Sequence[Task]) -> Written | list[str]:
        ((_, rows),) = run_parts(plan, {index: tasks}, engine, policy, watch, sampling_round)
        table = table_of(environment, rows)
        return table if isinstance(table, list) else commit_part(output, index, table, dropped)

    return make


def run_parts(
    plan: Plan,
    parts: Mapping[int, Sequence[Task]],
    engine: Engine,
    policy: Path | None,
    watch: Stopwatch,
    sampling_round: int = 0,
) -> Iterator[tuple[int, list[Trajectory]]]:
    """Yield each part's index and trajectories, group after group; an asynchronous engine may end a later one first.

    Raises:
        SettingsError: the engine takes no stop strings, and there are some.
    """
    config, environment = plan.config, plan.environment
    if config.stop_strings and not engine.takes_stop_strings:
        raise SettingsError(
            f"engine `{config.engine}` takes no `rollout.stop_strings`",
            hint="Leave them out, or use engine hf or openai",
        )
    memory = Memory(kind=config.memory, turns=config.memory_turns)
    speech: Renderer | Listener
    stepwise, context = config.trajectory_mode == "step", NO_LIMIT
    if isinstance(engine, TokenEngine):
        context, speech = engine.context_length, engine.renderer.under(config.chat_template_kwargs, config.tool_format)
        stepwise |= config.trajectory_mode == "auto" and (memory.kind != "full" or not speech.keeps_prefix)
    else:
        speech = Listener(config.tool_format, config.chat_template_kwargs)
    sampling = SamplingParams(
        temperature=config.temperature, top_p=config.top_p, top_k=config.top_k, logprobs_mode=config.logprobs_mode,
        stop_strings=config.stop_strings,
    )  # fmt: skip
    limits = TurnLimits(
        max_turns=config.max_turns, max_generate_length=config.max_generate_length,
        max_input_length=min(config.max_input_length or context, context),
        max_sequence_length=min(config.max_sequence_length or context, context),
    )  # fmt: skip
    begins = {
        index: [
            partial(
                Attempt, task, identity, environment, engine, sampling, limits, stepwise=stepwise, memory=memory,
                speech=speech,
            )
            for task in tasks
            for identity in order_of(config, task.env or str(config.env)).identities(
                task, config.n_samples_per_prompt, policy, plan.head.policy, sampling_round
            )
        ]
        for index, tasks in parts.items()
    }  # fmt: skip

    def rows_of(attempts: Sequence[Attempt]) -> list[Trajectory]:
        with watch("rows"):
            return [row for attempt in attempts for row in attempt.rows()]

    threads = threads_for(environment, config.concurrency)
    if isinstance(engine, AsyncEngine):
        names = list(begins)
        for place, attempts in play_concurrently(list(begins.values()), engine, sampling, watch, threads=threads):
            yield names[place], rows_of(attempts)
        return
    starting, stepping = AtOnce(threads), AtOnce(threads)
    for index, begin in begins.items():
        with watch("env"):
            attempts = starting.map(lambda make: make(), begin)
        play(attempts, engine, sampling, watch, stepping)
        yield index, rows_of(attempts)
