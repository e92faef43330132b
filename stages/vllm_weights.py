"""What a server's weights must add up to, and where whole weights lie that it can read."""

import json
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from nanoskyrl.stages.errors import InputError
from nanoskyrl.stages.policy import is_adapter, load_model, policy_files
from nanoskyrl.stages.vllm_worker import add, bit_sums

MEMORY = Path("/dev/shm")


def expected_sums(model: Path, dtype: str) -> dict[str, list[str]]:
    """Return the sums of a whole model's weights in the type that a server holds them in, layer by layer.

    Raises:
        InputError: the weights are no safetensors.
    """
    from safetensors import safe_open

    files = [file for file in policy_files(model) if file.suffix == ".safetensors"]
    if not files:
        raise InputError(f"`{model}` has no safetensors", hint="Save it again with save_pretrained")
    tied = bool(json.loads((model / "config.json").read_bytes()).get("tie_word_embeddings"))
    buckets: dict[str, list[int]] = {}

    def read(place: tuple[Path, str]) -> tuple[str, list[int]]:
        with safe_open(place[0], framework="pt") as opened:
            return place[1], bit_sums(opened.get_tensor(place[1]).to(getattr(torch, dtype)))

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


def merged(adapter: Path) -> Path:
    """Merge an adapter into its base, and return a new directory with the whole model, in memory where it fits."""
    model = load_model(adapter, dtype=torch.float32, device="cpu").merge_and_unload()
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2 * size
    place = Path(tempfile.mkdtemp(prefix="nanoskyrl-merged-", dir=MEMORY if roomy else None))
    assert is_adapter(adapter)
    model.save_pretrained(place)
    return place
