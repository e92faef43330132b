"""The KL to the reference that is taken off rewards, and the coefficient that it is weighed by.

An adaptive coefficient is no state of a process: a step's follows from what the manifest
of the step before says, so a run that was killed resumes with the same one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanoskyrl.algos.kl import adapted, kl
from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.core.manifest import Manifest
from nanoskyrl.stages.learning.advantage_config import AdvantageConfig
from nanoskyrl.stages.learning.trajectories import Rows, old_or_sampler_s

FACT = "kl_in_reward"
"""In the manifest of an `advantage` whose coefficient adapts: coef, the one in force; kl, the mean over rows of their
tokens' mean, in nats; rows; next_coef, the one of the next step."""


@dataclass(frozen=True, slots=True)
class Passed:
    """What models gave of a batch, and what it is held against; lists with one array a row of the batch."""

    columns: Mapping[str, list[np.ndarray | None]]
    """[T] by the name of the column; None in rows that they were not asked about."""
    sampled: list[np.ndarray | None]
    """[T] recorded log-probs in nats; empty unless a KL is taken off rewards."""
    masks: Rows
    """[T] nonzero on trained tokens."""


def coefficient(config: AdvantageConfig, previous: Manifest | None) -> float:
    """Return the weight of the KL in force: what the step before left, or what the settings begin with."""
    if config.kl_ctrl == "fixed" or previous is None or FACT not in previous.facts:
        return config.kl_reward_coef
    return previous.facts[FACT]["next_coef"]


def kl_by_row(old: Rows, ref: Rows, masks: Rows, estimator: str) -> list[np.ndarray | None]:
    """Return estimates of KL(old || reference) of each row's tokens in nats, 0 on those that are not trained.

    Args:
        old: [T] nats of each row's tokens under the old policy.
        ref: [T] nats under the reference; None where a row was not asked about.
        masks: [T] nonzero on trained tokens.
        estimator: One of KlEstimator.
    """
    import torch

    def of_row(old: np.ndarray | None, ref: np.ndarray | None, mask: np.ndarray | None) -> np.ndarray | None:
        if old is None or ref is None or mask is None:
            return None
        of_old, of_ref, on = (torch.from_numpy(np.asarray(of, np.float64).copy())[None] for of in (old, ref, mask))
        return kl(of_old, of_ref, on, estimator)[0].numpy()

    return [of_row(*of) for of in zip(old, ref, masks, strict=True)]


def penalties(passed: Passed, config: AdvantageConfig, needed: set[int]) -> list[np.ndarray | None] | None:
    """Return the weighed KL of each row's trained tokens, under the old policy against the reference; None if off.

    Args:
        passed: Log-probs.
        config: Its `kl_reward_coef` is the one in force.
        needed: Rows whose penalty is.

    Raises:
        InputError: a row that is trained on has no log-probs to take it from.
    """
    if not config.use_kl_in_reward:
        return None
    old = old_or_sampler_s(passed.columns.get("old_logprobs"), passed.sampled)
    if any(old[row] is None for row in needed):
        raise InputError(
            "`advantage.use_kl_in_reward` needs log-probs, and rows have none",
            hint="Run `skyrl advantage --old-logprobs recompute`",
        )
    found = kl_by_row(old, passed.columns["ref_logprobs"], passed.masks, config.kl_estimator_type)
    return [None if row is None else config.kl_reward_coef * row for row in found]


def facts_of(columns: Mapping[str, Rows], passed: Passed, config: AdvantageConfig) -> dict[str, Any]:
    """Return what the next step's coefficient follows from, for the manifest; {} where it does not adapt.

    Args:
        columns: Of `advantage`, one value a row; null in rows that are not kept.
        passed: What was recorded.
        config: Its `kl_reward_coef` is the one in force.
    """
    if config.kl_ctrl == "fixed":
        return {}
    old = old_or_sampler_s(columns.get("old_logprobs"), passed.sampled)
    found = kl_by_row(old, columns["ref_logprobs"], passed.masks, config.kl_estimator_type)
    # A row without trained tokens counts, as in the reductions of losses.
    means = [
        float(row.sum()) / max(np.count_nonzero(m), 1)
        for row, m in zip(found, passed.masks, strict=True)
        if row is not None and m is not None
    ]
    mean, coef = math.fsum(means) / max(len(means), 1), config.kl_reward_coef
    then = adapted(coef, mean, len(means), target=config.kl_target, horizon=config.kl_horizon)
    return {FACT: {"coef": coef, "kl": mean, "rows": len(means), "next_coef": then}}
