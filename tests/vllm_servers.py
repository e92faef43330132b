"""The vLLM that tests start servers with, where there is one."""

from nanoskyrl.stages.core.errors import EngineError
from nanoskyrl.stages.engines.vllm.config import VllmConfig
from nanoskyrl.stages.engines.vllm.process import find_installation

CONFIG = VllmConfig(gpus="cpu", max_num_seqs=64, kv_cache_gib=0.25, start_seconds=240)


def missing():
    """Return why there is no vLLM for CPUs to test with, or None."""
    try:
        found = find_installation()
    except EngineError as error:
        return f"{error}: {error.hint}"
    if not found.for_cpu:
        return f"vLLM {found.version} is not the build for CPUs"
    return None
