"""LoRA on a policy: which rank, and new adapters."""

from pathlib import Path
from typing import Any

import torch

from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.models.policy import read_info


def rank_of(model: Any, *, rank: int | None = None, alpha: int | None = None) -> int | None:
    """Return the rank of the adapters that are on the model; None where it has none.

    Args:
        model: Of the policy.
        rank: `train.lora_rank`.
        alpha: `train.lora_alpha`.

    Raises:
        SettingsError: it has adapters of another rank or scale than is asked for.
    """
    if not hasattr(model, "peft_config"):
        return None
    adapters = model.peft_config["default"]
    for name, has, asked in (("rank", adapters.r, rank), ("alpha", adapters.lora_alpha, alpha)):
        if asked is not None and asked != has:
            raise SettingsError(
                f"the policy has adapters of {name} {has}, and `train.lora_{name}` is {asked}",
                hint=f"Go on with its {name}, or begin another run",
            )
    return adapters.r


def with_adapters(model: Any, policy: Path, *, rank: int, alpha: int, seed: int) -> Any:
    """Return the model with new adapters, which change nothing yet.

    Args:
        model: Of the policy, without adapters.
        policy: Its directory.
        rank: Of the adapters.
        alpha: They are scaled by this over their rank.
        seed: Of their random half.

    Raises:
        SettingsError: the policy was trained as a whole, or the rank is past every layer.
    """
    from peft import LoraConfig, get_peft_model

    if read_info(policy).parent is not None:
        raise SettingsError(
            f"`{policy}` was trained as a whole, and `train.lora_rank` is {rank}",
            hint="Go on with `train.lora_rank = 0`, or begin another run with this policy",
        )
    # Not the smallest layer: a router of a few experts would forbid every useful rank.
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    largest = max((min(m.in_features, m.out_features) for m in linear), default=rank)
    if rank > largest:
        raise SettingsError(
            f"`train.lora_rank` is {rank}, past the {largest} of the model's largest layer",
            hint="Give less than that, such as 16, or train the whole model with 0",
        )
    torch.manual_seed(seed)
    settings = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    # In the base's type: products in float32 would cost more than all other work of the adapters. The optimizer
    # steps float32 copies.
    model = get_peft_model(model, settings, autocast_adapter_dtype=False)
    # The place of the base differs from run to run; its name does not.
    model.peft_config["default"].base_model_name_or_path = read_info(policy).source
    return model


def keep_gradients(model: torch.nn.Module) -> None:
    """Let layers in 4 bits compute as in training: on a CPU, others are packed in a way that has no gradient."""
    from bitsandbytes.nn import Linear4bit  # type: ignore[import-not-found]

    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            layer.training = True  # itself alone: what is around it may hold dropout
