"""Writing a trained policy: weights or adapter, config, tokenizer and critic, as others load them."""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import modeling_utils

from nanoskyrl.stages.core.digests import cached_digest
from nanoskyrl.stages.core.storage import TEMPORARY, as_usual, link_or_copy, make_directory, write_errors
from nanoskyrl.stages.models.critic import Critic, save_critic
from nanoskyrl.stages.models.policy import POLICY_JSON, is_weights, policy_files

SHARD_BYTES = 1 << 28


def write_policy(
    model: Any,
    policy: Path,
    *,
    start: Path,
    adapter: bool,
    gathered: dict[str, Tensor] | None = None,
    critic: Critic | None = None,
) -> None:
    """Write everything of a policy but its policy.json.

    Args:
        model: What was trained.
        policy: The directory.
        start: The policy that training started from, whose tokenizer it keeps.
        adapter: Whether the model is adapters over another.
        gathered: Its weights, where the model holds them in pieces.
        critic: To be saved beside it.

    Raises:
        OutputError: it cannot be written.
    """
    # Asked to find out whether embeddings changed, peft would look for the base model on the hub.
    whole: dict[str, Any] = {"save_embedding_layers": False} if adapter else {}
    if gathered is not None:
        whole["state_dict"] = gathered
    if adapter:  # a set, which every process would write in an order of its own
        config = model.peft_config["default"]
        config.target_modules = sorted(config.target_modules or ())
        if config.target_parameters:
            config.target_parameters = sorted(config.target_parameters)
    make_directory(policy)
    with (
        write_errors(policy, SafetensorError),
        tempfile.TemporaryDirectory(dir=policy.parent, prefix="policy-", suffix=TEMPORARY) as scratch,
    ):
        if adapter:
            model.save_pretrained(scratch, **whole)
        else:
            _save_in_shards(model, scratch, **whole)
        for file in policy_files(Path(scratch)):
            file.rename(policy / file.name)
            as_usual(policy / file.name)
    # The tokenizer is the parent's, byte for byte. A directory from outside may change under us: copy that.
    take = link_or_copy if (start / POLICY_JSON).is_file() else shutil.copyfile
    with write_errors(policy):
        for file in policy_files(start):
            there = is_weights(file) or (policy / file.name).exists()
            if not there and not (adapter and file.name == "config.json"):
                take(file, policy / file.name)
    if critic is not None:
        with write_errors(policy, SafetensorError):
            save_critic(critic, policy)


def _save_in_shards(model: Any, directory: str, **settings: Any) -> None:
    """Call `save_pretrained`, whose shards are then written at the same time: a file system takes one writer a file."""
    if "state_dict" not in settings and next(model.parameters()).is_cuda:
        settings["state_dict"] = on_host(model.state_dict(keep_vars=True))
    real, writes = modeling_utils.safe_save_file, list[Future[None]]()
    with ThreadPoolExecutor(thread_name_prefix="shards") as pool:
        modeling_utils.safe_save_file = lambda *args, **more: writes.append(pool.submit(_save, real, *args, **more))
        try:
            model.save_pretrained(directory, max_shard_size=SHARD_BYTES, **settings)
        finally:
            modeling_utils.safe_save_file = real
    for write in writes:
        write.result()


def _save(save: Callable[..., None], tensors: Mapping[str, Tensor], file: str, **more: Any) -> None:
    save(tensors, file, **more)
    cached_digest(Path(file))  # while others are written


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors in the host's memory; of one that has two names, one.

    A GPU's come into pinned memory, which torch keeps for the next time.
    """
    copies = {id(value): value.detach().to("cpu", non_blocking=True, copy=True) for value in tensors.values()}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return {name: copies[id(value)] for name, value in tensors.items()}
