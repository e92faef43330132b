"""Tokens that an algorithm picks by comparing all of a mini-batch, before its micro-batches are taken.

A rank or a mean over tokens must not hang on how a mini-batch is cut, so the log-probs of
all of its tokens are computed first, in a pass without gradient.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nanoskyrl.algos.base import Algorithm
from nanoskyrl.stages.core.registry import plugin_errors
from nanoskyrl.stages.learning.batching import Sequences


def marked_tokens(
    algorithm: Algorithm,
    config: Any,
    sequences: Sequences,
    logprobs: Sequence[np.ndarray],
    seed: int,
) -> list[np.ndarray | None]:
    """Return what the algorithm marks: 0 and 1 on the response tokens of each row.

    Args:
        algorithm: One with `marks`.
        config: Its settings.
        sequences: The rows of a mini-batch, each with a trained token.
        logprobs: Of their response tokens, nats under the policy that is trained.
        seed: Of what the algorithm draws.

    Raises:
        SettingsError: an algorithm of the user's fails, or returns something else.
    """
    assert algorithm.marks is not None
    on = np.concatenate(sequences.loss_mask) != 0

    def flat(rows: Sequence[np.ndarray | None]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.asarray(row) for row in rows])[on])[None]

    tokens = flat(logprobs)
    seen = algorithm.inputs(tokens, flat(sequences.old_logprobs), flat(sequences.advantages), torch.ones_like(tokens))
    random = np.random.Generator(np.random.Philox(key=seed))
    with plugin_errors(f"algorithm `{algorithm.name}`"), torch.no_grad():
        picked = algorithm.marks(seen, config, random)
        if not isinstance(picked, torch.Tensor) or picked.shape != seen.mask.shape:
            raise ValueError(f"its marks are no Tensor of the shape {list(seen.mask.shape)}")
    line = np.zeros(len(on), np.float32)
    line[on] = picked[0].numpy()
    return [*np.split(line, np.cumsum([len(mask) for mask in sequences.loss_mask])[:-1])]
