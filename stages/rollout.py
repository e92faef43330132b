"""Stage `rollout`: a policy attempts tasks, and every token of it is written down.

`engines/task_order.py` says which tasks a step attempts, and `engines/rollout_parts.py`
plays them part by part. With dynamic sampling there are rounds of them, until enough
groups have spread in success.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoskyrl.envs.base import Environment, Task, check_task
from nanoskyrl.envs.datasets import HUB
from nanoskyrl.envs.memory import KINDS as MEMORIES, Memory
from nanoskyrl.stages.core.code import plugin_digests
from nanoskyrl.stages.core.config import plugin_config, stage_config, to_plain
from nanoskyrl.stages.core.digests import digest_file, digest_text
from nanoskyrl.stages.core.errors import SettingsError, check_numbers, check_words
from nanoskyrl.stages.core.manifest import Head, Manifest
from nanoskyrl.stages.core.metrics import MetricsLog, Stopwatch
from nanoskyrl.stages.core.output import open_output
from nanoskyrl.stages.core.registry import lookup, plugin_errors
from nanoskyrl.stages.core.rows import from_table, to_table
from nanoskyrl.stages.core.shards import part_name, read_part, read_parts
from nanoskyrl.stages.core.storage import as_path
from nanoskyrl.stages.core.trajectory import LOGPROBS_MODES, SPLITS, Trajectory
from nanoskyrl.stages.engines.base import AsyncEngine, Engine, SamplingParams, make_engine
from nanoskyrl.stages.engines.rollout_parts import (
    SUMMARY_COLUMNS,
    failed,
    in_parts,
    load_policy,
    play_parts,
    summary,
)
from nanoskyrl.stages.engines.task_order import TaskOrder, tasks_in
from nanoskyrl.stages.engines.turns import TurnLimits
from nanoskyrl.stages.models.chat_template import check_tool_format
from nanoskyrl.stages.models.policy import policy_digest

if TYPE_CHECKING:
    from nanoskyrl.stages.score import Scorer

NOT_IN_MANIFEST = ("device", "data", "test_data", "actions", "corpus", "prompt", "judge_prompt", "shots_data")
"""Settings that say where to run or where a file lies; files appear by digest, as inputs."""
FILES = ("data", "test_data", "actions", "corpus", "prompt", "judge_prompt", "shots_data")
LEAST_TEMPERATURE, LEAST_TOP_P = 1e-3, 1e-6
"""Below these, float32 can no longer tell the logits apart."""
ROWS_PER_PART = 512
TEMPLATE_OWN = (
    "conversation", "messages", "tools", "chat_template", "add_generation_prompt", "tokenize", "continue_final_message",
    "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
)  # fmt: skip
"""Arguments of transformers' `apply_chat_template` that are no template's."""
TRAJECTORY_MODES = ("auto", "whole", "step")
NO_LIMIT = 1 << 30
"""Tokens; the engine's context ends before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """What is attempted, how often, and how it is sampled."""

    env: str = "text_math"
    """Name of the environment; its settings stand in the table of that name."""
    split: str = "train"
    """train or test."""
    engine: str = "hf"
    """hf, vllm, openai or scripted; its settings stand in the table of that name."""
    step: int = 0
    """Which step of the run this is: moves the cursor over the tasks, and the seeds."""
    seed: int = 0
    """The run's seed."""
    train_batch_size: int = 16
    """Prompts in a step."""
    n_samples_per_prompt: int = 16
    """Attempts at each prompt; together they are a group."""
    tasks: tuple[str, ...] = ()
    """Attempt exactly these task ids, in this order, in place of the next of the permutation."""
    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus mass; below 1, `train` refuses the rows."""
    top_k: int = 0
    """Candidates; 0 is off. If on, `train` refuses the rows."""
    logprobs_mode: str = "processed"
    """processed (of the distribution drawn from), raw, or recomputed (left null)."""
    max_turns: int = 8
    """Turns of an attempt."""
    max_generate_length: int = 512
    """Tokens sampled in one turn."""
    max_input_length: int | None = None
    """Longest prompt of a turn in tokens; None: the model's context."""
    max_sequence_length: int | None = None
    """Prompt and response together in tokens; None: the model's context."""
    trajectory_mode: str = "auto"
    """whole (a row an attempt), step (a row a turn), or auto: whole unless the chat template rewrites earlier turns."""
    memory: str = "full"
    """What later prompts show of earlier turns: full, last_turns, or summary, the environment's with the last turns."""
    memory_turns: int = 4
    """Turns that `last_turns` and `summary` show."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a turn as soon as they are written, such as </tool_call>; on engines hf, vllm and openai."""
    tool_format: str = "auto"
    """How a policy's calls of tools are read: auto (as its chat template writes them), a name of `skyrl list
    tool_format`, or module:attribute."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """What the chat template is given beside the messages, such as {enable_thinking = false}; values may be tables."""
    rows_per_part: int = ROWS_PER_PART
    """Trajectories in a part, rounded up to whole groups; in a benchmark 16 unless it is set."""
    dynamic_sampling: bool | None = None
    """Sample in rounds until train_batch_size groups have spread in success; None: with dapo."""
    max_sample_batches: int = 30
    """Rounds of dynamic sampling after which it goes on with what there is."""

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be meant."""
        check_numbers(
            "rollout", self, "train_batch_size", "n_samples_per_prompt", "max_turns", "max_generate_length",
            "rows_per_part", "max_sample_batches", "memory_turns", least=1,
        )  # fmt: skip
        check_numbers(
            "rollout", self, "max_input_length", "max_sequence_length", least=1,
            hint="Leave it out for the model's context",
        )  # fmt: skip
        check_numbers("rollout", self, "step", least=0, hint="Steps count from 0")
        check_numbers("rollout", self, "temperature", least=0, hint="0 is greedy, 1 samples as the model says")
        check_numbers("rollout", self, "top_p", least=LEAST_TOP_P, most=1, hint="1 is off")
        check_numbers("rollout", self, "top_k", least=0, most=2**31 - 1, hint="0 is off")
        if twice := [task for task, count in Counter(self.tasks).items() if count > 1]:
            raise SettingsError(
                f"`rollout.tasks` names `{twice[0]}` twice", hint="More attempts at a task are `--n-samples-per-prompt`"
            )
        if 0 < self.temperature < LEAST_TEMPERATURE or self.temperature == float("inf"):
            raise SettingsError(
                f"`rollout.temperature` must be 0 or {LEAST_TEMPERATURE} to a finite number, not {self.temperature}",
                hint="0 is greedy",
            )
        if self.dynamic_sampling and self.n_samples_per_prompt < 2:
            raise SettingsError(
                "`rollout.dynamic_sampling` looks for spread, and `rollout.n_samples_per_prompt` is 1",
                hint="Give it at least 2, or set `rollout.dynamic_sampling = false`",
            )
        check_words(
            "rollout",
            self,
            split=SPLITS,
            logprobs_mode=LOGPROBS_MODES,
            trajectory_mode=TRAJECTORY_MODES,
            memory=MEMORIES,
        )
        if self.memory != "full" and self.trajectory_mode == "whole":
            raise SettingsError(
                f"`rollout.memory` is {self.memory}, so a prompt does not begin with the one before",
                hint="Leave `rollout.trajectory_mode` at auto, or set it to step",
            )
        check_template_arguments("rollout", self.chat_template_kwargs)
        if not all(self.stop_strings):
            raise SettingsError("`rollout.stop_strings` holds an empty text", hint="Leave it out")


def check_template_arguments(table: str, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of a chat template that are ours to give, and those that no file of settings can hold.

    Raises:
        SettingsError: names the first.
    """
    for name, value in arguments.items():
        if _has_null(value):
            raise SettingsError(f"`{table}.chat_template_kwargs` has a null in `{name}`", hint="Leave it out")
        if name in TEMPLATE_OWN:
            raise SettingsError(
                f"`{table}.chat_template_kwargs` has `{name}`, which follows from the conversation", hint="Leave it out"
            )


def _has_null(value: Any) -> bool:
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return value is None or any(map(_has_null, inside))


@dataclass(frozen=True, slots=True)
class Plan:
    """A rollout ready to run: everything but the generating."""

    config: RolloutConfig
    environment: Environment
    tasks: Sequence[Task]
    head: Head


def prepare(policy: Path | None, config: RolloutConfig, settings: dict[str, dict[str, Any]]) -> Plan:
    """Resolve names and tasks, and say what the output's manifest will.

    Raises:
        SettingsError, InputError: an unknown environment, engine or task, or too few tasks.
    """
    environment, tasks = environment_and_tasks(config, settings)
    engine_config = plugin_config(settings, "engine", config.engine)
    env_config = plugin_config(settings, "env", config.env)
    check_tool_format(config.tool_format)
    described = {
        **plugin_digests(config.env, config.tool_format, *getattr(env_config, "tools", ())),
        "rollout": to_plain(config),
        config.env: without_places(env_config),
        config.engine: without_places(engine_config),
    }
    if config.dynamic_sampling:
        from nanoskyrl.stages.score import described_rewards  # it imports this module

        # Rewards decide how many rounds there are.
        described |= described_rewards(stage_config(settings, "score"), stage_config(settings, "judge"))
    inputs = {**files_of(env_config), **files_of(engine_config)}
    if config.split == "train":
        inputs.pop("test_data", None)  # it can change no row of this split
    head = Head(stage="rollout", settings=described, inputs=inputs, policy=policy_digest(policy) if policy else None)
    return Plan(config, environment, tasks, head)


def environment_and_tasks(config: RolloutConfig, settings: dict[str, dict[str, Any]]) -> tuple[Environment, list[Task]]:
    """Return the environment of a rollout and the tasks that are attempted in it.

    Raises:
        SettingsError, InputError: an unknown environment or task, or too few tasks.
    """
    with plugin_errors(f"environment `{config.env}`"):
        environment = lookup("env", config.env)(plugin_config(settings, "env", config.env))
    return environment, tasks_of(environment, config)


def tasks_of(environment: Environment, config: RolloutConfig, sampling_round: int = 0) -> list[Task]:
    """Return the tasks of one round of a step.

    Raises:
        SettingsError, InputError: the environment gives none, an unknown one is asked for, or there are too few.
    """
    with plugin_errors(f"environment `{config.env}`"):
        tasks = tasks_in(environment, config.split)
        chosen = _order(config).choose(tasks, config.train_batch_size, config.tasks, sampling_round)
        for task in chosen:
            check_task(task)
    return chosen


def _order(config: RolloutConfig) -> TaskOrder:
    return TaskOrder(seed=config.seed, step=config.step, env=config.env, split=config.split)


def without_places(config: Any) -> dict[str, Any]:
    """Return the settings that can change the rows, as values for the manifest."""
    aside = (*NOT_IN_MANIFEST, *getattr(config, "PLACES", ()))
    return {key: value for key, value in to_plain(config).items() if key not in aside}


def files_of(config: Any) -> dict[str, str]:
    """Return the digest of every file that the settings name."""
    # What the hub holds under a name is told by its revision, which is part of the name.
    return {
        key: digest_text(value) if value.startswith(HUB) else digest_file(as_path(value))
        for key, value in to_plain(config).items()
        if key in FILES and value is not None
    }


def rollout(
    policy: Path | None,
    output: Path,
    config: RolloutConfig,
    *,
    settings: dict[str, dict[str, Any]] | None = None,
    engine: Engine | None = None,
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
        force: Replace an output made under other settings.
        log: Where numbers go.

    Raises:
        NanoskyrlError: bad settings or input, an output in the way, or an engine that cannot start.
    """
    settings = settings or {}
    watch = Stopwatch()
    plan = prepare(policy, config, settings)
    with open_output(output, plan.head, force=force, dropped=failed) as out:
        if out.manifest is not None:
            return out.manifest
        tasks, rounds, index, spread = plan.tasks, 0, 0, 0
        scorer = _scorer(plan.environment, settings) if config.dynamic_sampling else None
        while True:
            parts = in_parts(tasks, config.rows_per_part, config.n_samples_per_prompt, index)
            missing = {i: part for i, part in parts.items() if not out.has_part(i)}
            if missing:
                engine = engine or make_engine(config.engine, plugin_config(settings, "engine", config.engine))
                load_policy(engine, policy, config.engine, watch)
                for i, rows in run_parts(plan, missing, engine, policy, watch, rounds):
                    with watch("write"):
                        out.write_part(i, to_table(rows))
            if scorer is not None:
                with watch("score"):
                    for i in parts:
                        spread += _groups_with_spread(output / part_name(i), scorer)
            index += len(parts)
            rounds += 1
            if scorer is None or spread >= len(plan.tasks) or rounds >= config.max_sample_batches:
                break
            tasks = tasks_of(plan.environment, config, rounds)
        facts = {"rounds": rounds, "groups_with_spread": spread} if config.dynamic_sampling else {}
        with watch("write"):
            manifest = out.finish(rows_in=rounds * len(plan.tasks) * config.n_samples_per_prompt, facts=facts)
    numbers = summary(read_parts(output, manifest, SUMMARY_COLUMNS))
    if isinstance(engine, AsyncEngine):
        numbers |= {f"rollout/engine/{key}": value for key, value in engine.facts().items()}
    log.write("rollout", {**numbers, **{f"rollout/{key}": value for key, value in facts.items()}, **watch.timings()})
    return manifest


def _scorer(environment: Environment, settings: dict[str, dict[str, Any]]) -> "Scorer":
    """Return what `score` will judge by."""
    from nanoskyrl.stages.score import weighted

    config = stage_config(settings, "score")
    return weighted(config.rewards, environment, config.timeout_seconds, stage_config(settings, "judge"))


def _groups_with_spread(part: Path, scorer: "Scorer") -> int:
    """Return how many groups of a part have spread; its rewards are not written: `score` gives them again."""
    from nanoskyrl.algos.shaping import groups_with_spread, metric_of
    from nanoskyrl.stages.score import judge

    rows = list(from_table(read_part(part)))
    verdicts = judge(rows, scorer)
    last = [row for row in rows if row.is_last_step]
    found = (verdicts[row.trajectory_id][0] for row in last)
    metrics = [None if verdict.reward is None else metric_of(verdict.success, verdict.reward) for verdict in found]
    return len(groups_with_spread([row.group_id for row in last], metrics))


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
    config, order = plan.config, _order(plan.config)
    if config.stop_strings and not engine.takes_stop_strings:
        raise SettingsError(
            f"engine `{config.engine}` takes no `rollout.stop_strings`",
            hint="Leave them out, or use engine hf or openai",
        )
    attempts = {
        index: [
            (task, identity)
            for task in tasks
            for identity in order.identities(
                task, config.n_samples_per_prompt, policy, plan.head.policy, sampling_round
            )
        ]
        for index, tasks in parts.items()
    }
    return play_parts(
        attempts,
        plan.environment,
        engine,
        SamplingParams(
            temperature=config.temperature, top_p=config.top_p, top_k=config.top_k,
            logprobs_mode=config.logprobs_mode, stop_strings=config.stop_strings,
        ),
        TurnLimits(
            max_turns=config.max_turns, max_generate_length=config.max_generate_length,
            max_input_length=config.max_input_length or NO_LIMIT,
            max_sequence_length=config.max_sequence_length or NO_LIMIT,
        ),
        watch,
        memory=Memory(kind=config.memory, turns=config.memory_turns),
        trajectory_mode=config.trajectory_mode,
        tool_format=config.tool_format,
        template_arguments=config.chat_template_kwargs,
    )  # fmt: skip
