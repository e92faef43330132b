"""What the next stages would do, where, and how much memory they need; nothing is started."""

import json
import os
from pathlib import Path
from typing import Any

from nanoskyrl.stages.config import Settings, stage_config
from nanoskyrl.stages.policy import count_parameters, is_adapter, resolve_policy
from nanoskyrl.stages.runs import Run, RunConfig
from nanoskyrl.stages.session import check_first_policy
from nanoskyrl.stages.train_config import DEFAULT_LORA_RANK, FULL_BELOW, TrainConfig

GIB = 1 << 30
FLOAT32 = 4
LOGITS_AT_ONCE = 1 << 25
"""As in `nanoskyrl.stages.logprobs`, which is not imported here because it loads torch."""


def plan(run: Run, settings: Settings) -> dict[str, Any]:
    """Return the next step, its policy, how it is trained, and estimates of memory.

    Raises:
        InputError: the policy is not there.
    """
    config: RunConfig = stage_config(settings, "run")
    rollout = stage_config(settings, "rollout")
    train: TrainConfig = stage_config(settings, "train")
    step = run.next_step()
    check_first_policy(run, config.policy)
    published = run.policy(max(0, step - config.lag))
    policy = published if published.is_dir() else resolve_policy(config.policy)
    parameters = count_parameters(policy)
    rank = train.lora_rank if train.lora_rank is not None else (0 if parameters < FULL_BELOW else DEFAULT_LORA_RANK)
    rows = rollout.train_batch_size * rollout.n_samples_per_prompt
    weights = parameters * FLOAT32
    # Adam keeps two moments beside each gradient; with LoRA only for the adapters, counted as 2% here.
    trained = parameters if rank == 0 else parameters // 50
    states = trained * FLOAT32 * 3
    logits = min(train.max_tokens_per_micro_batch * _config_value(policy, "vocab_size", 0), LOGITS_AT_ONCE) * FLOAT32
    return {
        "run": str(run.root),
        "next step": step,
        "policy": str(policy),
        "parameters": f"{parameters:,}",
        "environment": rollout.env,
        "rollout": f"{rows} trajectories ({rollout.train_batch_size} prompts) on `{rollout.engine}`",
        "train": f"{train.algo}, {'full fine-tuning' if rank == 0 else f'LoRA rank {rank}'}, one process",
        "devices": _devices(),
        "weights of engine and learner": _size(2 * weights),
        "gradients and optimizer": _size(states),
        "logits of a chunk, at most": _size(logits),
        "memory in all, without activations": _size(2 * weights + states + logits),
        "memory of this machine": _size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
    }


def _config_value(policy: Path, key: str, default: int) -> int:
    if is_adapter(policy):
        return default
    return int(json.loads((policy / "config.json").read_bytes()).get(key, default))


def _devices() -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"CPU, {torch.get_num_threads()} threads"


def _size(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / (1 << 20):.1f} MiB"
