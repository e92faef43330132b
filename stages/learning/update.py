"""Passes of an optimizer over one table, and what is seen on the way."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from nanoskyrl.algos.kl import kl as token_kl
from nanoskyrl.algos.ratios import token_log_ratio
from nanoskyrl.stages.core.digests import derive_seed
from nanoskyrl.stages.core.metrics import Stopwatch, Value, grouped, mean, peak_memory_bytes
from nanoskyrl.stages.learning.batching import MicroBatch, Sequences, one_temperature, read_sequences
from nanoskyrl.stages.learning.learner import Learner
from nanoskyrl.stages.learning.objective import Objective, Terms
from nanoskyrl.stages.learning.process_group import ProcessGroup
from nanoskyrl.stages.learning.stepping import StepResult
from nanoskyrl.stages.models.packing import Workload, work_of

TOKENS = "tokens"
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


def old_logprobs_of(table: pa.Table, learner: Learner, max_tokens: int) -> list[np.ndarray]:
    """Return the nats of every row's response tokens under the policy that the learner holds."""
    return learner.logprobs(read_sequences(table), one_temperature(table), max_tokens)


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


Sums = Counter[str]
"""Running totals by name; those over sampled tokens have the number of these under TOKENS."""


def _merged(of_each: Iterable[Sums]) -> Sums:
    """Return the totals of several together."""
    total = Sums()
    for sums in of_each:
        total.update(sums)
    return total


def _means(sums: Sums) -> dict[str, float]:
    tokens = sums[TOKENS]
    return {name: value / tokens for name, value in sums.items() if name != TOKENS} if tokens else {}


def _masked_sums(mask: torch.Tensor, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {TOKENS: mask.sum(), **{name: (value * mask).sum() for name, value in values.items()}}


class _Held:
    """Numbers of one shape that are still on the device, read together."""

    def __init__(self, numbers: dict[str, torch.Tensor]) -> None:
        self._names = list(numbers)
        self._stacked = torch.stack([value.detach().double() for value in numbers.values()]) if numbers else None

    def read(self) -> dict[str, Any]:
        """Return them by name: floats, or lists of floats."""
        return {} if self._stacked is None else dict(zip(self._names, self._stacked.tolist(), strict=True))


class Update:
    """One pass after another over a table, and what was seen on the way."""

    def __init__(self, objective: Objective) -> None:
        """Begin with nothing seen."""
        self.objective = objective
        self.sequences: Sequences = objective.sequences
        self._sums, self._gap, self._drift, self._losses = Sums(), Sums(), Sums(), Sums()
        self._steps_taken = 0
        self._tokens_passed = 0
        self.work = Workload()
        """Of all passes."""
        self._largest_ratio = 0.0
        self._unread: list[tuple[list[int], list[_Held]]] = []
        self._rows = {
            name: np.zeros(len(self.sequences)) for name in ("tokens", "ratio", "ratio_max", "kl", "entropy", "share")
        }

    def step(self, learner: Learner, rows: list[int]) -> StepResult | None:
        """Take one optimizer step on these rows; None: the policy has moved far enough on this table."""
        result = learner.step(*self.watched(learner, rows), lambda: self._goes_on(learner.world))
        self._steps_taken += result is not None
        return result

    def _goes_on(self, world: ProcessGroup) -> bool:
        """Say whether the step whose mini-batch was just seen is to be taken; the first of a table always is."""
        target = self.objective.config.target_kl
        if not target or not self._steps_taken:
            return True
        self._read()
        self._drift = _merged(world.gather(self._drift))
        return _means(self._drift).get("kl", 0.0) <= target

    def steps(self, learner: Learner, table: pa.Table, seed: int) -> list[StepResult]:
        """Take all optimizer steps of the table that the loss is over.

        Args:
            learner: Holds the policy to start from.
            table: The rows.
            seed: Of the run; the order of mini-batches follows from it and the rows.
        """
        config = self.objective.config
        # A trajectory's id comes from run seed, step and task: the order does not change with the code's version.
        drawn_for = table.column("trajectory_id")[0].as_py() if table.num_rows else ""
        torch.manual_seed(derive_seed(seed, "train", drawn_for) % 2**32)
        groups, found = table.column("group_id").to_pylist(), list[StepResult]()
        # Where no group teaches anything, the policy continues as it is.
        for epoch in range(config.update_epochs_per_batch if table.num_rows else 0):
            for rows in mini_batches(groups, config.policy_mini_batch_size, derive_seed(seed, drawn_for, epoch)):
                result = self.step(learner, rows)
                if result is None:
                    return found
                found.append(result)
        return found

    def gradient(self, learner: Learner, rows: list[int]) -> torch.Tensor:
        """Return the gradient that a step on these rows would follow."""
        return learner.gradient(*self.watched(learner, rows))

    def watched(
        self, learner: Learner, rows: list[int]
    ) -> tuple[Iterator[MicroBatch | None], Callable[[MicroBatch], torch.Tensor]]:
        """Return the micro-batches of one mini-batch, and their losses, which are noted as they are taken."""
        mini = self.objective.mini_batch(rows)
        self._read()
        self._losses, self._drift = Sums(), Sums()
        self._tokens_passed += sum(self.sequences.lengths[row] for row in rows)
        batches = self.objective.batches(mini, learner)
        return batches, lambda batch: self._seen(batch, self.objective.terms(learner, batch, mini))

    @torch.no_grad()
    def _observe(self, batch: MicroBatch, terms: Terms) -> None:
        self.work += (
            work_of([self.sequences.lengths[row] for row in batch.rows]) if batch.pack is None else batch.pack.work
        )
        mask, on, ratio = batch.loss_mask, batch.loss_mask.bool(), terms.log_ratio.exp()
        kl = (-terms.log_ratio).exp() + terms.log_ratio - 1  # k3 of the trained against the old policy
        sums = _masked_sums(mask, {"ratio": ratio, "kl": kl, "entropy": terms.entropy, **terms.reported})
        # A mean of k1 may be negative, and one of k3 hangs on the one token that the policy has all but forgotten.
        drift = _masked_sums(mask, {"kl": terms.log_ratio.square() / 2})
        gaps: dict[str, torch.Tensor] = {}
        if not self._steps_taken:  # later the policy is another than the one that sampled
            recorded = [self.sequences.rollout_logprobs[row] is not None for row in batch.rows]
            there = mask * torch.tensor(recorded, device=mask.device)[:, None]
            gap = (terms.logprobs - batch.rollout_logprobs).abs()
            weight = token_log_ratio(terms.logprobs, batch.rollout_logprobs, there).exp()
            # Of the engine against the trainer, whose policy is meant to be the same.
            estimate = token_kl(batch.rollout_logprobs, terms.logprobs, there, "k3")
            gaps = _masked_sums(there, {"gap": gap, "kl": estimate, "weight": weight, "weight_square": weight.square()})
        losses = {
            "loss": terms.loss, "policy_loss": terms.policy_loss, "kl_loss": terms.kl_loss,
            "value_loss": terms.value_loss,
        }  # fmt: skip
        losses = {name: term for name, term in losses.items() if term is not None}
        share = torch.zeros_like(mask) if terms.share is None else terms.share
        by_row = {"tokens": mask, "ratio": ratio, "kl": kl, "entropy": terms.entropy, "share": share}
        rows = {name: (value * mask).sum(-1) for name, value in by_row.items()}
        rows["ratio_max"] = ratio.masked_fill(~on, 0).max(-1).values
        self._unread.append((batch.rows, [_Held(of) for of in (sums, gaps, losses, rows, drift)]))

    def _read(self) -> None:
        """Add up what was observed. Not at once: a GPU would wait for the host after each micro-batch."""
        for batch_rows, held in self._unread:
            sums, gaps, losses, rows, drift = (of.read() for of in held)
            for total, more in ((self._sums, sums), (self._drift, drift), (self._gap, gaps), (self._losses, losses)):
                total.update(more)
            largest = rows.pop("ratio_max")
            self._largest_ratio = max(self._largest_ratio, *largest)
            self._rows["ratio_max"][batch_rows] = np.maximum(self._rows["ratio_max"][batch_rows], largest)
            for name, values in rows.items():
                self._rows[name][batch_rows] += values
        self._unread.clear()

    def _seen(self, batch: MicroBatch, terms: Terms) -> torch.Tensor:
        self._observe(batch, terms)
        return terms.loss

    def gather(self, world: ProcessGroup) -> None:
        """Add up what all processes saw."""
        self._read()
        if world.size == 1:
            return
        self._sums, self._gap, self._losses = (
            _merged(world.gather(sums)) for sums in (self._sums, self._gap, self._losses)
        )
        self.work = sum(world.gather(self.work), Workload())
        self._largest_ratio = max(world.gather(self._largest_ratio))
        largest = np.max(world.gather(self._rows["ratio_max"]), axis=0)
        self._rows = {name: world.sum(values) for name, values in self._rows.items()} | {"ratio_max": largest}

    def diagnostics(self, table: pa.Table) -> pa.Table:
        """Return what was seen of each row."""
        self._read()
        tokens, trained = self._rows["tokens"], self.sequences.trained_tokens
        nothing = tokens == 0

        def per_token(name: str) -> pa.Array:
            return pa.array(self._rows[name] / np.maximum(tokens, 1), pa.float64(), mask=nothing)

        return pa.Table.from_arrays(
            [
                table.column("trajectory_id").combine_chunks(),
                table.column("step_index").combine_chunks(),
                pa.array(trained, pa.int32()),
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
        self._read()
        means, gaps = _means(self._sums), _means(self._gap)
        return {
            **{f"train/{name}": value for name, value in self._losses.items()},
            "train/ratio/mean": means.pop("ratio", None),
            "train/ratio/max": self._largest_ratio,
            "policy/ppo_kl": means.pop("kl", None),
            "policy/policy_entropy": means.pop("entropy", None),
            "policy/rollout_train_logprobs_abs_diff_mean": gaps.get("gap"),
            "policy/rollout_train_kl": gaps.get("kl"),
            "policy/effective_sample_share": gaps["weight"] ** 2 / gaps["weight_square"] if gaps else None,
            **{f"policy/{name}": value for name, value in means.items()},
        }

    def summary(self, steps: list[StepResult], watch: Stopwatch, learner: Learner) -> dict[str, Value]:
        """Return the numbers of the update."""
        tokens, seconds = self._tokens_passed, max(watch.seconds.get("train", 0.0), 1e-9)
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
