"""The processes that train together: one, or several under accelerate with DDP or DeepSpeed.

Every process runs the same stage on the same input and takes its share of each
optimizer step; the first one alone writes. `launch` starts them on this machine; under
torchrun they find each other by the environment that it sets.
"""

import itertools
import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import psutil
import torch

from nanoskyrl.stages.core.children import MARK, ending_with_us, free_port, temporary_directory
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.learning import rank_errors
from nanoskyrl.stages.learning.train_config import ZERO_BUCKET, OptimizerConfig, strategy_or_default

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """Who else is training."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def broadcast(self, value: T) -> T:
        """Return what the first process says."""
        if self.size == 1:
            return value
        found = [value]
        torch.distributed.broadcast_object_list(found, src=0)
        return found[0]

    def gather(self, value: T) -> list[T]:
        """Return what every process says, in order."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, value)
        return found

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Return the sum over all processes."""
        return np.sum(self.gather(values), axis=0) if self.size > 1 else values

    def if_main(self, context: AbstractContextManager[T]) -> AbstractContextManager[T | None]:
        """Return a context that only the first process enters; None elsewhere."""
        return context if self.is_main else nullcontext()

    def barrier(self) -> None:
        """Wait for all."""
        if self.size > 1:
            torch.distributed.barrier()


def join(device: str) -> ProcessGroup:
    """Meet the other processes, if this one was started beside some."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return ProcessGroup()
    from accelerate import PartialState

    state = PartialState(cpu=device == "cpu")
    return ProcessGroup(state.process_index, state.num_processes)


def device_of(kind: str) -> str:
    """Return this process's own device of a kind."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if kind == "cuda" and "LOCAL_RANK" in os.environ else kind


def strategy_of(config: OptimizerConfig, world: ProcessGroup, *, parameters: int, lora: bool) -> str:
    """Return how several processes share the model: ddp, zero2 or zero3; `one` for one process.

    Args:
        config: May name one.
        world: All processes.
        parameters: Of the model.
        lora: Whether adapters are trained.

    Raises:
        SettingsError: DeepSpeed is asked for and not installed.
    """
    if world.size == 1 and config.strategy in ("auto", "ddp"):
        return "one"
    strategy = strategy_or_default(config.strategy, parameters, lora=lora)
    if strategy.startswith("zero"):
        import importlib.util

        if importlib.util.find_spec("deepspeed") is None:
            raise SettingsError(
                f"the strategy {strategy} needs DeepSpeed, which is not installed",
                hint="pip install 'nanoskyrl[deepspeed]', or set `train.strategy = ddp`",
            )
    return strategy


def accelerator_of(strategy: str, config: OptimizerConfig, device: str, dtype: torch.dtype) -> Any:
    """Return an Accelerator; DeepSpeed's settings are made from ours."""
    # Asked before it is imported, which accelerate does wherever it is installed, DeepSpeed says nothing of its guess.
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if device == "cpu" else "cuda")
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState

    if not strategy.startswith("zero") or AcceleratorState._shared_state:  # a second one takes over what is set
        return Accelerator(cpu=device == "cpu" and not strategy.startswith("zero"))
    if "WORLD_SIZE" not in os.environ:  # DeepSpeed wants a process group of one, too
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.setdefault("MASTER_PORT", str(free_port()))
    if device == "cpu":
        _leave_shared_memory_alone()
    half = dtype == torch.bfloat16
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # in words that we do not count by
        "gradient_accumulation_steps": 1,  # we say which backward pass is the last
        "gradient_clipping": config.max_grad_norm,
        "zero_optimization": {
            "stage": int(strategy[-1]),
            "overlap_comm": device != "cpu",
            "contiguous_gradients": True,
            "reduce_bucket_size": ZERO_BUCKET,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "bf16": {"enabled": half, **({"check_grad_overflow": True} if half else {})},
        "zero_allow_untested_optimizer": True,  # such as the 8-bit one
        **({"data_types": {"grad_accum_dtype": "fp32"}} if half else {}),
    }
    plugin = DeepSpeedPlugin(hf_ds_config=settings, zero3_init_flag=False)
    # Given a CPU, accelerate would not start DeepSpeed; the processes have met on it already.
    return Accelerator(deepspeed_plugin=plugin, mixed_precision="bf16" if half else "no")


def _leave_shared_memory_alone() -> None:
    """Have DeepSpeed's processes on a CPU meet by torch alone.

    Its own way is compiled at the first use, under a lock file that a killed process leaves behind:
    every training after it would wait for ever.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def share_out(batches: Sequence[list[int]], lengths: Sequence[int], world: ProcessGroup) -> list[list[int]]:
    """Return this process's micro-batches: every process has as many, and about as many tokens.

    Args:
        batches: Rows of each micro-batch; all processes have the same list.
        lengths: Tokens of each row.
        world: All processes.

    Returns:
        An empty list stands for a pass that trains nothing.
    """
    if world.size == 1:
        return list(batches)
    cut = [list(batch) for batch in batches]

    def tokens(batch: list[int]) -> int:
        return sum(lengths[row] for row in batch)

    while len(cut) % world.size:
        # The largest that can be cut in two is; where none can, somebody has nothing to do.
        largest = max((batch for batch in cut if len(batch) > 1), key=tokens, default=None)
        if largest is None:
            cut.append([])
            continue
        cut.remove(largest)
        # Neighbours stay together: they may share what they begin with.
        ends = np.cumsum([lengths[row] for row in largest])
        half = min(max(1, int(np.searchsorted(ends, ends[-1] / 2))), len(largest) - 1)
        cut += [largest[:half], largest[half:]]
    cut.sort(key=lambda batch: (-tokens(batch), batch))
    # Back and forth, so that nobody always gets the largest.
    places = itertools.cycle((world.rank, world.size - 1 - world.rank))
    return [cut[start + place] for start, place in zip(range(0, len(cut), world.size), places, strict=False)]


def launch(arguments: Sequence[str], processes: int) -> None:
    """Run this Python with the arguments in several processes that know of each other.

    Args:
        arguments: Of the interpreter, such as ["-m", "nanoskyrl_cli.main", "train"].
        processes: How many.

    Raises:
        NanoskyrlError: one of them failed; with its own words and exit code, if it left any.
        KeyboardInterrupt: at SIGINT and SIGTERM, once all of them have ended.
    """
    import sys
    import uuid

    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence(("torch.distributed.elastic", "torch.distributed.launcher"))
    with temporary_directory("nanoskyrl-") as scratch:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
            rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1,
            # Else torch makes a folder of its own, and leaves it.
            logs_specs=DefaultLogsSpecs(log_dir=str(scratch / "logs")),
            # At SIGINT they are ended by SIGTERM: Python that is starting would print what it was at.
            signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
        )  # fmt: skip
        told = {rank_errors.PLACE: str(scratch), MARK: ending_with_us()[MARK]}
        if "OMP_NUM_THREADS" not in os.environ:  # accelerate would choose, and warn
            told["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // processes))
        before = {name: os.environ[name] for name in told if name in os.environ}
        os.environ |= told
        others = {child.pid for child in psutil.Process().children()}
        try:
            elastic_launch(config, sys.executable)(*arguments)
        except SignalException as error:
            raise KeyboardInterrupt from error
        except ChildFailedError as error:
            codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            raise rank_errors.read_error(scratch, codes, processes) from None
        finally:
            for name in told:
                os.environ.pop(name, None)
            os.environ |= before
            # Interrupted while it starts them, torch forgets those that have begun: they would wait for ever.
            _end([child for child in psutil.Process().children() if child.pid not in others])


def _end(processes: list[psutil.Process]) -> None:
    """See to it that processes are gone, and what they started."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for each in (*process.children(recursive=True), process):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
    psutil.wait_procs(processes, timeout=10)


def _silence(names: tuple[str, ...]) -> None:
    """Keep loggers from reporting in their way what is reported in ours."""
    for name in (*names, *logging.root.manager.loggerDict):
        if name.startswith(names):
            logging.getLogger(name).setLevel(logging.CRITICAL)
