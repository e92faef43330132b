"""Stage `train`: one update of the policy from one table of advantages.

Mini-batches hold whole prompts. Every denominator is the mini-batch's, so how it is cut
into micro-batches changes nothing but rounding. The output holds the trained policy, the
state to go on from, and what the update did to each trajectory. It is all or nothing: a
killed train starts again from the previous state and ends with the same bytes.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from nanoskyrl.algos.base import Algorithm
from nanoskyrl.algos.off_policy import OffPolicyConfig
from nanoskyrl.stages.batching import MicroBatch, Sequences, read_sequences
from nanoskyrl.stages.config import plugin_config, stage_config, to_plain
from nanoskyrl.stages.critic import critic_digest
from nanoskyrl.stages.digests import derive_seed
from nanoskyrl.stages.errors import InputError, SettingsError
from nanoskyrl.stages.learner import Learner, StepResult, one_temperature
from nanoskyrl.stages.manifest import Head, Manifest, is_finished, open_output, read_manifest
from nanoskyrl.stages.metrics import MetricsLog, Stopwatch, Value, mean, peak_memory_bytes
from nanoskyrl.stages.objective import Objective, Terms
from nanoskyrl.stages.policy import policy_digest
from nanoskyrl.stages.registry import lookup
from nanoskyrl.stages.shards import read_parts
from nanoskyrl.stages.train_config import CriticConfig, OptimizerConfig, TrainConfig, check_horizon
from nanoskyrl.stages.trajectory import check

NOT_IN_MANIFEST = ("device",)
DIAGNOSTICS = pa.schema(
    [
        pa.field("trajectory_id", pa.string(), nullable=False),
        pa.field("step_index", pa.int32(), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("ratio_mean", pa.float64()),
        pa.field("ratio_max", pa.float64()),
        pa.field("kl", pa.float64()),
        pa.field("entropy", pa.float64()),
        pa.field("share", pa.float64()),
    ]
)
"""What training saw of each row: over its sampled tokens and all passes, ratio to the old policy, k3 estimate of
KL(old || trained) in nats, entropy in nats, and the surrogate's own share (clipped, or let through by the gate)."""


def train(
    advantages: Path,
    output: Path,
    config: TrainConfig,
    *,
    policy: Path,
    state: Path | None = None,
    settings: dict[str, dict[str, Any]] | None = None,
    seed: int = 0,
    engine: Learner | None = None,
    force: bool = False,
    log: MetricsLog = MetricsLog(),
) -> Manifest:
    """Update a policy once.

    Args:
        advantages: Shards written by `advantage`.
        output: Directory for the trained policy, the state and the diagnostics.
        config: The algorithm and the optimizer.
        policy: Where training starts from.
        state: The `state/` of the train that made `policy`; None starts the optimizer afresh.
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
    source = read_manifest(advantages, stage="advantage")
    recipe.check(source)
    check_start(source, policy)
    plain = {key: value for key, value in to_plain(config).items() if key not in NOT_IN_MANIFEST}
    head = Head(
        stage="train",
        settings={"train": plain, config.algo: to_plain(recipe.algo_config), "seed": seed, **recipe.described()},
        inputs={"advantage": source.digest, **({"state": _state_of(state)} if state else {})},
        policy=policy_digest(policy),
    )
    table, objective = None, None
    if force or not is_finished(output):
        # Before an old output is cleared: what is to replace it can be made.
        with watch("read"):
            table = read_kept(advantages, source, recipe)
            objective = recipe.objective(table)
        if state is not None and not state.is_dir():
            raise InputError(
                f"`{state}` has been pruned", hint="Train the newest step, or keep more with `loop.keep_states`"
            )
    with open_output(output, head, force=force, keep_parts=False) as out:
        if out.manifest is not None or table is None or objective is None:
            return out.manifest or read_manifest(output)
        update = Update(objective)
        with watch("load"):
            learner = engine or recipe.learner()
            learner.load(policy, state, seed=derive_seed(seed, "adapters") % 2**32)
        steps = []
        with watch("train"):
            # A trajectory's id comes from run seed, step and task: the order does not change with the code's version.
            drawn_for = table.column("trajectory_id")[0].as_py()
            torch.manual_seed(derive_seed(seed, "train", drawn_for) % 2**32)
            groups = table.column("group_id").to_pylist()
            for epoch in range(config.update_epochs_per_batch):
                order = mini_batches(groups, config.policy_mini_batch_size, derive_seed(seed, drawn_for, epoch))
                steps += [update.step(learner, rows) for rows in order]
        with watch("save"):
            sequences = objective.sequences
            canary = np.concatenate([sequences.prompt_ids[0], sequences.response_ids[0]])
            digest = learner.save(output / "policy", output / "state", canary.tolist())
            out.write_part(0, update.diagnostics(table))
            facts = {"policy": digest, "optimizer_steps": len(steps), "lr": learner.lr, "lora_rank": learner.lora_rank}
            if recipe.critic is not None:
                facts["critic"] = critic_digest(output / "policy")
            manifest = out.finish(rows_in=source.rows_out, facts=facts)
    log.write("train", {**update.summary(steps, watch), **watch.timings()})
    return manifest


def preview(
    advantages: Path,
    config: TrainConfig,
    *,
    policy: Path,
    settings: dict[str, dict[str, Any]] | None = None,
    seed: int = 0,
) -> dict[str, Value]:
    """Return the terms of the loss that the first optimizer step would meet, and its gradient's norm; nothing changes.

    Raises:
        SettingsError, InputError: as in `train`.
    """
    recipe = recipe_of(config, settings or {})
    source = read_manifest(advantages, stage="advantage")
    recipe.check(source)
    check_start(source, policy)
    table = read_kept(advantages, source, recipe)
    objective = recipe.objective(table)
    learner = recipe.learner()
    learner.load(policy, seed=derive_seed(seed, "adapters") % 2**32)
    groups, drawn_for = table.column("group_id").to_pylist(), table.column("trajectory_id")[0].as_py()
    rows = mini_batches(groups, config.policy_mini_batch_size, derive_seed(seed, drawn_for, 0))[0]
    update = Update(objective)
    norm = float(update.gradient(learner, rows).norm())
    return {
        "rows": len(rows),
        "tokens": sum(objective.sequences.trained_tokens[row] for row in rows),
        "gradient norm": norm,
        **update.seen(),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """An algorithm with all of its settings: what a table of advantages must fit, before any model is loaded."""

    algorithm: Algorithm
    algo_config: Any
    config: TrainConfig
    off_policy: OffPolicyConfig
    critic: CriticConfig | None

    def described(self) -> dict[str, Any]:
        """Return the settings beside [train] and the algorithm's that can change the weights."""
        return {"off_policy": to_plain(self.off_policy), **({"critic": to_plain(self.critic)} if self.critic else {})}

    def learner(self) -> Learner:
        """Return a learner that holds nothing yet."""
        return Learner(
            OptimizerConfig(**{f.name: getattr(self.config, f.name) for f in fields(OptimizerConfig)}),
            critic=self.critic,
        )

    def objective(self, table: pa.Table) -> Objective:
        """Return the loss over these rows."""
        return Objective(
            self.algorithm, self.algo_config, self.config, read_sequences(table), one_temperature(table),
            off_policy=self.off_policy, critic=self.critic,
        )  # fmt: skip

    def check(self, source: Manifest) -> None:
        """Refuse advantages that are not this algorithm's.

        Raises:
            SettingsError: names the command that makes the right ones.
        """
        check_horizon(self.config.loss_reduction or self.algorithm.loss_reduction, self.config.horizon)
        made = source.settings.get("advantage", {})
        name = self.config.algo
        if made.get("use_kl_in_reward") and self.config.use_kl_loss:
            raise SettingsError(
                "the KL to the reference stands in the reward already, and `train.use_kl_loss` is on",
                hint="Switch one of them off",
            )
        if self.config.allow_estimator:
            return
        wanted, found = self.algorithm.estimator, made.get("estimator")
        if found != wanted:
            raise SettingsError(
                f"`{name}` takes advantages of `{wanted}`, and these are of `{found}`",
                hint=f"Run `skyrl advantage --algo {name}`, or pass `--allow-estimator`",
            )
        if made.get("overlong_buffer_length") and not self.algorithm.overlong_punishment:
            raise SettingsError(
                f"`{name}` does not shape rewards by length, and these advantages are of shaped ones",
                hint="Run `skyrl advantage --set advantage.overlong_buffer_length=0`, or pass `--allow-estimator`",
            )
        if made.get("use_kl_in_reward") and self.algorithm.kl_place != "reward":
            raise SettingsError(
                f"`{name}` has no KL in its reward, and these advantages have",
                hint="Run `skyrl advantage --set advantage.use_kl_in_reward=false`, or pass `--allow-estimator`",
            )

    def check_rows(self, kept: pa.Table) -> None:
        """Refuse rows that lack what the loss reads, or for which a ratio would be wrong.

        Raises:
            InputError: names what is missing and how to get it.
        """
        algorithm, name = self.algorithm, self.config.algo
        if algorithm.uses_ratio and (
            any(value < 1 for value in kept.column("top_p").to_pylist()) or any(kept.column("top_k").to_pylist())
        ):
            raise InputError(
                "rows were sampled with top_p below 1 or with top_k: their log-probs are of a truncated distribution",
                hint="Sample with top_p 1 and top_k 0 to train",
            )
        missing = {column: bool(kept.column(column).null_count) for column in ("logprobs", "old_logprobs")}
        if all(missing.values()):
            raise InputError("rows have no log-probs", hint="Run `skyrl advantage --old-logprobs recompute`")
        if self.off_policy.on and any(missing.values()):
            raise InputError(
                "`off_policy` weighs old log-probs against the sampling policy's, and rows lack "
                f"{' and '.join(column for column, gone in missing.items() if gone)}",
                hint="Sample with recorded log-probs, and run `skyrl advantage --old-logprobs recompute`",
            )
        if self.off_policy.negative_threshold is not None and missing["logprobs"]:
            raise InputError(
                "`off_policy.negative_threshold` needs the sampling policy's log-probs, and rows have none",
                hint="Sample with `rollout.logprobs_mode = processed`",
            )
        if self.critic is not None and (kept.column("values").null_count or kept.column("returns").null_count):
            raise InputError(f"`{name}` needs a critic's values", hint=f"Run `skyrl advantage --algo {name}`")
        if self.config.use_kl_loss and kept.column("ref_logprobs").null_count:
            raise InputError(
                "`train.use_kl_loss` needs log-probs under the reference, and rows have none",
                hint="Run `skyrl advantage --ref-logprobs`",
            )


def recipe_of(config: TrainConfig, settings: dict[str, dict[str, Any]]) -> Recipe:
    """Return an algorithm with all of its settings."""
    algorithm: Algorithm = lookup("algo", config.algo)
    return Recipe(
        algorithm=algorithm,
        algo_config=plugin_config(settings, "algo", config.algo),
        config=config,
        off_policy=stage_config(settings, "off_policy"),
        critic=stage_config(settings, "critic") if algorithm.needs_critic else None,
    )


def check_start(source: Manifest, policy: Path) -> None:
    """Refuse a policy whose log-probs, or whose critic's values, the advantages do not hold.

    Raises:
        InputError: they are of another one.
    """
    made = source.settings.get("advantage", {})
    recomputed = made.get("old_logprobs") == "recompute"
    of_critic = "critic" in source.facts and source.facts["critic"] != critic_digest(policy)
    if (recomputed and source.policy != policy_digest(policy)) or of_critic:
        raise InputError(
            f"the {'values' if of_critic else 'old log-probs'} are of another policy than `{policy}`",
            hint="Run `skyrl advantage` again, with the policy that training starts from",
        )


def _state_of(state: Path) -> str:
    """Return the digest of the train that left this state: its files may have been pruned since."""
    return read_manifest(state.parent, stage="train").digest


def read_kept(place: Path, source: Manifest, recipe: Recipe) -> pa.Table:
    """Return the rows to learn from, after refusing those that the recipe cannot use.

    Raises:
        InputError: nothing is kept, or the rows lack what the loss reads.
    """
    found = list(read_parts(place, source))
    if not found:
        raise InputError(f"`{place}` has no parts", hint="Run `skyrl advantage` again, with `--force`")
    table = pa.concat_tables(found).combine_chunks()
    check(table, "advantage")
    kept = table.filter(table.column("kept"))
    if not kept.num_rows:
        reasons = sorted({reason for reason in table.column("drop_reason").to_pylist() if reason})
        raise InputError(
            f"no row of `{place}` is kept ({', '.join(reasons) or 'it is empty'})",
            hint="Look at the rows with `skyrl show`",
        )
    recipe.check_rows(kept)
    if not sum(read_sequences(kept).trained_tokens):
        raise InputError(f"no row of `{place}` has a sampled token", hint="Raise the limits of the rollout")
    return kept


def mini_batches(groups: list[str], size: int | None, seed: int) -> list[list[int]]:
    """Return the rows of each optimizer step: whole groups, `size` to a step, in an order drawn by the seed."""
    rows: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    names = list(rows)
    if size is None or size >= len(names):
        return [list(range(len(groups)))]
    order = np.random.Generator(np.random.Philox(key=seed)).permutation(len(names))
    return [
        [row for i in order[start : start + size] for row in rows[names[i]]] for start in range(0, len(names), size)
    ]


@dataclass(slots=True)
class _Sums:
    """Running totals over sampled tokens."""

    tokens: float = 0.0
    values: dict[str, float] = field(default_factory=dict)

    def add(self, mask: Tensor, values: dict[str, Tensor]) -> None:
        self.tokens += float(mask.sum())
        for name, value in values.items():
            self.values[name] = self.values.get(name, 0.0) + float((value * mask).sum())

    def means(self) -> dict[str, float]:
        return {name: value / self.tokens for name, value in self.values.items()} if self.tokens else {}


class Update:
    """One pass after another over a table, and what was seen on the way."""

    def __init__(self, objective: Objective) -> None:
        """Begin with nothing seen."""
        self.objective = objective
        self.sequences: Sequences = objective.sequences
        self._sums, self._gap = _Sums(), _Sums()
        self._steps_taken = 0
        self._largest_ratio = 0.0
        self._losses: dict[str, float] = {}
        self._rows = {
            name: np.zeros(len(self.sequences)) for name in ("tokens", "ratio", "ratio_max", "kl", "entropy", "share")
        }

    def step(self, learner: Learner, rows: list[int]) -> StepResult:
        """Take one optimizer step on these rows."""
        mini = self.objective.mini_batch(rows)
        self._losses = {}
        batches = self.objective.batches(mini, learner.device)
        result = learner.step(batches, lambda batch: self._seen(batch, self.objective.terms(learner, batch, mini)))
        self._steps_taken += 1
        return result

    def gradient(self, learner: Learner, rows: list[int]) -> Tensor:
        """Return the gradient that a step on these rows would follow."""
        mini = self.objective.mini_batch(rows)
        batches = self.objective.batches(mini, learner.device)
        return learner.gradient(batches, lambda batch: self._seen(batch, self.objective.terms(learner, batch, mini)))

    @torch.no_grad()
    def _observe(self, batch: MicroBatch, terms: Terms) -> None:
        mask, on, ratio = batch.loss_mask, batch.loss_mask.bool(), terms.log_ratio.exp()
        kl = (-terms.log_ratio).exp() + terms.log_ratio - 1  # k3 of the trained against the old policy
        values = {"ratio": ratio, "kl": kl, "entropy": terms.entropy, **terms.reported}
        self._sums.add(mask, values)
        if not self._steps_taken:  # later the policy is another than the one that sampled
            self._gap.add(mask, {"gap": (terms.logprobs - batch.logprobs).abs()})
        largest = ratio.masked_fill(~on, 0)
        self._largest_ratio = max(self._largest_ratio, float(largest.max()))
        share = next(iter(terms.reported.values()), torch.zeros_like(mask))
        for name, value in (
            ("tokens", mask), ("ratio", ratio), ("kl", kl), ("entropy", terms.entropy), ("share", share),
        ):  # fmt: skip
            self._rows[name][batch.rows] += (value * mask).sum(-1).double().cpu().numpy()
        of_row = largest.max(-1).values.double().cpu().numpy()
        self._rows["ratio_max"][batch.rows] = np.maximum(self._rows["ratio_max"][batch.rows], of_row)
        for name, term in (
            ("loss", terms.loss), ("policy_loss", terms.policy_loss), ("kl_loss", terms.kl_loss),
            ("value_loss", terms.value_loss),
        ):  # fmt: skip
            if term is not None:
                self._losses[name] = self._losses.get(name, 0.0) + float(term)

    def _seen(self, batch: MicroBatch, terms: Terms) -> Tensor:
        self._observe(batch, terms)
        return terms.loss

    def diagnostics(self, table: pa.Table) -> pa.Table:
        """Return what was seen of each row."""
        tokens = self._rows["tokens"]
        nothing = tokens == 0

        def per_token(name: str) -> pa.Array:
            return pa.array(self._rows[name] / np.maximum(tokens, 1), pa.float64(), mask=nothing)

        return pa.Table.from_arrays(
            [
                table.column("trajectory_id").combine_chunks(),
                table.column("step_index").combine_chunks(),
                pa.array(tokens.astype(np.int32) // self.objective.config.update_epochs_per_batch),
                per_token("ratio"),
                pa.array(self._rows["ratio_max"], pa.float64(), mask=nothing),
                per_token("kl"),
                per_token("entropy"),
                per_token("share"),
            ],
            schema=DIAGNOSTICS,
        )

    def seen(self) -> dict[str, Value]:
        """Return the losses of the last mini-batch, and means over all trained tokens and passes."""
        means = self._sums.means()
        return {
            **{f"train/{name}": value for name, value in self._losses.items()},
            "train/ratio/mean": means.pop("ratio", None),
            "train/ratio/max": self._largest_ratio,
            "policy/ppo_kl": means.pop("kl", None),
            "policy/policy_entropy": means.pop("entropy", None),
            "policy/rollout_train_logprobs_abs_diff_mean": self._gap.means().get("gap"),
            **{f"policy/{name}": value for name, value in means.items()},
        }

    def summary(self, steps: list[StepResult], watch: Stopwatch) -> dict[str, Value]:
        """Return the numbers of the update."""
        tokens = sum(self.sequences.lengths) * self.objective.config.update_epochs_per_batch
        found = {
            "train/lr": steps[-1].lr if steps else None,
            "train/grad_norm": mean(step.grad_norm for step in steps),
            "train/skipped_steps": sum(step.skipped for step in steps),
            "train/optimizer_steps": len(steps),
            "train/rows": len(self.sequences),
            "train/tokens_per_second": tokens / max(watch.seconds.get("train", 0.0), 1e-9),
            "train/peak_memory_bytes": peak_memory_bytes(),
            **self.seen(),
        }
        if self.objective.critic is not None:
            found["critic/grad_norm"] = mean(step.critic_grad_norm or 0.0 for step in steps)
            found["critic/explained_variance"] = self._explained_variance()
        return found

    def _explained_variance(self) -> float | None:
        """Return how much of the returns' variance the old values foretold: 1 is all, 0 no more than their mean."""
        chosen = [mask != 0 for mask in self.sequences.loss_mask]
        returns, values = (
            np.concatenate([np.asarray(row)[on] for row, on in zip(rows, chosen, strict=True)])
            for rows in (self.sequences.returns, self.sequences.values)
        )
        variance = float(returns.var())
        return 1 - float((returns - values).var()) / variance if variance > 0 else None
