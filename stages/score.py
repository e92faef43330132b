"""Stage `score`: every trajectory gets its verdict, or says why it has none.

Rewards are the environment's own or functions of the user's, weighted. A failed row is
skipped, a reward function that raises leaves its rows unjudged: both keep a null reward,
never 0. Rows in are rows out; the rollout's columns go through untouched.
"""

# pyarrow makes the functions of pyarrow.compute at import, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from nanoskyrl.envs.base import Environment, Score
from nanoskyrl.envs.graders.judge import PLACES, Judge, JudgeConfig
from nanoskyrl.envs.graders.workers import Workers
from nanoskyrl.stages.core.config import plugin_config, stage_config, to_plain
from nanoskyrl.stages.core.errors import InputError, SettingsError, check_numbers
from nanoskyrl.stages.core.manifest import Head, Manifest, read_manifest
from nanoskyrl.stages.core.metrics import MetricsLog, Stopwatch, Value, grouped, mean
from nanoskyrl.stages.core.output import open_output
from nanoskyrl.stages.core.registry import load_attribute
from nanoskyrl.stages.core.rows import from_table, to_json
from nanoskyrl.stages.core.shards import read_part, read_parts
from nanoskyrl.stages.core.table_checks import check
from nanoskyrl.stages.core.trajectory import Trajectory, schema_of
from nanoskyrl.stages.engines.task_order import weights_of
from nanoskyrl.stages.learning.advantage_config import sampling_of
from nanoskyrl.stages.rollout import make_environment, without_places

Scorer = Callable[[Trajectory], Score]

ENV_REWARD, JUDGE_REWARD = "env", "judge"
POOL = Workers(1)
"""Where users' reward functions run."""
LARGEST_REWARD = 1e12
"""Past it, means and variances of a group no longer fit their types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreConfig:
    """Which rewards are given, and how they are weighed."""

    rewards: dict[str, float] = field(default_factory=lambda: {ENV_REWARD: 1.0})
    """Weight of each reward: `env`, the environment's own; `judge`, a model's; `module:function`, a user's."""
    timeout_seconds: float = 60.0
    """What a user's reward may take for one trajectory; then its process is killed, and the row has no reward."""

    def __post_init__(self) -> None:
        """Refuse a score made of nothing."""
        if not self.rewards:
            raise SettingsError("`score.rewards` is empty", hint="Write, for instance, rewards = { env = 1.0 }")
        check_numbers("score", self, "timeout_seconds", above=0)
        for name, weight in self.rewards.items():
            if not abs(weight) <= LARGEST_REWARD:
                raise SettingsError(f"the weight of reward `{name}` is {weight}", hint="Give a finite number")


def score(
    rollout: Path,
    output: Path,
    config: ScoreConfig,
    *,
    settings: dict[str, dict[str, Any]] | None = None,
    force: bool = False,
    log: MetricsLog = MetricsLog(),
) -> Manifest:
    """Judge every trajectory of a rollout.

    Args:
        rollout: Shards written by `rollout`.
        output: Directory for the shards with verdicts.
        config: The rewards and their weights.
        settings: Tables of the environments, for the weights inside their own rewards.
        force: Replace an output made under other settings.
        log: Where numbers go.

    Raises:
        InputError: the input is missing, unfinished or corrupt, or its environment is unknown here.
    """
    watch = Stopwatch()
    source = read_manifest(rollout, stage="rollout")
    env = _env_of(source)
    environment = make_environment(env, settings or {})
    judge_config: JudgeConfig = stage_config(settings or {}, "judge")
    scorer = weighted(config.rewards, environment, config.timeout_seconds, judge_config)
    threads = judge_config.concurrency if JUDGE_REWARD in config.rewards else 1
    head = Head(
        stage="score",
        settings={
            **described_rewards(config, judge_config),
            **{name: without_places(plugin_config(settings or {}, "env", name)) for name in weights_of(env)},
        },
        inputs={"rollout": source.digest},
        policy=source.policy,
    )
    with open_output(output, head, force=force, dropped=unjudged) as out:
        if out.manifest is not None:
            return out.manifest
        for index, part in enumerate(source.parts):
            if out.has_part(index):
                continue
            with watch("read"):
                table = read_part(rollout / part.name, part.digest)
            check(table, "rollout")
            with watch("score"):
                scored = score_table(table, scorer, threads)
            with watch("write"):
                out.write_part(index, scored)
        # What `advantage` goes by: it sees no rollout.
        facts = {"sampling": sampling_of(source.settings["rollout"])}
        manifest = out.finish(rows_in=source.rows_out, facts=facts)
    log.write("score", {**summary(read_parts(output, manifest, SUMMARY_COLUMNS)), **watch.timings()})
    return manifest


def unjudged(table: pa.Table) -> dict[str, int]:
    """Return how many rows have no verdict, by score_status."""
    return dict(Counter(status for status in table.column("score_status").to_pylist() if status != "scored"))


def _env_of(source: Manifest) -> str | dict[str, float]:
    env = source.settings.get("rollout", {}).get("env")
    if not isinstance(env, str | dict):
        raise InputError("the manifest of the rollout names no environment", hint="Run `skyrl rollout` again")
    return env


def described_rewards(config: ScoreConfig, judge_config: JudgeConfig) -> dict[str, Any]:
    """Return the settings that can change rewards, as values for a manifest."""
    described = {"score": to_plain(config)}
    if JUDGE_REWARD in config.rewards:
        described["judge"] = {name: value for name, value in to_plain(judge_config).items() if name not in PLACES}
    return described


def weighted(
    rewards: Mapping[str, float],
    environment: Environment,
    timeout_seconds: float = 60.0,
    judge_config: JudgeConfig = JudgeConfig(),
) -> Scorer:
    """Return one scorer from several: the weighted sum of rewards, the first stated success, all parts.

    Raises:
        SettingsError: a reward function does not import, or the judge has no endpoint.
    """
    functions: dict[str, Scorer] = {}
    for name in rewards:
        if name == ENV_REWARD:
            functions[name] = environment.score
        elif name == JUDGE_REWARD:
            functions[name] = Judge(judge_config).score
        else:
            functions[name] = _users_scorer(name, timeout_seconds)
    if list(functions) == [ENV_REWARD] and rewards[ENV_REWARD] == 1:
        return environment.score

    def combined(trajectory: Trajectory) -> Score:
        verdicts = {name: function(trajectory) for name, function in functions.items()}
        parts: dict[str, float | None] = {}
        for name, verdict in verdicts.items():
            parts |= {name: verdict.reward, **{f"{name}/{part}": value for part, value in verdict.parts.items()}}
        given = [verdict.reward for verdict in verdicts.values()]
        # One part unjudged leaves the whole unjudged: a sum over the rest would be another reward.
        known = [value for value in given if value is not None]
        total = (
            sum(weight * value for weight, value in zip(rewards.values(), known, strict=True))
            if len(known) == len(given)
            else None
        )
        success = next((verdict.success for verdict in verdicts.values() if verdict.success is not None), None)
        return Score(reward=total, success=success, parts=parts)

    return combined


def _users_scorer(name: str, timeout_seconds: float) -> Scorer:
    """Let a user's function return a Score, a number or None, in a process that can be killed: it may never return."""
    load_attribute(name, what="reward")

    def scorer(trajectory: Trajectory) -> Score:
        found = POOL.call(name, trajectory, seconds=timeout_seconds)
        return found if isinstance(found, Score) else Score(reward=None if found is None else float(found))

    return scorer


def score_table(table: pa.Table, scorer: Scorer, threads: int = 1) -> pa.Table:
    """Return a rollout's table with the columns of `score` added."""
    verdicts = judge(from_table(table), scorer, threads)
    rows = [verdicts[trajectory_id] for trajectory_id in table.column("trajectory_id").to_pylist()]
    added = {
        "reward": pa.array([verdict.reward for verdict, _ in rows], pa.float64()),
        "reward_parts": pa.array([to_json(verdict.parts) for verdict, _ in rows], pa.string()),
        "success": pa.array([verdict.success for verdict, _ in rows], pa.bool_()),
        "score_status": pa.array([status for _, status in rows], pa.string()),
    }
    schema = schema_of("score")
    scored = pa.Table.from_arrays(
        [added[name] if name in added else table.column(name) for name in schema.names], schema=schema
    )
    check(scored, "score")
    return scored


def judge(rows: Iterable[Trajectory], scorer: Scorer, threads: int = 1) -> dict[str, tuple[Score, str]]:
    """Return verdict and score_status by trajectory; a trajectory of several rows is judged once, whole.

    A scorer that waits for somebody else may be asked from several threads; the order is that of the rows.
    """
    steps = grouped((row.trajectory_id, row) for row in rows)
    if threads == 1:
        return {name: _judge_one(several, scorer) for name, several in steps.items()}
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(steps, pool.map(partial(_judge_one, scorer=scorer), steps.values()), strict=True))


def _judge_one(steps: list[Trajectory], scorer: Scorer) -> tuple[Score, str]:
    last = steps[-1]
    if last.status == "failed":
        return Score(reward=None), "skipped"
    whole = last if len(steps) == 1 else replace(last, turns=[turn for step in steps for turn in step.turns])
    try:
        verdict = checked(scorer(whole))
    except TimeoutError as error:
        return Score(reward=None, parts={f"error: {error}": None}), "verifier_timeout"
    except (
        Exception,
        SystemExit,
        GeneratorExit,
    ) as error:  # a reward function's failure is its row's, not the stage's, and no verdict
        return Score(reward=None, parts={f"error: {type(error).__name__}: {error}": None}), "verifier_error"
    if verdict.reward is not None and not abs(verdict.reward) <= LARGEST_REWARD:  # NaN is not below it either
        return Score(reward=None, parts={f"error: the reward is {verdict.reward}": None}), "verifier_error"
    return verdict, "scored" if verdict.reward is not None else "verifier_error"


SUMMARY_COLUMNS = ("is_last_step", "score_status", "sample", "env", "reward", "success", "group_id")


def checked(verdict: Any) -> Score:
    """Return a verdict with plain numbers and truth values.

    Raises:
        TypeError, ValueError: it is no Score, or holds what is neither.
    """
    if not isinstance(verdict, Score):
        raise TypeError(f"the verdict is a {type(verdict).__name__}, not a Score")
    if verdict.success is not None and verdict.success not in (True, False):
        raise TypeError(f"success is {verdict.success!r}, neither true nor false")
    parts = {str(name): None if value is None else float(value) for name, value in verdict.parts.items()}
    return Score(
        reward=None if verdict.reward is None else float(verdict.reward),
        success=None if verdict.success is None else bool(verdict.success),
        parts=parts,
    )


def summary(tables: Iterable[pa.Table]) -> dict[str, Value]:
    """Return the numbers of scored shards; trajectories count once, however many rows they have."""
    rewards, successes, statuses = [], [], Counter()
    groups: dict[str, list[float]] = {}
    size = 1
    by_env: dict[str, tuple[list[float], list[float], set[str]]] = {}  # rewards, successes and groups of each
    for table in tables:
        last = table.filter(table.column("is_last_step"))
        statuses.update(last.column("score_status").to_pylist())
        size = max([size, *(sample + 1 for sample in last.column("sample").to_pylist())])
        known = last.filter(pc.is_valid(last.column("reward")))
        rewards += known.column("reward").to_pylist()
        successes += [float(value) for value in known.column("success").to_pylist() if value is not None]
        for name in last.column("env").to_pylist():
            by_env.setdefault(name, ([], [], set()))
        for name, group, success, reward in zip(
            *(known.column(c).to_pylist() for c in ("env", "group_id", "success", "reward")), strict=True
        ):
            groups.setdefault(group, []).append(reward if success is None else float(success))
            of_env = by_env[name]
            of_env[0].append(reward)
            of_env[1].extend([] if success is None else [float(success)])
            of_env[2].add(group)
    spread = {group: _variance(values) for group, values in groups.items() if len(values) > 1}
    variances = list(spread.values())
    return {
        "reward/avg_raw_reward": mean(rewards),
        "reward/success": mean(successes),
        f"reward/avg_pass_at_{size}": mean(float(max(values) > 0) for values in groups.values()),
        **{
            f"reward/{name}/variance_per_prompt": mean(value for group, value in spread.items() if group in among)
            for name, (_, _, among) in by_env.items()
        },
        **{
            f"reward/{name}/{key}": mean(values)
            for name, (of_rewards, of_successes, _) in by_env.items()
            if len(by_env) > 1
            for key, values in (("avg_raw_reward", of_rewards), ("success", of_successes))
        },
        "reward/groups_with_signal": mean(float(value > 0) for value in variances),
        **{f"score/status/{status}": count for status, count in sorted(statuses.items())},
    }


def _variance(values: list[float]) -> float:
    middle = sum(values) / len(values)
    return sum((value - middle) ** 2 for value in values) / len(values)
