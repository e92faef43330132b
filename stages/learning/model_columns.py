"""Forward passes that `advantage` needs: old and reference log-probs, and the critic's values.

Each is made only if it is asked for, in chunks, by a learner that is up or one made here.
With adapters the reference is the same model with its adapters off, not a second copy.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nanoskyrl.stages.learning.batching import Sequences, one_temperature, read_sequences
from nanoskyrl.stages.learning.learner import Learner
from nanoskyrl.stages.learning.train_config import CriticConfig, OptimizerConfig
from nanoskyrl.stages.models.policy import critic_digest, is_adapter, policy_digest, read_info


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which columns are asked for, and under which policies."""

    policy: Path | None
    """What training starts from."""
    reference: Path | None
    old_logprobs: bool
    ref_logprobs: bool
    values: bool


class Passes:
    """The models that passes are made with; kept up from step to step by whoever keeps this."""

    def __init__(self, learner: Learner) -> None:
        """Use this learner, which may hold nothing yet; its settings are those of training."""
        self.learner = learner
        self._reference: Learner | None = None

    def columns(self, table: pa.Table, wanted: Wanted, max_tokens: int) -> dict[str, list[np.ndarray]]:
        """Return the columns that are asked for, one array a row, 0 on tokens that were observed."""
        sequences, found = read_sequences(table), {}
        temperature = one_temperature(table)
        if wanted.old_logprobs:
            assert wanted.policy is not None
            found["old_logprobs"] = self._loaded(wanted.policy).logprobs(sequences, temperature, max_tokens)
        if wanted.ref_logprobs:
            found["ref_logprobs"] = self._under_reference(sequences, wanted, temperature, max_tokens)
        if wanted.values:
            assert wanted.policy is not None
            if critic_digest(wanted.policy) is None:  # a critic that has learnt nothing predicts 0
                found["values"] = [np.zeros(len(row), np.float32) for row in sequences.response_ids]
            else:
                found["values"] = self._loaded(wanted.policy, critic=True).values(sequences, max_tokens)
        return found

    def _loaded(self, policy: Path, *, critic: bool = False) -> Learner:
        if critic and self.learner.critic_config is None:
            self.learner = Learner(self.learner.config, critic=CriticConfig())
        # A learner that holds this policy keeps its optimizer: only another policy is loaded.
        if self.learner.policy_digest != policy_digest(policy):
            self.learner.load(policy)
        return self.learner

    def _under_reference(self, sequences: Sequences, wanted: Wanted, temperature: float, max_tokens: int) -> Any:
        assert wanted.reference is not None
        reference, policy = policy_digest(wanted.reference), wanted.policy
        if policy is not None and reference in (policy_digest(policy), read_info(policy).base):
            # The policy is the reference, or an adapter over it: its own model serves, without the adapter.
            return self._loaded(policy).reference_logprobs(sequences, temperature, max_tokens)
        if self._reference is None:
            config = self.learner.config
            rank = None if is_adapter(wanted.reference) else 0
            self._reference = Learner(
                OptimizerConfig(
                    dtype=config.dtype,
                    device=config.device,
                    lora_rank=rank,
                    packing=config.packing,
                    share_prefixes=config.share_prefixes,
                ),
                frozen=True,
            )
        if self._reference.policy_digest != reference:
            self._reference.load(wanted.reference)
        return self._reference.logprobs(sequences, temperature, max_tokens)
