"""How far an engine's log-probs are from the trainer's, on what the engine samples with a policy."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from nanoskyrl.algos.kl import kl
from nanoskyrl.stages.core.children import temporary_directory
from nanoskyrl.stages.core.config import merge, stage_config
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.learning.batching import one_temperature, read_sequences
from nanoskyrl.stages.learning.learner import Learner
from nanoskyrl.stages.running.session import Session

ROWS = {"train_batch_size": 16, "n_samples_per_prompt": 4, "max_generate_length": 256, "logprobs_mode": "processed"}
MAX_TOKENS = 16_384
"""Of a trainer's micro-batch."""


def measure_gap(policy: Path, settings: dict[str, dict[str, Any]]) -> dict[str, float | int | str]:
    """Sample with the engine of the settings, and ask the trainer for the same tokens.

    Args:
        policy: Directory of the policy.
        settings: Tables; what `rollout` says of the number of rows and their length counts.

    Returns:
        tokens; kl/mean, of the engine against the trainer, nats a token (k3, as `policy/rollout_train_kl`);
        abs_diff/mean, abs_diff/p99 and abs_diff/max in nats; ratio/max of trainer to engine.
    """
    with temporary_directory("nanoskyrl-gap-") as folder:
        asked = merge({"rollout": ROWS}, settings, {"run": {"policy": str(policy.resolve())}})
        session = Session(Run(folder / "run"), asked)
        outcome = session.rollout(0)
        table = pa.concat_tables(read_parts(outcome.output, outcome.manifest))
        learner = Learner(stage_config(asked, "train"))
        learner.load(policy)
        sequences = read_sequences(table.filter(table.column("trainable")))
        trained = learner.logprobs(sequences, one_temperature(table), MAX_TOKENS)
    rows = zip(sequences.rollout_logprobs, trained, sequences.loss_mask, strict=True)
    pairs = [(sampled[mask != 0], again[mask != 0]) for sampled, again, mask in rows if sampled is not None]
    sampler_s, trainer_s = (torch.from_numpy(np.concatenate(side)).double() for side in zip(*pairs, strict=True))
    apart = (trainer_s - sampler_s).abs()
    return {
        "engine": stage_config(asked, "rollout").engine,
        "tokens": len(apart),
        "kl/mean": float(kl(sampler_s, trainer_s, torch.ones_like(sampler_s), "k3").mean()),
        "abs_diff/mean": float(apart.mean()),
        "abs_diff/p99": float(apart.quantile(0.99)),
        "abs_diff/max": float(apart.max()),
        "ratio/max": float((trainer_s - sampler_s).exp().max()),
    }
