"""Stage `score`: every trajectory gets its verdict, or says why it has none.

Rewards are the environment's own or functions of the user's, weighted. A failed row is
skipped, a reward function that raises leaves its rows unjudged: both keep a null reward,
never 0, and are judged again when the stage is called again. Rows in are rows out; the
rollout's columns go through untouched.
"""

# pyarrow makes the functions of pyarrow.compute at import, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Meta

from nanoskyrl.algos.shaping import groups_with_spread, metric_of
from nanoskyrl.envs.base import Environment, Score
from nanoskyrl.envs.graders.judge import JudgeConfig
from nanoskyrl.envs.graders.verdicts import (
    ENV_REWARD,
    ERROR,
    JUDGE_REWARD,
    LARGEST_REWARD,
    Scorer,
    Verdicts,
    Weighted,
    judge,
    weighted,
)
from nanoskyrl.stages.core.checked import PLACE, Checked, PositiveFloat, PositiveInt
from nanoskyrl.stages.core.code import plugin_digests
from nanoskyrl.stages.core.config import plugin_config, row_settings, stage_config
from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.core.executor import Executor, Job, Maker
from nanoskyrl.stages.core.manifest import NUMBERS, Head, Manifest, Part, first_difference, is_finished, read_manifest
from nanoskyrl.stages.core.metrics import MetricsLog, Stopwatch, Value, finite
from nanoskyrl.stages.core.output import Written, commit_part, open_output
from nanoskyrl.stages.core.rows import counts_in, texts_of, to_json
from nanoskyrl.stages.core.shards import part_name, read_checked, read_part, read_parts
from nanoskyrl.stages.core.storage import make_directory, write_whole
from nanoskyrl.stages.core.table_checks import check
from nanoskyrl.stages.core.trajectory import schema_of
from nanoskyrl.stages.engines.concurrent_turns import threads_for
from nanoskyrl.stages.engines.task_order import weights_of
from nanoskyrl.stages.learning.advantage_config import sampling_of
from nanoskyrl.stages.learning.score_numbers import SUMMARY_COLUMNS, summary
from nanoskyrl.stages.rollout import make_environment

UNJUDGED = ("verifier_error", "verifier_timeout")
"""Of score_status: another time there may be a verdict."""
REWARD_CODE = "reward_code"
"""Of the settings in a manifest: the digests of reward functions of the user's."""
VERDICTS = "_files/verdicts"
"""In a rollout by dynamic sampling: what it judged by."""
VERDICT_COLUMNS = ("trajectory_id", "reward", "reward_parts", "success", "score_status")


RewardWeight = Annotated[float, Meta(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]
Rewards = Annotated[
    dict[str, RewardWeight], Meta(min_length=1, description="one reward or several, each with a finite weight")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreConfig(Checked):
    """Which rewards are given, and how they are weighed."""

    rewards: Rewards = field(default_factory=lambda: {ENV_REWARD: 1.0})
    """Weight of each reward: `env`, the environment's own; `judge`, a model's; `module:function`, a user's."""
    timeout_seconds: PositiveFloat = 60.0
    """What a user's reward may take for one trajectory; then its process is killed, and the row has no reward."""
    concurrency: PositiveInt = field(default=32, metadata=PLACE)
    """Verdicts that are worked on at once, where they wait: the environment's in threads, a user's function in
    processes of its own. 1 for functions that remember, or that need much memory."""
    conversational: bool = False
    """Give reward functions of TRL's signature messages, as TRL does for conversational data sets; False: text."""


def score(
    rollout: Path,
    output: Path,
    config: ScoreConfig,
    *,
    settings: dict[str, dict[str, Any]] | None = None,
    force: bool = False,
    again: bool = True,
    executor: Executor | None = None,
    log: MetricsLog = MetricsLog(),
) -> Manifest:
    """Judge every trajectory of a rollout.

    Args:
        rollout: Shards written by `rollout`.
        output: Directory for the shards with verdicts.
        config: The rewards and their weights.
        settings: Tables of the environments, for the weights inside their own rewards.
        force: Replace an output made under other settings.
        again: Judge rows of a finished output that have no verdict once more; all of its rows if reward functions have
            changed since.
        executor: Makes the parts elsewhere.
        log: Where numbers go.

    Raises:
        InputError: the input is missing, unfinished or corrupt, or its environment is unknown here.
    """
    watch = Stopwatch()
    source = read_manifest(rollout, stage="rollout")
    scorer, threads = scoring(config, make_environment(_env_of(source), settings or {}), settings or {})
    ours = head(rollout, config, settings=settings)
    # Dynamic sampling judged by the same rewards: its verdicts are these.
    sampled_by = all(source.settings.get(name) == value for name, value in json.loads(to_json(ours.settings)).items())
    kept: Verdicts | None = None if force or not again else judged_before(output, ours)
    with open_output(output, ours, force=force or kept is not None, dropped=unjudged) as out:
        if out.manifest is not None:
            return out.manifest
        reasons: Counter[str] = Counter()
        work_numbers: Mapping[str, Value] = {}
        if executor is not None:
            job = Job(
                begin=begin_parts,
                arguments={
                    "rollout": rollout.absolute(), "output": output.absolute(), "env": _env_of(source),
                    "config": config, "settings": settings or {}, "kept": kept, "sampled_by": sampled_by,
                },
            )  # fmt: skip
            missing = ((i, part) for i, part in enumerate(source.parts) if not out.has_part(i))
            with watch("score"):
                executor.fill(out, job, missing)
            work_numbers = executor.facts()

        def judged(index: int, table: pa.Table) -> pa.Table:
            with watch("score"):
                return score_table(table, scorer, threads, kept or _kept(rollout, index, sampled_by))

        def noted(table: pa.Table) -> pa.Table:
            reasons.update(_reasons(table))
            return table

        with watch("summary"):
            read = partial(read_checked, rollout, "rollout")
            numbers = summary(map(noted, out.parts(source.parts, read, judged, SUMMARY_COLUMNS, watch)))
        with watch("write"):
            # What `advantage` goes by: it sees no rollout.
            facts = {"sampling": sampling_of(source.settings["rollout"]), **why_unjudged(reasons)}
            facts[NUMBERS] = finite(numbers)
            manifest = out.finish(rows_in=source.rows_out, facts=facts)
    reason = manifest.facts.get("unjudged")
    log_reason = {"score/unjudged": f"{reason['reason']} ({reason['count']} trajectories)"} if reason else {}
    work_numbers = {f"score/{key}": value for key, value in work_numbers.items()}
    log.write("score", {**log_reason, **numbers, **work_numbers, **watch.timings()})
    return manifest


def begin_parts(
    *,
    rollout: Path,
    output: Path,
    env: str | dict[str, float],
    config: ScoreConfig,
    settings: dict[str, dict[str, Any]],
    kept: Verdicts | None,
    sampled_by: bool,
) -> Maker:
    """Return what judges a part of a rollout and commits it, in a worker."""
    scorer, threads = scoring(config, make_environment(env, settings), settings)

    def make(index: int, part: Part) -> Written:
        table, known = read_checked(rollout, "rollout", part), kept or _kept(rollout, index, sampled_by)
        return commit_part(output, index, score_table(table, scorer, threads, known), unjudged)

    return make


def head(rollout: Path, config: ScoreConfig, *, settings: dict[str, dict[str, Any]] | None = None) -> Head:
    """Return what is known of a score before it begins.

    Raises:
        InputError: the input is missing or unfinished, or its environment is unknown here.
    """
    source = read_manifest(rollout, stage="rollout")
    names = weights_of(_env_of(source))
    return Head(
        stage="score",
        settings={
            **plugin_digests(*names),
            **described_rewards(config, stage_config(settings or {}, "judge")),
            **{name: row_settings(plugin_config(settings or {}, "env", name)) for name in names},
        },
        inputs={source.stage: source.digest},
        policy=source.policy,
    )


def judged_before(output: Path, head: Head) -> Verdicts | None:
    """Return the verdicts of a finished output that stay, if some of its rows have none; None: it stays as it is.

    Where reward functions have changed since, no verdict stays.
    """
    if not is_finished(output):
        return None
    manifest = read_manifest(output, stage="score")
    if not any(manifest.dropped.get(status) for status in UNJUDGED):
        return None
    ours, theirs = asdict(head), {name: getattr(manifest, name) for name in asdict(head)}
    changed = first_difference(ours, theirs)
    for described in (ours, theirs):
        described["settings"] = {k: v for k, v in described["settings"].items() if k not in (REWARD_CODE, "plugins")}
    if first_difference(ours, theirs) is not None:
        return None
    tables = read_parts(output, manifest, VERDICT_COLUMNS) if changed is None else ()
    return {
        row["trajectory_id"]: (
            Score(reward=row["reward"], success=row["success"], parts=json.loads(row["reward_parts"])), "scored"
        )
        for table in tables
        for row in table.to_pylist()
        if row["score_status"] == "scored"
    }  # fmt: skip


def why_unjudged(reasons: Counter[str]) -> dict[str, Any]:
    """Return the commonest reason why rows have no verdict, and of how many; {} if all have one."""
    if not reasons:
        return {}
    reason, count = min(reasons.items(), key=lambda item: (-item[1], item[0]))
    return {"unjudged": {"reason": reason, "count": count}}


def _reasons(table: pa.Table) -> Iterator[str]:
    """Yield why each trajectory of a scored table has no verdict, where that is so."""
    if not table.column("reward").null_count:
        return
    without = pc.and_(table.column("is_last_step"), pc.is_in(table.column("score_status"), pa.array(UNJUDGED)))
    for parts in table.column("reward_parts").filter(without).to_pylist():
        yield from (name.removeprefix(ERROR) for name in json.loads(parts) if ERROR in name)


def groups_with_signal(rollout: Path, index: int, scorer: Scorer, threads: int) -> int:
    """Return how many groups of a part of a rollout have spread; a judge's verdicts are kept beside it for `score`."""
    table = read_part(rollout / part_name(index))
    kept = _kept_verdicts(rollout, index)
    waits = isinstance(scorer, Weighted) and scorer.waits
    verdicts = judge(table, scorer, threads, kept)
    if waits and verdicts.keys() - kept.keys():
        lines = [
            {"trajectory_id": name, "status": status, **asdict(verdict)} for name, (verdict, status) in verdicts.items()
        ]
        make_directory(rollout / VERDICTS)
        write_whole(rollout / VERDICTS / f"{index:05d}.json", to_json(lines).encode())
    last = table.filter(table.column("is_last_step"))
    found = (verdicts[name][0] for name in last.column("trajectory_id").to_pylist())
    metrics = [None if verdict.reward is None else metric_of(verdict.success, verdict.reward) for verdict in found]
    return len(groups_with_spread(last.column("group_id").to_pylist(), metrics))


def _kept(rollout: Path, index: int, sampled_by: bool) -> Verdicts:
    """Return the verdicts of dynamic sampling on a part, where it judged by the same rewards."""
    return _kept_verdicts(rollout, index) if sampled_by else {}


def _kept_verdicts(rollout: Path, index: int) -> Verdicts:
    """Return the verdicts that dynamic sampling had on a part; those that it lacked are asked for again."""
    path = rollout / VERDICTS / f"{index:05d}.json"
    if not path.is_file():
        return {}
    lines = json.loads(path.read_bytes())
    return {
        line["trajectory_id"]: (
            Score(reward=line["reward"], success=line["success"], parts=line["parts"]), line["status"]
        )
        for line in lines
        if line["status"] == "scored"
    }  # fmt: skip


def unjudged(table: pa.Table) -> dict[str, int]:
    """Return how many rows have no verdict, by score_status."""
    found = counts_in(table.column("score_status"))
    return {status: count for status, count in found.items() if status != "scored"}


def _env_of(source: Manifest) -> str | dict[str, float]:
    env = source.settings.get("rollout", {}).get("env")
    if not isinstance(env, str | dict):
        raise InputError("the manifest of the rollout names no environment", hint="Run `skyrl rollout` again")
    return env


def reward_code(config: ScoreConfig) -> dict[str, str]:
    """Return the digest of the code of each reward function of the user's."""
    own = [name for name in config.rewards if name not in (ENV_REWARD, JUDGE_REWARD)]
    return plugin_digests(*own).get("plugins", {})


def described_rewards(config: ScoreConfig, judge_config: JudgeConfig) -> dict[str, Any]:
    """Return the settings that can change rewards, as values for a manifest."""
    described = {"score": row_settings(config)}
    if code := reward_code(config):
        described[REWARD_CODE] = code
    if JUDGE_REWARD in config.rewards:
        described["judge"] = row_settings(judge_config)
    return described


def scoring(
    config: ScoreConfig, environment: Environment, settings: Mapping[str, Mapping[str, Any]]
) -> tuple[Scorer, int]:
    """Return one scorer for all rewards of the settings, and how many verdicts are worked on at once.

    Raises as `weighted` does.
    """
    judge_config: JudgeConfig = stage_config(settings, "judge")
    scorer = weighted(config.rewards, environment, config.timeout_seconds, judge_config, config.conversational)
    if JUDGE_REWARD in config.rewards:
        return scorer, judge_config.concurrency
    return scorer, threads_for(environment, config.concurrency)


def score_table(table: pa.Table, scorer: Scorer, threads: int = 1, kept: Verdicts | None = None) -> pa.Table:
    """Return a rollout's table, checked before, with the columns of `score`; a kept verdict is not given again."""
    verdicts = judge(table, scorer, threads, kept)
    rows = [verdicts[trajectory_id] for trajectory_id in table.column("trajectory_id").to_pylist()]
    added = {
        "reward": pa.array([verdict.reward for verdict, _ in rows], pa.float64()),
        "reward_parts": pa.array(texts_of(verdict.parts for verdict, _ in rows), pa.string()),
        "success": pa.array([verdict.success for verdict, _ in rows], pa.bool_()),
        "score_status": pa.array([status for _, status in rows], pa.string()),
    }
    schema = schema_of("score")
    scored = pa.Table.from_arrays(
        [added[name] if name in added else table.column(name) for name in schema.names], schema=schema
    )
    check(scored, "score", checked="rollout")
    return scored


def numbers_of(output: Path, manifest: Manifest) -> dict[str, Value]:
    """Return the numbers of a finished output, from its manifest where it has them."""
    own = manifest.stage == "score"  # stages of somebody's own pass facts on, and leave rows out
    return (own and manifest.facts.get(NUMBERS)) or summary(read_parts(output, manifest, SUMMARY_COLUMNS))
