"""Stage `train`: one update of the policy from one table of advantages.

Mini-batches hold whole prompts. Every denominator is the mini-batch's, so how it is cut
into micro-batches changes nothing but rounding. The output holds the trained policy, the
state to go on from, and what the update did to each trajectory. It is all or nothing: a
killed train starts again from the previous state and ends with the same bytes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from nanoskyrl.algos.aggregate import Totals, reduction
from nanoskyrl.algos.base import Algorithm, SurrogateInputs
from nanoskyrl.algos.ratios import token_log_ratio
from nanoskyrl.stages.batching import MicroBatch, Sequences, collate_all, read_sequences
from nanoskyrl.stages.config import plugin_config, to_plain
from nanoskyrl.stages.digests import derive_seed
from nanoskyrl.stages.errors import InputError, SettingsError
from nanoskyrl.stages.learner import Learner, StepResult, one_temperature
from nanoskyrl.stages.manifest import Head, Manifest, is_finished, open_output, read_manifest
from nanoskyrl.stages.metrics import MetricsLog, Stopwatch, Value, mean, peak_memory_bytes
from nanoskyrl.stages.policy import policy_digest
from nanoskyrl.stages.registry import lookup
from nanoskyrl.stages.shards import read_parts
from nanoskyrl.stages.train_config import OptimizerConfig, TrainConfig
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
    algorithm: Algorithm = lookup("algo", config.algo)
    algo_config = plugin_config(settings or {}, "algo", config.algo)
    source = read_manifest(advantages, stage="advantage")
    _check_estimator(source, algorithm, config)
    _check_starting_policy(source, policy)
    plain = {key: value for key, value in to_plain(config).items() if key not in NOT_IN_MANIFEST}
    head = Head(
        stage="train",
        settings={"train": plain, config.algo: to_plain(algo_config), "seed": seed},
        inputs={"advantage": source.digest, **({"state": _state_of(state)} if state else {})},
        policy=policy_digest(policy),
    )
    table, sequences, temperature = None, None, 1.0
    if force or not is_finished(output):
        # Before an old output is cleared: what is to replace it can be made.
        with watch("read"):
            table = _kept_rows(read_parts(advantages, source), advantages)
            temperature = one_temperature(table)
            sequences = read_sequences(table)
        if not sum(sequences.trained_tokens):
            raise InputError(f"no row of `{advantages}` has a sampled token", hint="Raise the limits of the rollout")
        if state is not None and not state.is_dir():
            raise InputError(
                f"`{state}` has been pruned", hint="Train the newest step, or keep more with `loop.keep_states`"
            )
    with open_output(output, head, force=force, keep_parts=False) as out:
        if out.manifest is not None or table is None or sequences is None:
            return out.manifest or read_manifest(output)
        update = Update(algorithm, algo_config, config, sequences, temperature)
        with watch("load"):
            learner = engine or Learner(
                OptimizerConfig(**{f.name: getattr(config, f.name) for f in fields(OptimizerConfig)})
            )
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
            canary = np.concatenate([sequences.prompt_ids[0], sequences.response_ids[0]])
            digest = learner.save(output / "policy", output / "state", canary.tolist())
            out.write_part(0, update.diagnostics(table))
            facts = {"policy": digest, "optimizer_steps": len(steps), "lr": learner.lr, "lora_rank": learner.lora_rank}
            manifest = out.finish(rows_in=source.rows_out, facts=facts)
    log.write("train", {**update.summary(steps, watch), **watch.timings()})
    return manifest


def _check_estimator(source: Manifest, algorithm: Algorithm, config: TrainConfig) -> None:
    found = source.settings.get("advantage", {}).get("estimator")
    if found != algorithm.estimator and not config.allow_estimator:
        raise SettingsError(
            f"`{config.algo}` takes advantages of `{algorithm.estimator}`, and these are of `{found}`",
            hint=f"Run `skyrl advantage --estimator {algorithm.estimator}`, or pass `--allow-estimator`",
        )


def _check_starting_policy(source: Manifest, policy: Path) -> None:
    if source.settings.get("advantage", {}).get("old_logprobs") == "recompute" and source.policy != policy_digest(
        policy
    ):
        raise InputError(
            f"the old log-probs are of another policy than `{policy}`",
            hint="Run `skyrl advantage` again, with the policy that training starts from",
        )


def _state_of(state: Path) -> str:
    """Return the digest of the train that left this state: its files may have been pruned since."""
    return read_manifest(state.parent, stage="train").digest


def _kept_rows(tables: Iterable[pa.Table], place: Path) -> pa.Table:
    """Return the rows to learn from, after refusing those that a ratio would be wrong for."""
    found = list(tables)
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
    if any(value < 1 for value in kept.column("top_p").to_pylist()) or any(kept.column("top_k").to_pylist()):
        raise InputError(
            "rows were sampled with top_p below 1 or with top_k: their log-probs are of a truncated distribution",
            hint="Sample with top_p 1 and top_k 0 to train",
        )
    if kept.column("logprobs").null_count and kept.column("old_logprobs").null_count:
        raise InputError("rows have no log-probs", hint="Run `skyrl advantage --old-logprobs recompute`")
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
    """The loss of an algorithm over one table, and what was seen while it was made smaller."""

    def __init__(
        self, algorithm: Algorithm, algo_config: Any, config: TrainConfig, sequences: Sequences, temperature: float
    ) -> None:
        """Keep what the loss is made of."""
        self.algorithm, self.algo_config, self.config = algorithm, algo_config, config
        self.sequences, self.temperature = sequences, temperature
        self._weights = reduction(config.loss_reduction or algorithm.loss_reduction)
        self._sums = _Sums()
        self._gap = _Sums()
        self._steps_taken = 0
        self._largest_ratio = 0.0
        self._loss = 0.0
        self._rows = {
            name: np.zeros(len(sequences)) for name in ("tokens", "ratio", "ratio_max", "kl", "entropy", "share")
        }

    def step(self, learner: Learner, rows: list[int]) -> StepResult:
        """Take one optimizer step on these rows."""
        trained = self.sequences.trained_tokens
        totals = Totals(tokens=sum(trained[row] for row in rows), rows=len(rows), horizon=self.config.horizon)
        batches = collate_all(self.sequences, rows, self.config.max_tokens_per_micro_batch, learner.device)
        self._loss = 0.0
        result = learner.step(batches, lambda batch: self._loss_of(learner, batch, totals))
        self._steps_taken += 1
        return result

    def _loss_of(self, learner: Learner, batch: MicroBatch, totals: Totals) -> Tensor:
        found = learner.statistics(batch, self.temperature)
        log_ratio = token_log_ratio(found.logprobs, batch.old_logprobs, batch.loss_mask)
        objective, reported = self.algorithm.surrogate(
            SurrogateInputs(log_ratio, batch.advantages, batch.loss_mask), self.algo_config
        )
        on = batch.loss_mask.bool()
        loss = -(objective.masked_fill(~on, 0.0) * self._weights(batch.loss_mask, totals)).sum()
        with torch.no_grad():
            self._observe(batch, log_ratio.detach(), found.logprobs.detach(), found.entropy, reported)
        self._loss += float(loss.detach())
        return loss

    def _observe(
        self, batch: MicroBatch, log_ratio: Tensor, logprobs: Tensor, entropy: Tensor, reported: dict[str, Tensor]
    ) -> None:
        mask, ratio = batch.loss_mask, log_ratio.exp()
        kl = (-log_ratio).exp() + log_ratio - 1  # k3 of the trained against the old policy
        self._sums.add(mask, {"ratio": ratio, "kl": kl, "entropy": entropy, **reported})
        if not self._steps_taken:  # later the policy is another than the one that sampled
            self._gap.add(mask, {"gap": (logprobs - batch.logprobs).abs()})
        on = mask.bool()
        self._largest_ratio = max(self._largest_ratio, float(ratio.masked_fill(~on, 0).max()))
        share = next(iter(reported.values()), torch.zeros_like(mask))
        for name, value in (("tokens", mask), ("ratio", ratio), ("kl", kl), ("entropy", entropy), ("share", share)):
            self._rows[name][batch.rows] += (value * mask).sum(-1).double().cpu().numpy()
        largest = ratio.masked_fill(~on, 0).max(-1).values.double().cpu().numpy()
        self._rows["ratio_max"][batch.rows] = np.maximum(self._rows["ratio_max"][batch.rows], largest)

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
                pa.array(tokens.astype(np.int32) // self.config.update_epochs_per_batch),
                per_token("ratio"),
                pa.array(self._rows["ratio_max"], pa.float64(), mask=nothing),
                per_token("kl"),
                per_token("entropy"),
                per_token("share"),
            ],
            schema=DIAGNOSTICS,
        )

    def summary(self, steps: list[StepResult], watch: Stopwatch) -> dict[str, Value]:
        """Return the numbers of the update."""
        means = self._sums.means()
        tokens = sum(self.sequences.lengths) * self.config.update_epochs_per_batch
        return {
            "train/loss": self._loss,
            "train/lr": steps[-1].lr if steps else None,
            "train/grad_norm": mean(step.grad_norm for step in steps),
            "train/skipped_steps": sum(step.skipped for step in steps),
            "train/optimizer_steps": len(steps),
            "train/rows": len(self.sequences),
            "train/tokens_per_second": tokens / max(watch.seconds.get("train", 0.0), 1e-9),
            "train/peak_memory_bytes": peak_memory_bytes(),
            "train/ratio/mean": means.pop("ratio", None),
            "train/ratio/max": self._largest_ratio,
            "policy/ppo_kl": means.pop("kl", None),
            "policy/policy_entropy": means.pop("entropy", None),
            "policy/rollout_train_logprobs_abs_diff_mean": self._gap.means().get("gap"),
            **{f"policy/{name}": value for name, value in means.items()},
        }
