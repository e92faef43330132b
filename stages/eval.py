"""Stage `eval`: a benchmark, or held-out tasks of an environment, sampled and scored in one table.

The shards hold rollout's and score's columns; `_summary.json` the numbers: success with a
95% interval, pass@k, lengths, tool calls, cost, and what was not scored, which is counted
and never 0. Attempts that an endpoint did not answer are in no part: the same command asks
for them again, and for nothing else.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from nanoskyrl.envs.base import Environment
from nanoskyrl.eval.base import Benchmark
from nanoskyrl.eval.metrics import counts_of, summarize
from nanoskyrl.eval.prices import read_prices
from nanoskyrl.stages.core.checked import PATH, PLACE, Checked, NonNegativeFloat, NonNegativeInt, PositiveInt
from nanoskyrl.stages.core.config import plugin_config, row_settings
from nanoskyrl.stages.core.errors import NanoskyrlError, SettingsError, ShortError
from nanoskyrl.stages.core.executor import Executor
from nanoskyrl.stages.core.manifest import STAYS_LOCAL, SUMMARY, Head, Manifest, refuse_to_leave
from nanoskyrl.stages.core.metrics import MetricsLog, Stopwatch
from nanoskyrl.stages.core.output import open_output, part_files
from nanoskyrl.stages.core.registry import lookup, plugin_errors
from nanoskyrl.stages.core.rows import from_table, to_table, withheld
from nanoskyrl.stages.core.shards import read_part
from nanoskyrl.stages.core.storage import is_local, make_directory, write_whole
from nanoskyrl.stages.core.trajectory import Trajectory
from nanoskyrl.stages.engines.base import UNREACHABLE, Engine
from nanoskyrl.stages.engines.part_filler import PartFiller
from nanoskyrl.stages.engines.rollout_config import ROWS_PER_PART, RolloutConfig, check_template_arguments
from nanoskyrl.stages.engines.rollout_parts import failed, in_parts
from nanoskyrl.stages.engines.task_order import tasks_in
from nanoskyrl.stages.models.policy import model_name
from nanoskyrl.stages.rollout import files_of, prepare
from nanoskyrl.stages.score import score_table, unjudged

FILES = "_files"
"""Folder for what a benchmark leaves beside its shards, such as predictions."""
BENCH_TASKS = 100
"""Tasks of a benchmark, unless it is said how many."""
ENV_TASKS = 512
"""Held-out tasks of an environment, unless it is said how many."""
DEFAULT_BENCHES = ("hle", "swe_bench_verified")
BENCH_ROWS_PER_PART = 16
"""Attempts at a benchmark are long and few: a kill costs no more than these."""
SECRET_ROWS_PER_PART = 8
"""Replies of a benchmark that withholds its text are kept in no journal: a kill costs no more than these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig(Checked):
    """Which tasks, and how they are sampled."""

    env: str | None = None
    """Name of the environment; None: the one that is trained on."""
    bench: tuple[str, ...] = ()
    """Benchmarks in place of the environment."""
    limit: NonNegativeInt | None = None
    """Tasks, the first of a seeded permutation; 0 takes all. None: 100 of a benchmark, 512 of an environment.
    Where there are fewer, all of them."""
    n_samples: PositiveInt = 1
    """Samples of each task."""
    pass_k: tuple[PositiveInt, ...] = ()
    """pass@k for these; none: every power of two up to n_samples."""
    temperature: NonNegativeFloat = 1.0
    """0 is greedy."""
    seed: int = 0
    """Of the permutation and the sampling; not the run's, so that runs are compared on the same tasks."""
    max_turns: PositiveInt | None = None
    """Turns of an attempt; None: the benchmark's own number, or the rollout's."""
    max_generate_length: PositiveInt | None = None
    """Tokens of one turn; None: the benchmark's own number, or the rollout's."""
    tool_format: str | None = None
    """How calls of tools are read; None: the rollout's."""
    chat_template_kwargs: dict[str, Any] | None = None
    """What the chat template is given beside the messages; None: the rollout's."""
    prices: str | None = field(default=None, metadata=PLACE | PATH)
    """A TOML or JSON file: by model, what a million `prompt` and `completion` tokens cost. A policy's model is called
    what its run began with, such as `starter` or a hub id."""

    def check(self) -> None:
        """Refuse a pass@k of more than is sampled, and arguments that are no template's."""
        check_template_arguments("eval", self.chat_template_kwargs or {})
        for k in self.pass_k:
            if k > self.n_samples:
                raise SettingsError(
                    f"pass@{k} needs at least {k} samples, and `eval.n_samples` is {self.n_samples}",
                    hint=f"Give `--n-samples {k}`",
                )


def evaluate(
    policy: Path | None,
    output: Path,
    config: EvalConfig,
    rollout_config: RolloutConfig,
    *,
    name: str | None = None,
    settings: dict[str, dict[str, Any]] | None = None,
    engine: Engine | None = None,
    executor: Executor | None = None,
    force: bool = False,
    log: MetricsLog = MetricsLog(),
) -> Manifest:
    """Sample and score tasks that are not trained on.

    Args:
        policy: A policy's directory; None for engines that need none.
        output: Directory for the shards and `_summary.json`.
        config: The tasks and the sampling.
        rollout_config: Engine and limits, as in training.
        name: A benchmark or an environment; None: what the settings name.
        settings: Tables of the environment or benchmark, and of the engine.
        engine: One that is up; else it is made here.
        executor: Makes the parts elsewhere, with engines of its own.
        force: Replace an output made under other settings.
        log: Where numbers go.

    Raises:
        NanoskyrlError: bad settings or input, an output in the way or where the text may not go, or an engine that
            cannot start.
        ShortError: an endpoint left attempts unanswered; the same command resumes with those.
    """
    watch = Stopwatch()
    name = str(name or config.env or rollout_config.env)
    settings = settings_of(name, rollout_config.engine, settings or {})
    plan = prepare(policy, _as_rollout(name, config, rollout_config, settings), settings)
    bench = plan.environment if isinstance(plan.environment, Benchmark) else None
    if bench is not None:
        bench.check_chosen(plan.tasks)
    if bench is not None and not bench.secret and not is_local(output):
        refuse_to_leave(bench.stays_local, output)
    engine_config = plugin_config(settings, "engine", plan.config.engine)
    model = getattr(engine_config, "model", None) or (model_name(policy) if policy else None)
    prices = read_prices(config.prices, model)
    asked = {key: value for key, value in row_settings(config).items() if key not in ("bench", "env")}
    described = {**plan.head.settings, "eval": {**asked, "prices": prices}}
    inputs = plan.head.inputs | (bench.inputs(plan.tasks) if bench else {})
    head = Head(stage="eval", settings=described, inputs=inputs, policy=plan.head.policy)
    journal = None if bench is None or bench.secret else _journal_of(output)
    if force and journal is not None:
        journal.unlink(missing_ok=True)
    with open_output(output, head, force=force, dropped=short) as out:
        if out.manifest is not None:
            return out.manifest
        filler = PartFiller(out, plan, policy, settings, engine, watch, executor)
        with contextlib.closing(filler):
            parts = in_parts(plan.tasks, plan.config.rows_per_part, config.n_samples)
            unanswered = filler.fill(parts, judged, journal=journal)
        if unanswered:
            wanted = len(plan.tasks) * config.n_samples
            raise ShortError(
                f"{len(unanswered)} of {wanted} attempts at {name} were not answered: {unanswered[0]}",
                hint="Run the same command again: what was answered is kept, and is not asked again",
            )
        with watch("summary"):
            numbers, scored = summarize(
                map(read_part, part_files(output)), config.n_samples, ks=config.pass_k, prices=prices
            )
            if bench is not None:
                numbers = {"benchmark": name, "metric": bench.metric, **numbers, **bench.metrics(scored)}
                rows = (row for path in part_files(output) for row in from_table(read_part(path)) if row.is_last_step)
                for file, content in bench.files(rows).items():
                    make_directory(output / FILES)
                    write_whole(output / FILES / file, content)
            numbers["held_out"] = bench is not None or _held_out(plan.environment, name)
            numbers["task_ids"] = [task.task_id for task in plan.tasks]
            write_whole(output / SUMMARY, (json.dumps(numbers, indent=2, ensure_ascii=False) + "\n").encode())
        facts = {STAYS_LOCAL: bench.stays_local} if bench is not None and bench.stays_local else {}
        with watch("write"):
            manifest = out.finish(rows_in=len(plan.tasks) * config.n_samples, facts=facts)
    if journal is not None:
        journal.unlink(missing_ok=True)
    values = {key: value for key, value in numbers.items() if isinstance(value, int | float)}
    log.write("eval", {**{f"eval/{name}/{key}": value for key, value in values.items()}, **watch.timings()})
    return manifest


def check_ahead(names: Sequence[str], settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Look at the settings, named files and rows of several evaluations, before hours are spent on the first of them.

    Raises:
        NanoskyrlError, OSError: what one of them would end with before it asked anything.
    """
    for name in names:
        _posed(name, settings)
        files_of(plugin_config(settings, "env", name))


def _posed(name: str, settings: Mapping[str, Mapping[str, Any]]) -> tuple[Environment, int]:
    """Return what is evaluated, and how many tasks it has."""
    with plugin_errors(f"environment `{name}`"):
        environment: Environment = lookup("env", name)(plugin_config(settings, "env", name))
        return environment, len(tasks_in(environment, "test"))


def settings_of(name: str, engine: str, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the settings that an evaluation runs under: on a CPU, a benchmark's numbers hang on no batch size.

    In float32 the last bits of a logit depend on the rows beside it, and now and then turn a token.
    """
    found = {table: dict(values) for table, values in settings.items()}
    kind = lookup("env", name)
    if isinstance(kind, type) and issubclass(kind, Benchmark):
        config = plugin_config(settings, "engine", engine)
        if hasattr(config, "for_benchmarks"):
            found[engine] = {**found.get(engine, {}), **config.for_benchmarks()}
    return found


def judged(environment: Environment, rows: list[Trajectory]) -> pa.Table | list[str]:
    """Return the rows with their verdicts, and without their text where that must not be written down.

    Where some of them were not answered: why.
    """
    if lost := [row.error for row in rows if row.error is not None and row.error.startswith(UNREACHABLE)]:
        return lost
    bench = environment if isinstance(environment, Benchmark) else None
    table = score_table(to_table(rows), environment.score, threads=bench.workers if bench else 1)
    if bench is None or not bench.secret:
        return table
    kept = [
        {("error" if part.startswith("error") else part): value for part, value in row.reward_parts.items()}
        | counts_of(row)
        for row in from_table(table)
    ]
    return withheld(table, kept)


def _journal_of(output: Path) -> Path | None:
    """Return where the replies of an endpoint are kept until the evaluation is finished."""
    if not is_local(output):
        return None
    make_directory(output.parent)
    return output.parent / f".{output.name}.replies.jsonl"


def short(table: pa.Table) -> dict[str, int]:
    """Return how many attempts failed or have no verdict, by reason."""
    return {**failed(table), **{reason: n for reason, n in unjudged(table).items() if reason != "skipped"}}


def _held_out(environment: Environment, name: str) -> bool:
    """Return whether the tasks of split test are others than those of split train."""
    with plugin_errors(f"environment `{name}`"):
        test = tasks_in(environment, "test")
        try:
            train = tasks_in(environment, "train")
        except NanoskyrlError:  # no task is trained on
            return True
        return len(train) != len(test) or any(replace(a, split=b.split) != b for a, b in zip(train, test, strict=True))


def _as_rollout(
    name: str, config: EvalConfig, rollout_config: RolloutConfig, settings: Mapping[str, Mapping[str, Any]]
) -> RolloutConfig:
    """Return the rollout that samples these tasks."""
    environment, there = _posed(name, settings)
    bench = environment if isinstance(environment, Benchmark) else None
    limit = config.limit if config.limit is not None else BENCH_TASKS if bench else ENV_TASKS
    limit = min(limit or there, there)
    limits = bench or rollout_config
    return replace(
        rollout_config, env=name, split="test", step=0, seed=config.seed, tasks=(),
        n_samples_per_prompt=config.n_samples, temperature=config.temperature, train_batch_size=max(limit, 1),
        dynamic_sampling=False, max_turns=config.max_turns or limits.max_turns,
        max_generate_length=config.max_generate_length or limits.max_generate_length,
        tool_format=config.tool_format or rollout_config.tool_format,
        chat_template_kwargs=(
            rollout_config.chat_template_kwargs
            if config.chat_template_kwargs is None
            else config.chat_template_kwargs
        ),
        rows_per_part=_rows_per_part(bench, rollout_config.rows_per_part),
    )  # fmt: skip


def _rows_per_part(bench: Benchmark | None, wanted: int) -> int:
    if bench is None:
        return wanted
    return SECRET_ROWS_PER_PART if bench.secret else BENCH_ROWS_PER_PART if wanted == ROWS_PER_PART else wanted
