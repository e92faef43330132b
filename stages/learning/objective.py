"""The loss of an algorithm over one table: the surrogate, the KL to the reference, the critic's loss.

`train`, its dry run and `compare` all take it from here. Every term is weighed by the
totals of the whole mini-batch, so a micro-batch's share can be added to the others'.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoskyrl.algos.aggregate import Totals, reduction
from nanoskyrl.algos.base import Algorithm
from nanoskyrl.algos.kl import K3_LIMIT, kl
from nanoskyrl.algos.off_policy import OffPolicyConfig, correction, mean_weight, negative_rows_gone, trusted
from nanoskyrl.algos.surrogates.value_loss import value_loss
from nanoskyrl.stages.core.digests import derive_seed
from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.core.metrics import grouped
from nanoskyrl.stages.core.registry import plugin_errors
from nanoskyrl.stages.learning.batching import (
    MicroBatch,
    Sequences,
    collate_all,
    response_part,
    with_marks,
)
from nanoskyrl.stages.learning.learner import Learner
from nanoskyrl.stages.learning.token_selection import marked_tokens
from nanoskyrl.stages.learning.train_config import CriticConfig, TrainConfig


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The rows of one optimizer step, and what their loss is divided by."""

    rows: list[int]
    totals: Totals
    """What the surrogate's loss is divided by: all trained tokens, or those that `off_policy` keeps."""
    prompt_tokens: dict[str, int]
    """The same, by prompt."""
    whole: Totals
    """Of all trained tokens: for the KL and the critic, which leave no row out."""
    whole_prompt_tokens: dict[str, int]
    mean_weight: float
    """What off-policy weights are divided by; 1 unless they are normalised."""


@dataclass(frozen=True, slots=True)
class Terms:
    """A micro-batch's share of the loss, and what is reported of it; [B, T-1] but for the scalars."""

    loss: Tensor
    policy_loss: Tensor
    kl_loss: Tensor | None
    value_loss: Tensor | None
    logprobs: Tensor
    log_ratio: Tensor
    """Nats, trained minus old policy, without gradient."""
    entropy: Tensor
    reported: dict[str, Tensor]
    share: Tensor | None
    """The surrogate's own: of tokens clipped, or of the gradient let through."""


class Objective:
    """What is made smaller, for one algorithm and one table."""

    def __init__(
        self,
        algorithm: Algorithm,
        algo_config: Any,
        config: TrainConfig,
        sequences: Sequences,
        temperature: float,
        *,
        off_policy: OffPolicyConfig,
        critic: CriticConfig | None = None,
        seed: int = 0,
    ) -> None:
        """Keep what the loss is made of, and weigh every row against the policy that sampled it.

        Args:
            algorithm: The surrogate and its defaults.
            algo_config: Its settings.
            config: Reduction, KL and budgets.
            sequences: The rows to learn from.
            temperature: What they were sampled at.
            off_policy: How rows of another policy are weighed and left out.
            critic: How the critic is trained; None: there is none.
            seed: Of what the algorithm draws.
        """
        self.algorithm, self.algo_config, self.config = algorithm, algo_config, config
        self.temperature, self.off_policy, self.critic = temperature, off_policy, critic
        self._weights = reduction(config.loss_reduction or algorithm.loss_reduction)
        self._value_weights = reduction(critic.loss_reduction) if critic else None
        self.kept_tokens = sequences.trained_tokens
        if off_policy.on:
            sequences, self.kept_tokens = _weighed(sequences, off_policy, config.max_tokens_per_micro_batch)
            if not sum(self.kept_tokens):
                raise InputError(
                    "`off_policy.reject` leaves every row out", hint="Widen `off_policy.reject_band`, or sample anew"
                )
        self.sequences = sequences
        self._seed, self._steps = seed, 0

    def mini_batch(self, rows: list[int]) -> MiniBatch:
        """Return what these rows are divided by, if they make one optimizer step."""
        trained = self.sequences.trained_tokens
        only_kept = self.off_policy.denominator == "kept"
        totals, per_prompt = self._totals(rows, self.kept_tokens if only_kept else trained, leave_out=only_kept)
        whole, whole_per_prompt = self._totals(rows, trained, leave_out=False)
        weight = 1.0
        if self.off_policy.normalize:
            weights, masks = (
                torch.from_numpy(np.concatenate([np.asarray(of[row], np.float64) for row in rows]))
                for of in (self.sequences.weights, self.sequences.loss_mask)
            )
            weight = mean_weight(weights, masks)
        return MiniBatch(rows, totals, per_prompt, whole, whole_per_prompt, weight)

    def _totals(self, rows: list[int], counted: list[int], *, leave_out: bool) -> tuple[Totals, dict[str, int]]:
        """Return the counts of these rows, and the tokens of each prompt.

        Args:
            rows: Of one optimizer step.
            counted: Tokens of each row of the table.
            leave_out: Whether a row without counted tokens is none.
        """
        of_prompts = grouped((self.sequences.groups[row], counted[row]) for row in rows)
        per_prompt = {prompt: sum(counts) for prompt, counts in of_prompts.items()}
        not_empty = sum(counted[row] > 0 for row in rows)
        totals = Totals(
            tokens=sum(counted[row] for row in rows),
            rows=not_empty if leave_out or self.config.empty_rows == "exclude" else len(rows),
            horizon=self.config.horizon,
            prompts=sum(count > 0 for count in per_prompt.values()) if leave_out else len(per_prompt),
        )
        return totals, per_prompt

    def batches(self, mini: MiniBatch, learner: Learner) -> Iterator[MicroBatch | None]:
        """Yield the micro-batches of one optimizer step; rows without trained tokens are in its totals alone."""
        trained = self.sequences.trained_tokens
        rows = [row for row in mini.rows if trained[row]]
        sequences = self.sequences
        budget = self.config.max_tokens_per_micro_batch
        if self.algorithm.marks is not None and rows:
            chosen = sequences.take(rows)
            logprobs = learner.logprobs(chosen, self.temperature, budget)
            seed = derive_seed(self._seed, "marks", self._steps)
            sequences = with_marks(
                sequences, rows, marked_tokens(self.algorithm, self.algo_config, chosen, logprobs, seed)
            )
        self._steps += 1
        return learner.micro_batches(sequences, rows, budget)

    def terms(self, learner: Learner, batch: MicroBatch, mini: MiniBatch) -> Terms:
        """Return a micro-batch's share of the mini-batch's loss."""
        found = learner.statistics(batch, self.temperature)
        mask, on = batch.loss_mask, batch.loss_mask.bool()
        seen = self.algorithm.inputs(found.logprobs, batch.old_logprobs, batch.advantages, mask, batch.marked)
        with plugin_errors(f"algorithm `{self.algorithm.name}`"):
            objective, own = checked_objective(self.algorithm.surrogate(seen, self.algo_config), mask)
        reported = dict(own)
        weights = batch.weights / mini.mean_weight
        if self.off_policy.negative_threshold is not None:
            weights = weights * negative_rows_gone(
                found.logprobs, batch.rollout_logprobs, batch.advantages, mask, self.off_policy.negative_threshold
            )
        if self.off_policy.trust_band is not None:
            kept = trusted(found.logprobs, batch.rollout_logprobs, batch.advantages, mask, self.off_policy.trust_band)
            weights = weights * kept
            reported["untrusted"] = 1 - kept
        groups = [self.sequences.groups[row] for row in batch.rows]
        tokens, whole_tokens = (
            torch.tensor([of[group] for group in groups], device=mask.device)
            for of in (mini.prompt_tokens, mini.whole_prompt_tokens)
        )
        reduce = self._weights(mask, mini.totals, tokens)
        policy_loss = -((objective * weights).masked_fill(~on, 0.0) * reduce).sum()
        loss, kl_loss, critic_loss = policy_loss, None, None
        if self.config.use_kl_loss:
            estimator = self.config.kl_estimator_type or self.algorithm.loss_kl_estimator
            estimate = kl(
                found.logprobs, batch.ref_logprobs, mask, estimator,
                straight_through=self.config.kl_straight_through,
                value_limit=K3_LIMIT if estimator == "k3" else None,
            )  # fmt: skip
            kl_loss = (estimate * self._weights(mask, mini.whole, whole_tokens)).sum()
            loss = loss + self.config.kl_loss_coef * kl_loss
            reported["kl_to_reference"] = estimate.detach()
        if self.off_policy.kl_coef:
            estimate = kl(found.logprobs, batch.rollout_logprobs, mask, "k2")
            pull = (estimate * self._weights(mask, mini.whole, whole_tokens)).sum()
            loss = loss + self.off_policy.kl_coef * pull
            reported["kl_to_sampler"] = estimate.detach()
        if self.critic is not None and self._value_weights is not None:
            values = learner.values_of(batch, found)
            losses, clipped = value_loss(values, batch.values, batch.returns, mask, self.critic.value_clip)
            critic_loss = (losses * self._value_weights(mask, mini.whole, None)).sum()
            loss = loss + learner.value_loss_coef * critic_loss
            reported |= {"value_clip_ratio": clipped, "value": values.detach()}
        if self.off_policy.on:
            reported["off_policy_weight"] = weights
        return Terms(
            loss, policy_loss, kl_loss, critic_loss, found.logprobs, seen.log_ratio.detach(), found.entropy, reported,
            next(iter(own.values()), None),
        )  # fmt: skip


def checked_objective(found: Any, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what a surrogate said, if it is what one says.

    Raises:
        TypeError, ValueError: it is something else, or of another shape.
    """
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], dict):
        raise TypeError("its surrogate returned no pair of an objective and named values")
    for name, value in (("objective", found[0]), *found[1].items()):
        if not isinstance(value, Tensor):
            raise TypeError(f"its {name} is a {type(value).__name__}, not a Tensor")
        if value.shape != mask.shape:
            raise ValueError(f"its {name} has the shape {list(value.shape)}, not {list(mask.shape)}")
    if torch.is_grad_enabled() and not found[0].requires_grad:
        raise ValueError("its objective carries no gradient")
    return found


def _weighed(sequences: Sequences, config: OffPolicyConfig, max_tokens: int) -> tuple[Sequences, list[int]]:
    """Return the rows with their weights, and how many trained tokens of each row are not rejected."""
    weights: list[np.ndarray | None] = [None] * len(sequences)
    kept = [0] * len(sequences)
    for batch in collate_all(sequences, range(len(sequences)), max_tokens, "cpu"):
        assert batch is not None
        found, stays = correction(batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask, config)
        for row, line, count in zip(batch.rows, found.numpy(), stays.sum(-1).tolist(), strict=True):
            weights[row], kept[row] = response_part(sequences, row, line), int(count)
    return replace(sequences, weights=weights), kept
