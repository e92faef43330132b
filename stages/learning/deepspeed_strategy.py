"""Training in which processes share the optimizer's state, or the weights too, by DeepSpeed's ZeRO.

The methods are those of `PlainStrategy`. DeepSpeed keeps float32 copies and clips by itself,
and has a checkpoint of its own.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from nanoskyrl.stages.core.errors import EngineError
from nanoskyrl.stages.core.metrics import grouped
from nanoskyrl.stages.learning.optim import make_optimizer, use_settings
from nanoskyrl.stages.learning.state_files import StateFiles
from nanoskyrl.stages.learning.stepping import StepResult
from nanoskyrl.stages.learning.train_config import ZERO_BUCKET, OptimizerConfig
from nanoskyrl.stages.models.write_policy import on_host

TAG = "deepspeed"
"""Name of the checkpoint inside a state."""


class DeepSpeedStrategy:
    """One engine of DeepSpeed, which steps the policy; it takes no second set of weights, as a critic's would be."""

    trains_critic = False

    def __init__(self, name: str, processes: int) -> None:
        """Hold nothing until `prepare`."""
        self.name, self._processes = name, processes
        self.shared = (name, processes)

    def prepare(self, accelerator: Any, module: Any, lr: float, config: OptimizerConfig) -> Any:
        """Return the module as it is trained."""
        self._accelerator, self._lr, self._config = accelerator, lr, config
        optimizer, self._scheduler = make_optimizer([p for p in module.parameters() if p.requires_grad], lr, config)
        self._engine, _ = accelerator.prepare(module, optimizer)
        return self._engine

    def forget_gradients(self) -> None:
        """Do nothing: the engine sees to its gradients."""

    def add_gradient(self, loss: Callable[[], Tensor], *, last: bool) -> None:
        """Add the gradient of a micro-batch."""
        share = loss()
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(share * self._processes)

    def gradient_of(self, parameter: Tensor) -> Tensor:
        """Return the gradient by one of the policy's weights."""
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(parameter)  # type: ignore[return-value]

    def step(self) -> StepResult:
        """Take one optimizer step."""
        lr = float(self._scheduler.get_last_lr()[0])
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm() or 0.0)
        self._scheduler.step()
        skipped = bool(getattr(self._engine.optimizer, "overflow", False))
        if not np.isfinite(norm) and not skipped:
            raise EngineError(
                "the gradient was not finite, and DeepSpeed stepped all the same",
                hint="Lower `train.lr`; the policy on disk is as it was",
            )
        return StepResult(norm, lr, skipped)

    def gathered(self) -> dict[str, Tensor] | None:
        """Return the weights by the names of the bare model, if no process holds them whole."""
        if self.name != "zero3":
            return None
        from deepspeed.runtime.zero import GatheredParameters

        found: dict[str, Tensor] = {}
        names: dict[str, Any] = self._engine.module.model.state_dict(keep_vars=True)
        of_each = grouped((id(value), name) for name, value in names.items())
        for values in _in_buckets({id(value): value for value in names.values()}):
            with GatheredParameters([value for value in values if hasattr(value, "ds_id")], modifier_rank=0):
                if self._accelerator.is_main_process:
                    copies = on_host({of_each[id(value)][0]: value for value in values})
                    found |= {name: copy for first, copy in copies.items() for name in of_each[id(names[first])]}
        return {name: found[name] for name in names if name in found}

    def save_state(self, files: StateFiles) -> dict[str, Any]:
        """Have DeepSpeed's checkpoint written among a state's files; return what `load_state` takes beside it."""
        from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

        class Into(TorchCheckpointEngine):
            def save(self, state_dict: Any, path: str) -> None:
                files.save(state_dict, path)

        self._engine.checkpoint_engine = Into()
        self._engine.save_checkpoint(str(files.place), tag=TAG, exclude_frozen_parameters=True)
        return {"scheduler": self._scheduler.state_dict()}

    def load_state(self, state: Path, saved: dict[str, Any]) -> None:
        """Resume from a state."""
        try:
            # Not strictly: weights that do not learn are not in it.
            found, _ = self._engine.load_checkpoint(
                str(state), tag=TAG, load_module_strict=False, load_lr_scheduler_states=False
            )
        except Exception as error:  # assertions and errors of its own
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if found is None:
            raise FileNotFoundError(state)
        self._scheduler.load_state_dict(saved["scheduler"])
        use_settings(self._scheduler, self._lr, self._config)


def _in_buckets(values: Mapping[int, Any]) -> Iterator[list[Any]]:
    """Yield weights, shared ones once, as many at a time as DeepSpeed exchanges."""
    bucket, size = list[Any](), 0
    for value in values.values():
        bucket.append(value)
        size += getattr(value, "ds_numel", value.numel())
        if size >= ZERO_BUCKET:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
