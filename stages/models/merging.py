"""An adapter merged into its base: one whole model, with the tokenizer that goes with it."""

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError

from nanoskyrl.stages.core.storage import write_errors
from nanoskyrl.stages.models.loading import load_model
from nanoskyrl.stages.models.policy import POLICY_JSON, find_base, is_adapter, is_weights, policy_files
from nanoskyrl.stages.models.remote_code import trust


def merge_adapter(adapter: Path, output: Path, *, dtype: torch.dtype | None = None) -> None:
    """Write the model that an adapter makes of its base.

    Sums are taken in float32, and rounded once.

    Args:
        adapter: A policy that is a PEFT adapter.
        output: A directory.
        dtype: Of the weights; None: as the base has them.

    Raises:
        InputError: the adapter or its base does not load.
        OutputError: it cannot be written.
    """
    base = find_base(adapter)
    model = load_model(adapter, dtype=torch.float32, device="cpu").merge_and_unload()
    own = dtype or stored_dtype(base)
    with write_errors(output, SafetensorError):
        model.to(own).save_pretrained(output)
        copy_frame(adapter, output)
        copy_frame(base, output)


def stored_dtype(model: Path) -> torch.dtype:
    """Return the type that a model's config says its weights have; float32 where it says none."""
    from transformers import AutoConfig

    found = getattr(AutoConfig.from_pretrained(model, **trust()), "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.float32


def copy_frame(policy: Path, output: Path) -> None:
    """Copy the tokenizer and all else that is not weights, unless it is there."""
    for file in policy_files(policy):
        aside = is_weights(file) or file.name in (POLICY_JSON, "adapter_config.json")
        if not aside and not (output / file.name).exists() and not (is_adapter(policy) and file.name == "config.json"):
            shutil.copyfile(file, output / file.name)
