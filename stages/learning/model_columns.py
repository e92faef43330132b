"""Forward passes that `advantage` needs: old and reference log-probs, and the critic's values.

Each is made only if it is asked for, in chunks, by a learner that is up or one made here.
With adapters the reference is the same model with its adapters off, not a second copy.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nanoskyrl.stages.learning.advantage_inputs import Models
from nanoskyrl.stages.learning.batching import Sequences, one_temperature, read_sequences
from nanoskyrl.stages.learning.learner import Learner
from nanoskyrl.stages.learning.train_config import CriticConfig, OptimizerConfig
from nanoskyrl.stages.models.policy import critic_digest, is_adapter, policy_digest, read_info


class Passes:
    """The models that passes are made with; kept up from step to step by whoever keeps this."""

    def __init__(self, learner: Learner) -> None:
        """Use this learner, which may hold nothing yet; its settings are those of training."""
        self.learner = learner
        self._reference: Learner | None = None

    def columns(self, table: pa.Table, asks: set[str], models: Models, max_tokens: int) -> dict[str, list[np.ndarray]]:
        """Return the columns that are asked for, one array a row, 0 on tokens that were observed."""
        sequences, found = read_sequences(table), {}
        temperature = one_temperature(table)
        if "old_logprobs" in asks:
            assert models.policy is not None
            found["old_logprobs"] = self._loaded(models.policy).logprobs(sequences, temperature, max_tokens)
        if "ref_logprobs" in asks:
            found["ref_logprobs"] = self._under_reference(sequences, models, temperature, max_tokens)
        if "values" in asks:
            assert models.policy is not None
            if critic_digest(models.policy) is None:  # a critic that has learnt nothing predicts 0
                found["values"] = [np.zeros(len(row), np.float32) for row in sequences.response_ids]
            else:
                found["values"] = self._loaded(models.policy, critic=True).values(sequences, max_tokens)
        return found

    def _loaded(self, policy: Path, *, critic: bool = False) -> Learner:
        if critic and self.learner.critic_config is None:
            self.learner = Learner(self.learner.config, critic=CriticConfig())
        # A learner that holds this policy keeps its optimizer: only another policy is loaded.
        if self.learner.policy_digest != policy_digest(policy):
            self.learner.load(policy)
        return self.learner

    def _under_reference(self, sequences: Sequences, models: Models, temperature: float, max_tokens: int) -> Any:
        assert models.reference is not None
        reference, policy = policy_digest(models.reference), models.policy
        if policy is not None and reference in (policy_digest(policy), read_info(policy).base):
            # The policy is the reference, or an adapter over it: its own model serves, without the adapter.
            return self._loaded(policy).reference_logprobs(sequences, temperature, max_tokens)
        if self._reference is None:
            config = self.learner.config
            rank = None if is_adapter(models.reference) else 0
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
            self._reference.load(models.reference)
        return self._reference.logprobs(sequences, temperature, max_tokens)
