"""Stage `train`: one update of the policy from one table of advantages.

Mini-batches hold whole prompts. Every denominator is the mini-batch's, so how it is cut
into micro-batches changes nothing but rounding. The output holds the trained policy, the
state to resume from, and what the update did to each trajectory. It is all or nothing: a
killed train starts again from the previous state and ends with the same bytes.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nanoskyrl.stages.core.config import row_settings
from nanoskyrl.stages.core.digests import derive_seed
from nanoskyrl.stages.core.errors import EngineError, InputError
from nanoskyrl.stages.core.manifest import Head, Manifest, is_finished, read_manifest
from nanoskyrl.stages.core.metrics import MetricsLog, Stopwatch, Value
from nanoskyrl.stages.core.output import open_output
from nanoskyrl.stages.core.runs import Trained
from nanoskyrl.stages.core.storage import is_local, written_here
from nanoskyrl.stages.learning.learner import Learner
from nanoskyrl.stages.learning.process_group import join
from nanoskyrl.stages.learning.recipe import Recipe, recipe_of
from nanoskyrl.stages.learning.replay import check_state, remade_state, scratch_of
from nanoskyrl.stages.learning.train_config import TrainConfig
from nanoskyrl.stages.learning.update import Update, mini_batches, old_logprobs_of
from nanoskyrl.stages.learning.update_inputs import Sources, open_sources
from nanoskyrl.stages.models.device import pick_device
from nanoskyrl.stages.models.policy import critic_digest, policy_digest


def train(
    advantages: Path | Sequence[Path],
    output: Path,
    config: TrainConfig,
    *,
    policy: Path,
    state: Path | None = None,
    since: Sequence[Trained] = (),
    with_state: bool = True,
    beside: bool = False,
    settings: dict[str, dict[str, Any]] | None = None,
    seed: int = 0,
    engine: Learner | None = None,
    force: bool = False,
    log: MetricsLog = MetricsLog(),
) -> Manifest:
    """Update a policy once.

    Args:
        advantages: Shards written by `advantage`; of several, the step's own come first.
        output: Directory for the trained policy, the state and the diagnostics.
        config: The algorithm and the optimizer.
        policy: Where training starts from.
        state: The `state/` of the train that made `policy`; None starts the optimizer afresh.
        since: Where that state is not there, the updates by which it is made again, the oldest first.
        with_state: Whether to write the state that the next update starts from.
        beside: Return before that state is in its place: `engine.settle` waits for it. A process that is killed
            meanwhile leaves none, as if it had not been asked for.
        settings: The algorithm's table.
        seed: Of the run; the order of mini-batches and new adapters follow from it and the input.
        engine: A live learner; else one is made here.
        force: Replace an output made under other settings.
        log: Where numbers go.

    Raises:
        SettingsError: advantages of another estimator, or settings that cannot work together.
        InputError: the input is missing, unfinished, untrainable, or nothing in it is kept.
    """
    watch = Stopwatch()
    recipe = recipe_of(config, settings or {})
    world = engine.world if engine is not None else join(pick_device(config.device))
    sources = open_sources([advantages] if isinstance(advantages, Path) else advantages, recipe, policy)
    ours = _head(recipe, sources, policy, state, seed, world.size)
    table, objective, learner, tokens, age = None, None, None, [], {}
    if world.broadcast(force or not is_finished(output)):
        # Before an old output is cleared: what is to replace it can be made.
        with watch("read"):
            table, tokens, age = sources.read(recipe, policy)
            objective = None if sources.recompute else recipe.objective(table)
        learner, drawn = engine or recipe.learner(), derive_seed(seed, "adapters") % 2**32
        held = learner.holds(policy, state, seed=drawn)
        if since and not held:
            with watch("replay"), world.if_main(scratch_of(since)) as scratch:
                place = Path(str(world.broadcast(scratch)))
                learner.load(policy, remade_state(since, place, learner), seed=drawn)
                world.barrier()
            age |= {"train/replayed_updates": len(since)}
        elif state is not None and not held:
            check_state(state)
            with watch("load"):
                learner.load(policy, state, seed=drawn)
        else:
            with watch("load"):
                learner.load(policy, state, seed=drawn)
    with world.if_main(open_output(output, ours, force=force, keep_parts=False)) as out:
        if world.broadcast(out is not None and out.manifest is not None) or table is None or learner is None:
            return (out and out.manifest) or read_manifest(output)
        if objective is None:
            with watch("passes"):
                objective = recipe.objective(table, old_logprobs_of(table, learner, config.max_tokens_per_micro_batch))
        update = Update(objective)
        with watch("train"):
            steps = update.steps(learner, table, seed)
            update.gather(world)
        taken = sum(not step.skipped for step in steps)
        if steps and not taken:
            raise EngineError(
                f"the gradient was not finite in any of {len(steps)} optimizer steps",
                hint="Lower `train.lr`, or look at the algorithm's settings; the policy is as it was",
            )
        with watch("save"):
            with written_here(output) as place:
                # Behind a URL all of it is put in place at once.
                beside = beside and is_local(output)
                files = learner.save(place / "policy", place / "state", tokens, with_state=with_state, beside=beside)
            if out is None:
                # Under a barrier: it is not there before the first process has written it.
                world.barrier()
                return read_manifest(output)
            out.write_part(0, update.diagnostics(table))
            facts = {
                "policy": policy_digest(output / "policy"),
                "optimizer_steps": taken,
                "lr": learner.lr,
                "lora_rank": learner.lora_rank,
            }
            if update.work.shared:
                facts |= {"tokens": update.work.tokens, "computed_tokens": update.work.computed}
            if learner.lora_rank:
                facts |= {"parameters": learner.parameters, "trained_parameters": learner.trained_parameters}
            if age.get("train/staleness/dropped"):
                facts["stale_rows"] = age["train/staleness/dropped"]
            if recipe.critic is not None:
                facts["critic"] = critic_digest(output / "policy")
            states = {f"state/{name}": digest for name, digest in files.items()}
            manifest = out.finish(rows_in=sources.rows, facts=facts, files=states)
            world.barrier()
    log.write("train", {**update.summary(steps, watch, learner), **age, **watch.timings()})
    return manifest


def head(
    advantages: Sequence[Path],
    config: TrainConfig,
    *,
    policy: Path,
    state: Path | None = None,
    settings: dict[str, dict[str, Any]] | None = None,
    seed: int = 0,
    processes: int = 1,
) -> Head:
    """Return what is known of an update before it begins.

    Args:
        advantages: Shards written by `advantage`; of several, the step's own come first.
        config: The algorithm and the optimizer.
        policy: Where training starts from.
        state: The `state/` of the train that made `policy`.
        settings: The algorithm's table.
        seed: Of the run.
        processes: That would train together.

    Raises:
        SettingsError, InputError: as in `train`.
    """
    recipe = recipe_of(config, settings or {})
    return _head(recipe, open_sources(advantages, recipe, policy), policy, state, seed, processes)


def _head(recipe: Recipe, sources: Sources, policy: Path, state: Path | None, seed: int, processes: int) -> Head:
    config = recipe.config
    return Head(
        stage="train",
        settings={
            "train": row_settings(config),
            config.algo: row_settings(recipe.algo_config),
            "seed": seed,
            **recipe.described(),
            # How sums are cut changes rounding.
            **({"processes": processes} if processes > 1 else {}),
        },
        inputs={**sources.digests, **({"state": _state_of(state)} if state else {})},
        policy=policy_digest(policy),
    )


def preview(
    advantages: Path | Sequence[Path],
    config: TrainConfig,
    *,
    policy: Path,
    settings: dict[str, dict[str, Any]] | None = None,
    seed: int = 0,
) -> dict[str, Value]:
    """Return the terms of the loss that the first optimizer step would meet, its gradient's norm, and the rows' age.

    Nothing changes. The optimizer's state is not looked at: none of these numbers follows from it.

    Raises:
        SettingsError, InputError: as in `train`.
        EngineError: the gradient is not finite.
    """
    recipe = recipe_of(config, settings or {})
    sources = open_sources([advantages] if isinstance(advantages, Path) else advantages, recipe, policy)
    table, _, age = sources.read(recipe, policy)
    if not table.num_rows:
        return {"rows": 0}
    objective = None if sources.recompute else recipe.objective(table)
    learner = recipe.learner()
    learner.load(policy, seed=derive_seed(seed, "adapters") % 2**32)
    if objective is None:
        objective = recipe.objective(table, old_logprobs_of(table, learner, config.max_tokens_per_micro_batch))
    groups, drawn_for = table.column("group_id").to_pylist(), table.column("trajectory_id")[0].as_py()
    rows = mini_batches(groups, config.policy_mini_batch_size, derive_seed(seed, drawn_for, 0))[0]
    update = Update(objective)
    norm = float(torch.linalg.vector_norm(update.gradient(learner, rows), dtype=torch.float64))
    if not math.isfinite(norm):
        raise EngineError("the gradient is not finite", hint="Look at the algorithm's settings, and at the shard")
    return {
        "rows": len(rows),
        "tokens": sum(objective.sequences.trained_tokens[row] for row in rows),
        "gradient norm": norm,
        **update.seen(),
        **age,
    }


def _state_of(state: Path) -> str:
    """Return the digest of the train that left this state: its files may have been pruned since.

    Raises:
        InputError: no train left it.
    """
    if not is_finished(state.parent):
        raise InputError(
            f"`{state}` is no optimizer state of a finished train", hint="Name the folder `state` of one, by `--state`"
        )
    return read_manifest(state.parent, stage="train").digest
