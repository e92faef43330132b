"""Stage `advantage`: every sampled token gets its advantage, or its row the reason why not.

The estimator sees the rewards of a group's trajectories, each once, however many rows it
has. Rows that are not kept stay in the shards with a reason and null advantages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from nanoskyrl.algos.estimators.base import Estimator
from nanoskyrl.stages.core.code import plugin_digests
from nanoskyrl.stages.core.config import row_settings
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.executor import Executor, Job, Maker
from nanoskyrl.stages.core.manifest import Head, Manifest, Part, read_manifest
from nanoskyrl.stages.core.metrics import MetricsLog, Stopwatch, Value
from nanoskyrl.stages.core.output import Output, Written, commit_part, open_output
from nanoskyrl.stages.core.registry import lookup
from nanoskyrl.stages.core.rows import row_arrays
from nanoskyrl.stages.core.shards import part_name, read_checked, read_part
from nanoskyrl.stages.core.table_checks import check
from nanoskyrl.stages.core.trajectory import schema_of
from nanoskyrl.stages.learning.advantage_columns import (
    PASSED,
    SUMMARY_COLUMNS,
    AdvantageColumns,
    add_columns,
    drop_reasons,
    dropped_by_reason,
    estimate,
    looks_at_tokens,
    rows_needed,
    summary,
)
from nanoskyrl.stages.learning.advantage_config import AdvantageConfig
from nanoskyrl.stages.learning.advantage_inputs import NO_MODELS, Models, Stored
from nanoskyrl.stages.learning.kl_in_reward import FACT, Passed, coefficient, facts_of
from nanoskyrl.stages.learning.trajectories import COLUMNS, LENGTHS, MASK, Rows, gather
from nanoskyrl.stages.models.policy import check_critic, critic_digest, policy_digest

if TYPE_CHECKING:
    from nanoskyrl.stages.learning.model_columns import Passes


def advantage(
    scored: Path,
    output: Path,
    config: AdvantageConfig,
    *,
    policy: Path | None = None,
    reference: Path | None = None,
    previous: Path | None = None,
    passes: "Passes | None" = None,
    executor: Executor | None = None,
    force: bool = False,
    log: MetricsLog = MetricsLog(),
) -> Manifest:
    """Turn the rewards of scored shards into advantages of tokens.

    Args:
        scored: Shards written by `score`.
        output: Directory for the shards with advantages.
        config: The estimator, the shaping and the filters.
        policy: What training starts from; needed for values, and where old_logprobs is recompute.
        reference: The frozen policy; needed for a KL.
        previous: Advantages of the step before, from whose KL an adaptive coefficient follows; None: it begins.
        passes: Models that are up; else they are loaded here, if any is asked for.
        executor: Writes the parts elsewhere; the estimator, which sees the whole batch, and models work here.
        force: Replace an output made under other settings.
        log: Where numbers go.

    Raises:
        InputError: the input is missing, unfinished, corrupt or not scored, or a model does not know its tokens.
        SettingsError: an unknown estimator, a group of one under `singleton = error`, or a policy that is not named.
    """
    watch = Stopwatch()
    config = replace(config, estimator=config.estimator or "grpo")
    estimator = _estimator(config)
    source = read_manifest(scored, stage="score")
    asks = _asks(config, estimator)
    _check_named(asks, policy, reference)
    if asks and passes is None:
        passes = _fresh_passes()
    ours = head(scored, config, policy=policy, reference=reference, previous=previous, passes=passes)
    facts: dict[str, Any] = {}
    if "values" in asks and policy is not None:
        facts["critic"] = critic_digest(policy)
    config = replace(config, kl_reward_coef=coefficient(config, _before(config, previous)))
    # Of several processes with models, all take part in the passes, and the first one writes.
    world = passes.learner.world if asks and passes is not None else None
    opened = open_output(output, ours, force=force, dropped=dropped_by_reason)
    with opened if world is None else world.if_main(opened) as out:
        up_to_date = out is not None and out.manifest is not None
        if up_to_date if world is None else world.broadcast(up_to_date):
            return (out and out.manifest) or read_manifest(output)
        # Several processes make the same passes, so none looks into parts that are in place.
        kept = out if world is None or world.size == 1 else None
        batch = Stored(scored, source, asks, Models(policy, reference, passes), watch)
        columns, passed, starts = _columns(batch, config, estimator, kept)
        if out is None:
            assert world is not None
            world.barrier()
            return read_manifest(output)

        work_numbers: Mapping[str, Value] = {}
        if executor is not None:
            job = Job(begin=begin_parts, arguments={"scored": scored.absolute(), "output": output.absolute()})
            missing = (
                (index, (part, columns.of_rows(*rows)))
                for index, (part, rows) in enumerate(zip(source.parts, pairwise(starts), strict=False))
                if not out.has_part(index)
            )
            with watch("estimate"):
                executor.fill(out, job, missing)
            work_numbers = executor.facts()

        def made(index: int, table: pa.Table) -> pa.Table:
            with watch("estimate"):
                found = add_columns(table, columns, starts[index])
            with watch("check"):
                check(found, "advantage", checked="score")
            return found

        with watch("summary"):
            numbers = summary(out.parts(source.parts, batch.part, made, SUMMARY_COLUMNS, watch))
        with watch("write"):
            facts |= facts_of(columns.tokens, passed, config)
            manifest = out.finish(rows_in=source.rows_out, facts=facts)
        if world is not None:
            world.barrier()
    numbers |= {f"advantage/{FACT}/{name}": value for name, value in facts.get(FACT, {}).items()}
    numbers |= {f"advantage/{key}": value for key, value in work_numbers.items()}
    log.write("advantage", {**numbers, **watch.timings()})
    return manifest


def begin_parts(*, scored: Path, output: Path) -> Maker:
    """Return what adds its columns to a part and commits it, in a worker."""

    def make(index: int, item: tuple[Part, AdvantageColumns]) -> Written:
        source, columns = item
        found = add_columns(read_checked(scored, "score", source), columns)
        check(found, "advantage", checked="score")
        return commit_part(output, index, found, dropped_by_reason)

    return make


def _before(config: AdvantageConfig, previous: Path | None) -> Manifest | None:
    """Return what the step before says of its KL; None where the coefficient begins, or is fixed."""
    return None if previous is None or config.kl_ctrl == "fixed" else read_manifest(previous, stage="advantage")


def preview(
    scored: Path, config: AdvantageConfig, models: Models = NO_MODELS, previous: Path | None = None
) -> pa.Table:
    """Return what `advantage` would write of scored shards; raises as it does."""
    config = replace(config, kl_reward_coef=coefficient(config, _before(config, previous)))
    estimator = _estimator(config)
    batch = Stored(scored, read_manifest(scored, stage="score"), _asks(config, estimator), models, Stopwatch())
    _check_named(batch.asks, models.policy, models.reference)
    tables = [batch.part(part) for part in batch.source.parts] or [schema_of("score").empty_table()]
    found = add_columns(pa.concat_tables(tables), _columns(batch, config, estimator)[0])
    check(found, "advantage", checked="score")
    return found


def _columns(
    batch: Stored, config: AdvantageConfig, estimator: Estimator, out: Output | None = None
) -> tuple[AdvantageColumns, Passed, list[int]]:
    """Return the columns of `advantage`, one value a row of the batch, what models gave, and where each part begins.

    Args:
        batch: Scored rows.
        config: The estimator, the shaping and the filters.
        estimator: The one that config names.
        out: Where parts of an interrupted run may hold what models gave.
    """
    watch = batch.watch
    names = [*COLUMNS, *LENGTHS * bool(config.overlong_buffer_length), *[MASK] * looks_at_tokens(config, estimator)]
    with watch("read"):
        facts = list(batch.columns(names)) or [schema_of("score").empty_table().select(names)]
    with watch("estimate"):
        trajectories = gather(facts)
        reasons = drop_reasons(trajectories, config)
    passed = Passed({}, [], trajectories.masks)
    if batch.asks:
        with watch("passes"):
            passed = _passes(batch, out, rows_needed(trajectories, reasons, config), config, trajectories.masks)
    with watch("estimate"):
        columns = estimate(trajectories, reasons, passed, config, estimator)
    return columns, passed, list(accumulate((table.num_rows for table in facts), initial=0))


def _estimator(config: AdvantageConfig) -> Estimator:
    name = config.estimator or "grpo"
    found = lookup("estimator", name)
    if not isinstance(found, Estimator):
        raise SettingsError(
            f"`{name}` is a {type(found).__name__}, not an Estimator", hint="docs/extending.md shows one"
        )
    return found


def needs_models(config: AdvantageConfig) -> bool:
    """Say whether any column needs a model."""
    return bool(_asks(config, _estimator(config)))


def _asks(config: AdvantageConfig, estimator: Estimator) -> set[str]:
    """Return the columns that need a model."""
    wanted = {
        "old_logprobs": config.old_logprobs == "recompute",
        "ref_logprobs": bool(config.ref_logprobs) or config.use_kl_in_reward,
        "values": estimator.needs_values,
    }
    return {name for name, is_wanted in wanted.items() if is_wanted}


def _check_named(asks: set[str], policy: Path | None, reference: Path | None) -> None:
    for column in sorted(asks - {"ref_logprobs"}):
        if policy is None:
            raise SettingsError(f"`{column}` needs a policy, and none is named", hint="Name one with `--policy`")
    if "ref_logprobs" in asks and reference is None:
        raise SettingsError(
            "`ref_logprobs` needs the reference policy, and none is named", hint="Name one with `--reference`"
        )


def head(
    scored: Path, config: AdvantageConfig, *, policy: Path | None = None, reference: Path | None = None,
    previous: Path | None = None, passes: "Passes | None" = None,
) -> Head:  # fmt: skip
    """Return what is known of advantages before they are estimated.

    Raises:
        InputError, SettingsError: as in `advantage`.
    """
    config = replace(config, estimator=config.estimator or "grpo")
    source = read_manifest(scored, stage="score")
    asks = _asks(config, _estimator(config))
    inputs = {source.stage: source.digest}
    if "ref_logprobs" in asks and reference is not None:
        inputs["reference"] = policy_digest(reference)
    if "values" in asks and policy is not None:
        check_critic(policy)
        inputs["critic"] = critic_digest(policy) or "untrained"
    if (before := _before(config, previous)) is not None:
        inputs["previous"] = before.digest
    starts = policy_digest(policy) if "old_logprobs" in asks and policy is not None else source.policy
    settings: dict[str, Any] = {"advantage": row_settings(config), **plugin_digests(str(config.estimator))}
    if passes is not None and asks:
        settings["passes"] = {"dtype": passes.learner.dtype}
    return Head(stage="advantage", settings=settings, inputs=inputs, policy=starts)


def _fresh_passes() -> "Passes":
    from nanoskyrl.stages.learning.learner import Learner
    from nanoskyrl.stages.learning.model_columns import Passes

    return Passes(Learner())


def _passes(batch: Stored, out: Output | None, needed: set[int], config: AdvantageConfig, masks: Rows) -> Passed:
    """Return the columns that models give, row by row; parts in place already hold theirs."""
    asked, passes = [name for name in PASSED if name in batch.asks], batch.models.passes or _fresh_passes()
    found: dict[str, list[np.ndarray | None]] = {name: [] for name in asked}
    sampled: list[np.ndarray | None] = []
    start = 0
    for index, part in enumerate(batch.source.parts):
        table = batch.part(part)
        if config.use_kl_in_reward:
            sampled += row_arrays(table.column("rollout_logprobs"))
        if out is not None and out.has_part(index) and not config.use_kl_in_reward:
            there = read_part(out.directory / part_name(index), columns=PASSED)
            made = {name: row_arrays(there.column(name)) for name in PASSED}
        else:
            rows_of = [row for row in range(table.num_rows) if start + row in needed]
            most = config.max_tokens_per_micro_batch
            columns = passes.columns(table.take(rows_of), batch.asks, batch.models, most) if rows_of else {}
            made = {name: _scattered(numbers, rows_of, table.num_rows) for name, numbers in columns.items()}
        for name in asked:
            found[name] += made.get(name) or [None] * table.num_rows
        start += table.num_rows
    return Passed(found, sampled, masks)


def _scattered(numbers: Sequence[np.ndarray], places: Sequence[int], count: int) -> list[np.ndarray | None]:
    by_place = dict(zip(places, numbers, strict=True))
    return [by_place.get(place) for place in range(count)]
