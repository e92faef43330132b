"""What steps weights: float32 copies, optimizer and schedule, where every process holds the whole model.

That is one process, or several under DDP. The policy is one set of weights, and a critic
another: a run may change to an algorithm without a critic, and back.
"""

import contextlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoskyrl.stages.learning.optim import Masters, make_optimizer, use_settings
from nanoskyrl.stages.learning.state_files import StateFiles
from nanoskyrl.stages.learning.train_config import OptimizerConfig

OF_CRITIC = "critic_"
"""Before the names of what a state holds of a critic."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did."""

    grad_norm: float
    lr: float
    skipped: bool
    """The gradients were not finite, so the weights stayed as they were."""
    critic_grad_norm: float | None = None
    """Of the critic's own weights."""


class TrainedWeights:
    """The weights of one module that learn, and their optimizer."""

    def __init__(self, accelerator: Any, module: Any, lr: float, config: OptimizerConfig) -> None:
        """Begin a new optimizer.

        Args:
            accelerator: Wraps module and optimizer for several processes.
            module: Its weights learn, but those that take no gradient.
            lr: The peak learning rate.
            config: Of the optimizer; its `lr` is not read.
        """
        self._lr, self._config = lr, config
        self.masters = Masters(p for p in module.parameters() if p.requires_grad)
        """What the optimizer steps: the weights themselves, or float32 copies."""
        optimizer, self.scheduler = make_optimizer(self.masters.stepped, lr, config)
        self.module, self.optimizer = accelerator.prepare(module, optimizer)

    def clip_gradient(self) -> float:
        """Scale the gradient down to `max_grad_norm`, and return the norm that it had."""
        return float(torch.nn.utils.clip_grad_norm_(self.masters.stepped, self._config.max_grad_norm))

    def step(self) -> None:
        """Follow the gradient."""
        self.optimizer.step()
        self.masters.give_back()

    def state(self) -> dict[str, Any]:
        """Return what `load_state` takes."""
        copies = {"masters": self.masters.state()} if self.masters.any else {}
        return {"optimizer": self.optimizer.state_dict(), **copies, "scheduler": self.scheduler.state_dict()}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Resume from a state; rates, decays and schedules are those of the settings, not those it was made with."""
        self.scheduler.load_state_dict(saved["scheduler"])
        self.optimizer.load_state_dict(saved["optimizer"])
        use_settings(self.scheduler, self._lr, self._config)
        self.masters.load_state(saved.get("masters", ()))


class PlainStrategy:
    """Optimizers of our own: of the policy, and of a critic beside it."""

    trains_critic = True
    shared = ("ddp", 1)
    """Which processes must load a state together, by strategy and number: any may, for each holds all of it."""

    def __init__(self, name: str = "one", processes: int = 1) -> None:
        """Hold nothing until `prepare`."""
        self.name, self._processes = name, processes
        self.trained: list[TrainedWeights] = []
        """Of the policy, then of the critic if there is one."""

    def prepare(self, accelerator: Any, module: Any, lr: float, config: OptimizerConfig) -> Any:
        """Return a module as it is trained; the policy's comes first, then the critic's."""
        self._accelerator = accelerator
        self.trained.append(TrainedWeights(accelerator, module, lr, config))
        return self.trained[-1].module

    def forget_gradients(self) -> None:
        """Free what was accumulated."""
        for each in self.trained:
            each.optimizer.zero_grad(set_to_none=True)

    def add_gradient(self, loss: Callable[[], Tensor], *, last: bool) -> None:
        """Add the gradient of a micro-batch.

        Args:
            loss: Returns this process's share of the mini-batch's loss.
            last: Whether no micro-batch of the mini-batch follows.
        """
        policy = self.trained[0]
        # Several processes: gradients are averaged, and the loss is a share of the sum. Copies in float32 take
        # up each micro-batch's gradient, so each is exchanged; otherwise the last one's exchange does for all.
        wait = not last and not policy.masters.any and self._processes > 1
        with self._accelerator.no_sync(policy.module) if wait else contextlib.nullcontext():
            self._accelerator.backward(loss() * self._processes)
        for each in self.trained:
            each.masters.take_gradients()

    def gradient_of(self, parameter: Tensor) -> Tensor:
        """Return the gradient by one of the policy's weights, 0 where nothing reached it."""
        pairs = zip(self.trained[0].masters.parameters, self.trained[0].masters.stepped, strict=True)
        master = next(master for weight, master in pairs if weight is parameter)
        return torch.zeros_like(master) if master.grad is None else master.grad

    def step(self) -> StepResult:
        """Take one optimizer step; where a gradient is not finite, no weight is stepped."""
        lr = float(self.trained[0].scheduler.get_last_lr()[0])
        norms = [each.clip_gradient() for each in self.trained]
        finite = bool(np.isfinite(norms).all())
        with warnings.catch_warnings():  # torch wonders why the first step was skipped
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            for each in self.trained:
                if finite:
                    each.step()
                each.scheduler.step()
        return StepResult(norms[0], lr, not finite, *norms[1:])

    def gathered(self) -> dict[str, Tensor] | None:
        """Return the weights by the names of the bare model, if no process holds them whole: here each does."""

    def save_state(self, files: StateFiles) -> dict[str, Any]:
        """Return what `load_state` takes; there are no other files."""
        policy, *critic = (each.state() for each in self.trained)
        return policy | {f"{OF_CRITIC}{name}": value for of in critic for name, value in of.items()}

    def load_state(self, state: Path, saved: dict[str, Any]) -> None:
        """Resume from a state; it may have been left without a critic."""
        of_critic = {name.removeprefix(OF_CRITIC): saved[name] for name in saved if name.startswith(OF_CRITIC)}
        for each, values in zip(self.trained, (saved, of_critic), strict=False):
            if values:
                each.load_state(values)
