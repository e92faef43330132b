"""Passes of an optimizer over one table, and what is seen on the way."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import torch

from nanoskyrl.algos.kl import kl as token_kl
from nanoskyrl.stages.core.metrics import Stopwatch, Value, grouped, mean, peak_memory_bytes
from nanoskyrl.stages.learning.batching import MicroBatch, Sequences
from nanoskyrl.stages.learning.learner import Learner
from nanoskyrl.stages.learning.objective import Objective, Terms
from nanoskyrl.stages.learning.process_group import ProcessGroup
from nanoskyrl.stages.learning.stepping import StepResult
from nanoskyrl.stages.models.packing import Workload, work_of

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


def mini_batches(groups: list[str], size: int | None, seed: int) -> list[list[int]]:
    """Return the rows of each optimizer step: whole groups, `size` to a step, in an order drawn by the seed."""
    rows = grouped((group, row) for row, group in enumerate(groups))
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

    def add(self, mask: torch.Tensor, values: dict[str, torch.Tensor]) -> None:
        self.tokens += float(mask.sum())
        for name, value in values.items():
            self.values[name] = self.values.get(name, 0.0) + float((value * mask).sum())

    def merge(self, all_sums: list[tuple[float, dict[str, float]]]) -> None:
        """Take the sums of several in place of its own."""
        self.tokens = sum(tokens for tokens, _ in all_sums)
        names = sorted({name for _, values in all_sums for name in values})
        self.values = {name: sum(values.get(name, 0.0) for _, values in all_sums) for name in names}

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
        self._lengths = self.sequences.lengths
        self.work = Workload()
        """Of all passes."""
        self._largest_ratio = 0.0
        self._losses: dict[str, float] = {}
        self._rows = {
            name: np.zeros(len(self.sequences)) for name in ("tokens", "ratio", "ratio_max", "kl", "entropy", "share")
        }

    def step(self, learner: Learner, rows: list[int]) -> StepResult:
        """Take one optimizer step on these rows."""
        result = learner.step(*self.watched(learner, rows))
        self._steps_taken += 1
        return result

    def gradient(self, learner: Learner, rows: list[int]) -> torch.Tensor:
        """Return the gradient that a step on these rows would follow."""
        return learner.gradient(*self.watched(learner, rows))

    def watched(
        self, learner: Learner, rows: list[int]
    ) -> tuple[Iterator[MicroBatch | None], Callable[[MicroBatch], torch.Tensor]]:
        """Return the micro-batches of one mini-batch, and their losses, which are noted as they are taken."""
        mini = self.objective.mini_batch(rows)
        self._losses = {}
        batches = self.objective.batches(mini, learner)
        return batches, lambda batch: self._seen(batch, self.objective.terms(learner, batch, mini))

    @torch.no_grad()
    def _observe(self, batch: MicroBatch, terms: Terms) -> None:
        self.work += work_of([self._lengths[row] for row in batch.rows]) if batch.pack is None else batch.pack.work
        mask, on, ratio = batch.loss_mask, batch.loss_mask.bool(), terms.log_ratio.exp()
        kl = (-terms.log_ratio).exp() + terms.log_ratio - 1  # k3 of the trained against the old policy
        values = {"ratio": ratio, "kl": kl, "entropy": terms.entropy, **terms.reported}
        self._sums.add(mask, values)
        if not self._steps_taken:  # later the policy is another than the one that sampled
            recorded = [self.sequences.rollout_logprobs[row] is not None for row in batch.rows]
            there = mask * torch.tensor(recorded, device=mask.device)[:, None]
            gap = (terms.logprobs - batch.rollout_logprobs).abs()
            # Of the engine against the trainer, whose policy is meant to be the same.
            self._gap.add(there, {"gap": gap, "kl": token_kl(batch.rollout_logprobs, terms.logprobs, there, "k3")})
        largest = ratio.masked_fill(~on, 0)
        self._largest_ratio = max(self._largest_ratio, float(largest.max()))
        share = torch.zeros_like(mask) if terms.share is None else terms.share
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

    def _seen(self, batch: MicroBatch, terms: Terms) -> torch.Tensor:
        self._observe(batch, terms)
        return terms.loss

    def gather(self, world: ProcessGroup) -> None:
        """Add up what all processes saw."""
        if world.size == 1:
            return
        for sums in (self._sums, self._gap):
            sums.merge(world.gather((sums.tokens, sums.values)))
        self.work = sum(world.gather(self.work), Workload())
        self._largest_ratio = max(world.gather(self._largest_ratio))
        losses = world.gather(self._losses)
        self._losses = {name: sum(of[name] for of in losses if name in of) for of in losses for name in of}
        largest = np.max(world.gather(self._rows["ratio_max"]), axis=0)
        self._rows = {name: world.sum(values) for name, values in self._rows.items()} | {"ratio_max": largest}

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
            "policy/rollout_train_kl": self._gap.means().get("kl"),
            **{f"policy/{name}": value for name, value in means.items()},
        }

    def summary(self, steps: list[StepResult], watch: Stopwatch, learner: Learner) -> dict[str, Value]:
        """Return the numbers of the update."""
        epochs = self.objective.config.update_epochs_per_batch
        tokens, seconds = sum(self._lengths) * epochs, max(watch.seconds.get("train", 0.0), 1e-9)
        found = {
            "train/lr": steps[-1].lr if steps else None,
            "train/grad_norm": mean(step.grad_norm for step in steps),
            "train/skipped_steps": sum(step.skipped for step in steps),
            "train/optimizer_steps": len(steps),
            "train/rows": len(self.sequences),
            "train/tokens_per_second": tokens / seconds,
            "train/tokens_per_second_per_device": tokens / seconds / learner.world.size,
            "train/shared_tokens": self.work.shared,
            "train/mfu": learner.mfu(self.work, seconds),
            "train/processes": learner.world.size,
            "train/peak_memory_bytes": peak_memory_bytes(),
            "train/peak_device_memory_bytes": learner.peak_device_memory(),
            **self.seen(),
        }
        if self.objective.critic is not None:
            found["critic/grad_norm"] = mean(step.critic_grad_norm or 0.0 for step in steps)
            found["critic/explained_variance"] = self._explained_variance()
        return found

    def _explained_variance(self) -> float | None:
        """Return how much of the returns' variance the old values predicted: 1 is all, 0 no more than their mean."""
        if not len(self.sequences):
            return None
        chosen = [mask != 0 for mask in self.sequences.loss_mask]
        returns, values = (
            np.concatenate([np.asarray(row)[on] for row, on in zip(rows, chosen, strict=True)])
            for rows in (self.sequences.returns, self.sequences.values)
        )
        variance = float(returns.var())
        return 1 - float((returns - values).var()) / variance if variance > 0 else None
