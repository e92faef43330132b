"""Stage `rollout`: a policy attempts tasks, and every token of it is written down.

`engines/task_order.py` says which tasks a step attempts, and `engines/rollout_parts.py`
plays them part by part. With dynamic sampling there are rounds of them, until enough
groups have spread in success.
"""

import contextlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanoskyrl.envs.base import Environment, Task, check_task
from nanoskyrl.envs.datasets import HUB
from nanoskyrl.envs.mixture import Mixture
from nanoskyrl.stages.core.checked import metadata_of
from nanoskyrl.stages.core.code import plugin_digests
from nanoskyrl.stages.core.config import plugin_config, row_settings, stage_config, to_plain
from nanoskyrl.stages.core.digests import digest_path, digest_text
from nanoskyrl.stages.core.executor import Executor
from nanoskyrl.stages.core.manifest import NUMBERS, Head, Manifest
from nanoskyrl.stages.core.metrics import MetricsLog, Stopwatch, Value, finite
from nanoskyrl.stages.core.output import open_output, part_files
from nanoskyrl.stages.core.registry import plugin_errors
from nanoskyrl.stages.core.shards import read_part, read_parts
from nanoskyrl.stages.core.storage import as_path
from nanoskyrl.stages.engines.base import Engine
from nanoskyrl.stages.engines.part_filler import PartFiller, Plan, make_environment, order_of
from nanoskyrl.stages.engines.rollout_config import RolloutConfig
from nanoskyrl.stages.engines.rollout_parts import (
    SUMMARY_COLUMNS,
    failed,
    in_parts,
    summary,
)
from nanoskyrl.stages.engines.task_order import drawn, tasks_in, weights_of
from nanoskyrl.stages.models.chat_template import check_tool_format
from nanoskyrl.stages.models.policy import policy_digest


def prepare(policy: Path | None, config: RolloutConfig, settings: dict[str, dict[str, Any]]) -> Plan:
    """Resolve names and tasks, and say what the output's manifest will.

    Raises:
        SettingsError, InputError: an unknown environment, engine or task, or too few tasks.
    """
    environment, tasks = environment_and_tasks(config, settings)
    return Plan(config, environment, tasks, head(policy, config, settings=settings))


def head(policy: Path | None, config: RolloutConfig, *, settings: dict[str, dict[str, Any]]) -> Head:
    """Return what is known of a rollout before it begins.

    Raises:
        SettingsError, InputError: an unknown environment or engine, or a file that is not there.
    """
    engine_config = plugin_config(settings, "engine", config.engine)
    check_tool_format(config.tool_format)
    described: dict[str, Any] = {"rollout": row_settings(config), config.engine: row_settings(engine_config)}
    inputs: dict[str, str] = {}
    names, plugins = weights_of(config.env), [config.tool_format]
    for name in names:
        env_config = plugin_config(settings, "env", name)
        plugins += [name, *getattr(env_config, "tools", ())]
        described[name] = row_settings(env_config)
        files = files_of(env_config)
        if config.split == "train":
            files.pop("test_data", None)  # it can change no row of this split
        inputs |= {key if len(names) == 1 else f"{name}.{key}": digest for key, digest in files.items()}
    described |= plugin_digests(*plugins)
    if config.dynamic_sampling:
        from nanoskyrl.stages.score import described_rewards  # it imports this module

        # Rewards decide how many rounds there are.
        described |= described_rewards(stage_config(settings, "score"), stage_config(settings, "judge"))
    inputs |= files_of(engine_config)
    return Head(stage="rollout", settings=described, inputs=inputs, policy=policy_digest(policy) if policy else None)


def environment_and_tasks(config: RolloutConfig, settings: dict[str, dict[str, Any]]) -> tuple[Environment, list[Task]]:
    """Return the environment of a rollout and the tasks that are attempted in it.

    Raises:
        SettingsError, InputError: an unknown environment or task, or too few tasks.
    """
    environment = make_environment(config.env, settings)
    return environment, tasks_of(environment, config)


def tasks_of(environment: Environment, config: RolloutConfig, sampling_round: int = 0) -> list[Task]:
    """Return the tasks of one round of a step.

    Raises:
        SettingsError, InputError: the environment gives none, an unknown one is asked for, or there are too few.
    """
    if not isinstance(environment, Mixture):
        return _tasks_of_one(environment, config, str(config.env), config.train_batch_size, sampling_round)
    names, before = drawn(
        weights_of(config.env), config.seed, config.split, config.step, config.train_batch_size
    )  # fmt: skip
    chosen = {
        name: iter(_tasks_of_one(environment.environments[name], config, name, count, sampling_round, before[name]))
        for name, count in Counter(names).items()
    }
    return [replace(next(chosen[name]), env=name) for name in names]


def _tasks_of_one(
    environment: Environment,
    config: RolloutConfig,
    name: str,
    count: int,
    sampling_round: int,
    start: int | None = None,
) -> list[Task]:
    with plugin_errors(f"environment `{name}`"):
        tasks = tasks_in(environment, config.split)
        chosen = order_of(config, name).choose(tasks, count, config.tasks, sampling_round, start)
        for task in chosen:
            check_task(task)
    return chosen


def files_of(config: Any) -> dict[str, str]:
    """Return the digest of every file that the settings name."""
    # What the hub holds under a name is known by its revision, which is part of the name.
    return {
        key: digest_text(value) if value.startswith(HUB) else digest_path(as_path(value))
        for key, value in to_plain(config).items()
        if key in metadata_of(type(config), "file") and value is not None
    }


def rollout(
    policy: Path | None,
    output: Path,
    config: RolloutConfig,
    *,
    settings: dict[str, dict[str, Any]] | None = None,
    engine: Engine | None = None,
    executor: Executor | None = None,
    force: bool = False,
    log: MetricsLog = MetricsLog(),
) -> Manifest:
    """Attempt a step's tasks with a policy and write the trajectories.

    Args:
        policy: A policy's directory; None for engines that need none.
        output: Directory for the shards.
        config: What to attempt and how to sample.
        settings: Tables of the environment and the engine.
        engine: One that is up already; else it is made here. It is given this policy.
        executor: Makes the parts elsewhere, with engines of its own.
        force: Replace an output made under other settings.
        log: Where numbers go.

    Raises:
        NanoskyrlError: bad settings or input, an output in the way, or an engine that cannot start.
    """
    from nanoskyrl.stages.score import groups_with_signal, scoring  # it imports this module

    settings = settings or {}
    watch = Stopwatch()
    plan = prepare(policy, config, settings)
    with open_output(output, plan.head, force=force, dropped=failed) as out:
        if out.manifest is not None:
            return out.manifest
        tasks, rounds, index, spread = plan.tasks, 0, 0, 0
        filler = PartFiller(out, plan, policy, settings, engine, watch, executor)
        scorer, threads = None, 1
        if config.dynamic_sampling:  # what `score` will judge by
            scorer, threads = scoring(stage_config(settings, "score"), plan.environment, settings)
        with contextlib.closing(filler):
            while True:
                parts = in_parts(tasks, config.rows_per_part, config.n_samples_per_prompt, index)
                filler.fill(parts, sampling_round=rounds)
                if scorer is not None:
                    with watch("score"):
                        spread += sum(groups_with_signal(output, part, scorer, threads) for part in parts)
                index += len(parts)
                rounds += 1
                if scorer is None or spread >= len(plan.tasks) or rounds >= config.max_sample_batches:
                    break
                tasks = tasks_of(plan.environment, config, rounds)
            engine_numbers = filler.facts()
        facts = {"rounds": rounds, "groups_with_spread": spread} if config.dynamic_sampling else {}
        with watch("summary"):
            numbers = summary(read_part(path, columns=SUMMARY_COLUMNS) for path in part_files(output))
        with watch("write"):
            manifest = out.finish(
                rows_in=rounds * len(plan.tasks) * config.n_samples_per_prompt,
                facts={**facts, NUMBERS: finite(numbers)},
            )
    numbers |= {f"rollout/engine/{key}": value for key, value in engine_numbers.items()}
    log.write("rollout", {**numbers, **{f"rollout/{key}": value for key, value in facts.items()}, **watch.timings()})
    return manifest


def numbers_of(output: Path, manifest: Manifest) -> dict[str, Value]:
    """Return the numbers of a finished rollout, from its manifest where it has them."""
    return manifest.facts.get(NUMBERS) or summary(read_parts(output, manifest, SUMMARY_COLUMNS))
