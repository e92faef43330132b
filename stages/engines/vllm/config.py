"""Settings of the engine `vllm` and of `skyrl serve`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from nanoskyrl.stages.core.checked import (
    COMMAND,
    PATH_OR_NAME,
    PLACE,
    Checked,
    FinitePositive,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.gpus import gpus_of

ServerUrl = Annotated[
    str, Meta(pattern=r"^https?://[^/\s]+/?$", description="addresses such as http://127.0.0.1:8000, without a path")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig(Checked):
    """Which servers generate, and how those that we start are set up."""

    urls: tuple[ServerUrl, ...] = field(default=(), metadata=PLACE)
    """Servers that run already, such as http://127.0.0.1:8000; the key is $VLLM_API_KEY. None: those of
    `skyrl serve` in this run, else our own, started and stopped by the command."""
    gpus: str = field(default="auto", metadata=PLACE)
    """0-3, 0,2 or cpu. auto: all there are, else the CPU."""
    servers_per_gpu: PositiveInt | None = field(default=None, metadata=PLACE)
    """Servers that share each GPU: while one's host code runs, another's kernels do. None: 4, 2 or 1, as many as leave
    half of their share of the memory to keys and values."""
    tensor_parallel: PositiveInt = 1
    """GPUs of one server."""
    python: str | None = field(default=None, metadata=PLACE | PATH_OR_NAME)
    """A Python that has vLLM; None: $NANOSKYRL_VLLM_PYTHON, else this one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on GPUs, float32 on a CPU."""
    max_num_seqs: PositiveInt = 256
    """Sequences that a server decodes at once."""
    alive: PositiveInt | None = field(default=None, metadata=PLACE)
    """Attempts a server has alive at once, generating or in their environment; None: twice max_num_seqs."""
    max_model_len: PositiveInt | None = None
    """Longest sequence; None: the model's context."""
    gpu_memory: Annotated[float, Meta(gt=0, le=1)] = field(default=0.9, metadata=PLACE)
    """Share of a GPU's memory that a server takes."""
    kv_cache_gib: PositiveFloat | None = field(default=None, metadata=PLACE)
    """Memory for keys and values of each server; None: 1 on a CPU, on a GPU what `gpu_memory` leaves."""
    lora_rank: NonNegativeInt = 0
    """Largest rank of adapters that are loaded as they are; 0: they are merged, and the weights reloaded, which is
    the faster way on a CPU."""
    checksum: bool = field(default=True, metadata=PLACE)
    """Ask that the weights in the servers sum to what the files do; false for servers that rewrite them."""
    seeded: bool = True
    """Send every request its seed. Without, tokens are drawn from the server's own stream and cannot be had again."""
    endpoint: Literal["auto", "completions", "tokens"] = field(default="auto", metadata=PLACE)
    """completions, vLLM's path, or tokens, ours, which writes no text; auto: tokens on servers that we started."""
    eager: bool | None = None
    """No CUDA graphs and no compilation; None: only on a CPU."""
    compile: bool | None = None
    """Compile the model before it serves, which takes a minute and gives a fifth more tokens per second; CUDA graphs
    are there either way. None: models of more than 1 GiB of weights. `args` that set it count."""
    args: tuple[str, ...] = field(default=(), metadata=COMMAND)
    """Further arguments of the server."""
    start_seconds: FinitePositive = field(default=900.0, metadata=PLACE)
    """How long a server may take until it answers."""
    request_seconds: FinitePositive = field(default=900.0, metadata=PLACE)
    """How long one turn may take before it is asked for again."""
    trajectory_seconds: PositiveFloat | None = None
    """How long one attempt may take before it fails; None: for ever."""
    tries: PositiveInt = field(default=5, metadata=PLACE)
    """How often a request is made before the rollout gives up; each goes to a server that answers."""
    self_test: NonNegativeInt = field(default=4, metadata=PLACE)
    """Sequences whose log-probs are compared with transformers' where no sums of weights can be taken: of servers that
    we did not start, or that spread a model over GPUs; 0: none."""
    self_test_tolerance: PositiveFloat | None = field(default=None, metadata=PLACE)
    """Largest mean gap in nats of that test; None: 1e-3 in float32, 0.05 in bfloat16."""

    @staticmethod
    def on_gpus(gpus: Sequence[int]) -> dict[str, Any]:
        """Return the settings under which it runs on these GPUs, or on the CPU where there is none."""
        return {"gpus": ",".join(map(str, gpus)) or "cpu"}

    def check(self) -> None:
        """Refuse GPUs that have no such names."""
        if self.gpus != "auto":
            gpus_of("vllm.gpus", self.gpus)


def groups_of_gpus(config: VllmConfig, found: int) -> list[tuple[int, ...]]:
    """Return the GPUs of each server; one empty tuple stands for a server on the CPU.

    Args:
        config: Which are asked for.
        found: How many this machine has.

    Raises:
        SettingsError: there are not so many, or they do not make whole servers.
    """
    if config.gpus == "cpu" or (config.gpus == "auto" and not found):
        return [()]
    named = range(found) if config.gpus == "auto" else gpus_of("vllm.gpus", config.gpus)
    if not named or max(named) >= found:
        raise SettingsError(
            f"`vllm.gpus` is {config.gpus}, and this machine has {found} GPU{'s' * (found != 1)}",
            hint="`skyrl doctor` says what there is; `--gpus cpu` runs on the CPU",
        )
    size = config.tensor_parallel
    if len(named) % size:
        raise SettingsError(
            f"{len(named)} GPUs do not make whole servers of {size}", hint="Change `--gpus` or `--tensor-parallel`"
        )
    groups = [tuple(named[start : start + size]) for start in range(0, len(named), size)]
    return [group for group in groups for _ in range(config.servers_per_gpu or 1)]
