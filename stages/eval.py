"""Stage `eval`: held-out tasks of an environment, sampled and scored in one table.

The shards hold rollout's and score's columns; `summary.json` the numbers: success with a
95% interval, pass@k, lengths, and what was not scored, which is counted and never 0.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from nanoskyrl.eval.passk import mean_interval, pass_at_k
from nanoskyrl.stages.config import plugin_config, to_plain
from nanoskyrl.stages.engines import Engine, TokenEngine, make_engine
from nanoskyrl.stages.errors import SettingsError
from nanoskyrl.stages.manifest import SUMMARY, Head, Manifest, open_output, part_files
from nanoskyrl.stages.metrics import MetricsLog, Stopwatch, mean
from nanoskyrl.stages.registry import lookup
from nanoskyrl.stages.rollout import RolloutConfig, failed, prepare, run_parts
from nanoskyrl.stages.score import score_table, unjudged
from nanoskyrl.stages.shards import read_part
from nanoskyrl.stages.storage import write_whole
from nanoskyrl.stages.trajectory import to_table


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Which held-out tasks, and how they are sampled."""

    env: str | None = None
    """Name of the environment; None: the one that is trained on."""
    limit: int = 512
    """Tasks, the first of a seeded permutation of the test split; 0 takes all."""
    n_samples: int = 1
    """Samples of each task."""
    temperature: float = 1.0
    """0 is greedy."""
    seed: int = 0
    """Of the permutation and the sampling; not the run's, so that runs are compared on the same tasks."""

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be meant."""
        if self.limit < 0:
            raise SettingsError(f"`eval.limit` must be at least 0, not {self.limit}", hint="0 takes all tasks")
        if self.temperature < 0:
            raise SettingsError(f"`eval.temperature` must be at least 0, not {self.temperature}", hint="0 is greedy")
        if self.n_samples < 1:
            raise SettingsError(
                f"`eval.n_samples` must be at least 1, not {self.n_samples}", hint="Give a positive number"
            )


def evaluate(
    policy: Path | None,
    output: Path,
    config: EvalConfig,
    rollout_config: RolloutConfig,
    *,
    settings: dict[str, dict[str, Any]] | None = None,
    engine: Engine | None = None,
    force: bool = False,
    log: MetricsLog = MetricsLog(),
) -> Manifest:
    """Sample and score held-out tasks.

    Args:
        policy: A policy's directory; None for engines that need none.
        output: Directory for the shards and `summary.json`.
        config: The tasks and the sampling.
        rollout_config: Engine and limits, as in training.
        settings: Tables of the environment and the engine.
        engine: One that is up; else it is made here.
        force: Replace an output made under other settings.
        log: Where numbers go.

    Raises:
        NanoskyrlError: bad settings or input, an output in the way, or an engine that cannot start.
    """
    settings = settings or {}
    watch = Stopwatch()
    plan = prepare(policy, _as_rollout(config, rollout_config, settings), settings)
    described = {**plan.head.settings, "eval": to_plain(config)}
    head = Head(stage="eval", settings=described, policy=plan.head.policy)
    with open_output(output, head, force=force, dropped=_short) as out:
        if out.manifest is not None:
            return out.manifest
        groups_per_part = -(-plan.config.rows_per_part // config.n_samples)
        chunks = [plan.tasks[start : start + groups_per_part] for start in range(0, len(plan.tasks), groups_per_part)]
        missing = {part: chunk for part, chunk in enumerate(chunks) if not out.has_part(part)}
        if missing:
            if engine is None:
                engine = make_engine(plan.config.engine, plugin_config(settings, "engine", plan.config.engine))
            if isinstance(engine, TokenEngine):
                if policy is None:
                    raise SettingsError(
                        f"engine `{plan.config.engine}` needs a policy", hint="Name one with `--policy`"
                    )
                engine.load(policy)
            for part, rows in run_parts(plan, missing, engine, policy, watch):
                with watch("score"):
                    table = score_table(to_table(rows), plan.environment.score)
                out.write_part(part, table)
        numbers = summary(map(read_part, part_files(output)), config.n_samples)
        write_whole(output / SUMMARY, (json.dumps(numbers, indent=2) + "\n").encode())
        manifest = out.finish(rows_in=len(plan.tasks) * config.n_samples)
    values = {key: value for key, value in numbers.items() if isinstance(value, int | float)}
    log.write("eval", {**{f"eval/{plan.config.env}/{key}": value for key, value in values.items()}, **watch.timings()})
    return manifest


def _short(table: pa.Table) -> dict[str, int]:
    return {**failed(table), **{reason: n for reason, n in unjudged(table).items() if reason != "skipped"}}


def _as_rollout(
    config: EvalConfig, rollout_config: RolloutConfig, settings: dict[str, dict[str, Any]]
) -> RolloutConfig:
    """Return the rollout that samples these held-out tasks."""
    changed = dataclasses.replace(
        rollout_config, env=config.env or rollout_config.env, split="test", step=0, seed=config.seed, tasks=(),
        n_samples_per_prompt=config.n_samples, temperature=config.temperature, train_batch_size=max(config.limit, 1),
        dynamic_sampling=False,
    )  # fmt: skip
    if config.limit:
        return changed
    environment = lookup("env", changed.env)(plugin_config(settings, "env", changed.env))
    return dataclasses.replace(changed, train_batch_size=len(environment.tasks("test")))


def summary(tables: Iterable[pa.Table], n_samples: int) -> dict[str, Any]:
    """Return the numbers of scored held-out shards."""
    by_task: dict[str, list[float]] = {}
    statuses: Counter[str] = Counter()
    score_statuses: Counter[str] = Counter()
    completion, turns, rows = [], [], 0
    for table in tables:
        last = table.filter(table.column("is_last_step"))
        rows += last.num_rows
        statuses.update(last.column("status").to_pylist())
        score_statuses.update(last.column("score_status").to_pylist())
        completion += last.column("completion_tokens").to_pylist()
        turns += [len(value) for value in last.column("turns").to_pylist()]
        for task, success in zip(last.column("task_id").to_pylist(), last.column("success").to_pylist(), strict=True):
            if success is not None:
                by_task.setdefault(task, []).append(float(success))
    interval = mean_interval([sum(values) / len(values) for values in by_task.values()])
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k <= n_samples]
    return {
        "tasks": len(by_task),
        "samples": rows,
        "success": interval[0] if interval else None,
        "success_95": list(interval[1:]) if interval else None,
        **{f"pass_at_{k}": mean(_pass(values, k) for values in by_task.values() if len(values) >= k) for k in ks},
        "completion_tokens_mean": mean(completion),
        "turns_mean": mean(turns),
        "not_scored": sum(count for status, count in score_statuses.items() if status != "scored"),
        "status": dict(sorted(statuses.items())),
        "score_status": dict(sorted(score_statuses.items())),
    }


def _pass(values: list[float], k: int) -> float:
    return pass_at_k(len(values), int(sum(values)), k)
