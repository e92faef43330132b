"""What a server's weights must add up to, and where whole weights lie that it can read."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from nanoskyrl.stages.core.children import kept_directory
from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.engines.vllm.worker import add, bit_sums, plus
from nanoskyrl.stages.models.merging import merge_adapter
from nanoskyrl.stages.models.policy import count_parameters, find_base, policy_files

MEMORY = Path("/dev/shm")
TRANSPOSED = ("gpt_oss", "llama4", "llama4_text")
"""Families whose checkpoints hold experts as (expert, in, out), where vLLM holds (expert, out, in)."""


def expected_sums(model: Path, dtype: str) -> dict[str, list[str]]:
    """Return the sums of a whole model's weights in the type that a server holds them in, layer by layer.

    Raises:
        InputError: the weights are no safetensors.
    """
    from safetensors import safe_open

    files = [file for file in policy_files(model) if file.suffix == ".safetensors"]
    if not files:
        raise InputError(f"`{model}` has no safetensors", hint="Save it again with save_pretrained")
    config = json.loads((model / "config.json").read_bytes())
    tied, turned = bool(config.get("tie_word_embeddings")), config.get("model_type") in TRANSPOSED
    buckets: dict[str, list[int]] = {}

    def read(place: tuple[Path, str]) -> tuple[str, list[int]]:
        with safe_open(place[0], framework="pt") as opened:
            tensor = opened.get_tensor(place[1]).to(getattr(torch, dtype))
            return place[1], bit_sums(tensor.mT if turned and tensor.ndim == 3 else tensor)

    places = []
    for file in files:
        with safe_open(file, framework="pt") as opened:
            places += [(file, name) for name in opened.keys()]  # noqa: SIM118 - no dictionary
    # Computed by the server, or held once under another name.
    aside = ("rotary_emb.inv_freq", *(("lm_head.weight",) if tied else ()))
    with ThreadPoolExecutor(max_workers=8) as pool:
        for name, sums in pool.map(read, [place for place in places if not place[1].endswith(aside)]):
            add(buckets, name, sums)
    return {name: [str(value) for value in sums] for name, sums in buckets.items()}


def expected_adapter_sums(adapter: Path, dtype: str) -> list[str] | None:
    """Return the sums of an adapter's weights as vLLM computes with them: its scale is multiplied into B.

    None where a row's bytes are no multiple of 8, for which vLLM's padding would move what is summed as one word, or
    where the scale is not the same everywhere.
    """
    from safetensors.torch import load_file

    config = json.loads((adapter / "adapter_config.json").read_bytes())
    if config.get("rank_pattern") or config.get("alpha_pattern") or config.get("use_dora"):
        return None
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    totals = [0, 0]
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        held = tensor.to(getattr(torch, dtype))
        if held.shape[-1] * held.element_size() % 8:
            return None
        if "lora_B" in name and scale != 1:
            held *= scale
        totals = plus(totals, bit_sums(held))
    return [str(total) for total in totals]


def merged(adapter: Path) -> Path:
    """Merge an adapter into its base, and return a new directory with the whole model, in memory where it fits."""
    size = count_parameters(find_base(adapter)) * 4
    roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2 * size
    place = kept_directory("nanoskyrl-merged-", MEMORY if roomy else None)
    merge_adapter(adapter, place, dtype=torch.float32)
    return place
