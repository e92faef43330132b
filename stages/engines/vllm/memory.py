"""How much of a GPU a vLLM server takes, and how many share one."""

from pathlib import Path

from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.gpus import driver_lines
from nanoskyrl.stages.engines.vllm.config import VllmConfig

SPARED = 5 << 30
"""Bytes of a server's share that are left to what is neither weights nor keys and values: twice what was seen."""
MEASURED_BELOW = 8 << 30
"""A server that has less than this left by our allowance measures, for there the allowance is too much of it."""


def share_of_memory(config: VllmConfig, servers: int) -> int:
    """Return the bytes of the smallest GPU that each of some servers may take."""
    megabytes = min(int(line.split(",")[2].split()[0]) for line in driver_lines())
    return int(megabytes * (1 << 20) * config.gpu_memory / servers)


def left_for_cache(model: Path, config: VllmConfig, servers: int) -> int:
    """Return the bytes that each of some servers on one GPU has left for keys and values, by our allowance."""
    return share_of_memory(config, servers) - weight_bytes(model) // config.tensor_parallel - SPARED


def weight_bytes(model: Path) -> int:
    """Return the size of a model's weights on disk."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def choose_servers(model: Path, config: VllmConfig) -> int:
    """Return how many servers share a GPU: as asked for, else as many as leave half of their share to the cache."""
    if config.servers_per_gpu is not None or config.tensor_parallel > 1:
        return config.servers_per_gpu or 1
    return next((n for n in (4, 2) if left_for_cache(model, config, n) * 2 >= share_of_memory(config, n)), 1)


def kv_cache_bytes(model: Path, config: VllmConfig, *, cpu: bool) -> int | None:
    """Return the memory for keys and values of one server; None: vLLM measures what is left.

    A server that measures while another process on its GPU, a server or a trainer of whatever run, takes or gives back
    memory takes that for its own, or does not start. So on roomy GPUs none measures.

    Raises:
        SettingsError: their shares do not hold the weights.
    """
    if config.kv_cache_gib is not None:
        return int(config.kv_cache_gib * (1 << 30))
    if cpu:
        return 1 << 30
    servers = config.servers_per_gpu or 1
    if servers == 1 and not driver_lines():  # a GPU whose size nobody tells
        return None
    left = left_for_cache(model, config, servers)
    if servers == 1 and left < MEASURED_BELOW:
        return None
    if left < 1 << 30:
        raise SettingsError(
            f"{servers} servers do not fit a GPU: {left / (1 << 30):.1f} GiB are left to each for keys and values",
            hint="Lower `vllm.servers_per_gpu`, or give `vllm.kv_cache_gib`",
        )
    return left
