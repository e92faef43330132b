"""AdamW over weights of any type: what is stepped is always float32.

A step of 1e-6 is lost in bfloat16, whose neighbours lie 0.4 % apart. So weights in half
precision get a float32 copy that the optimizer steps and that is rounded back, and
gradients are added up in float32.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from nanoskyrl.stages.core.errors import SettingsError, told_as
from nanoskyrl.stages.learning.train_config import OptimizerConfig


class Masters:
    """The float32 copies of trained weights; weights that are float32 are their own."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        """Copy what needs a copy."""
        self.parameters = list(parameters)
        self.stepped = [
            p if p.dtype == torch.float32 else torch.nn.Parameter(p.detach().float()) for p in self.parameters
        ]
        self._pairs = [(p, m) for p, m in zip(self.parameters, self.stepped, strict=True) if p is not m]

    @property
    def any(self) -> bool:
        """Whether there is a copy at all."""
        return bool(self._pairs)

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Add the gradients of a micro-batch to those of the copies."""
        sums, added = [], []
        for parameter, master in self._pairs:
            if parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                sums.append(master.grad)
                added.append(parameter.grad)
            parameter.grad = None
        if sums:
            torch._foreach_add_(sums, added)  # one launch for all weights

    @torch.no_grad()
    def give_back(self) -> None:
        """Round the copies back into the weights."""
        if self._pairs:
            torch._foreach_copy_([weight for weight, _ in self._pairs], [master for _, master in self._pairs])

    def state(self) -> list[torch.Tensor]:
        """Return the copies."""
        return [master.detach() for _, master in self._pairs]

    @torch.no_grad()
    def load_state(self, saved: Sequence[torch.Tensor]) -> None:
        """Take copies that were saved.

        Raises:
            ValueError: they are others' copies.
        """
        for (_, master), value in zip(self._pairs, saved, strict=True):
            master.copy_(value)


def make_optimizer(parameters: Sequence[Any], lr: float, config: OptimizerConfig) -> tuple[Any, Any]:
    """Return AdamW and its schedule.

    Raises:
        SettingsError: there is no such schedule, or the 8-bit optimizer is not installed.
    """
    given: dict[str, Any] = {"lr": lr, "betas": config.adam_betas, "weight_decay": config.weight_decay}
    if config.optimizer == "adamw_8bit":
        check_bitsandbytes("optimizer = adamw_8bit")
        from bitsandbytes.optim import AdamW8bit  # type: ignore[import-not-found]

        optimizer: Any = AdamW8bit(parameters, **given)
    else:
        # One kernel for all weights; on a CPU the plain loop is as fast, and its bytes are known.
        optimizer = torch.optim.AdamW(parameters, fused=parameters[0].is_cuda or None, **given)
    if config.lr_scheduler == "constant_with_warmup":
        return optimizer, LambdaLR(optimizer, partial(_warmed_up, steps=config.lr_warmup_steps))
    from transformers import get_scheduler  # it imports the trainer and, where it is installed, bitsandbytes: seconds

    with told_as(
        SettingsError,
        f"`train.lr_scheduler` {config.lr_scheduler!r}",
        ValueError,
        hint="Check the name, and `train.lr_decay_steps`",
    ):
        scheduler = get_scheduler(
            config.lr_scheduler,
            optimizer,
            num_warmup_steps=config.lr_warmup_steps,
            num_training_steps=config.lr_decay_steps,
        )
    return optimizer, scheduler


def _warmed_up(step: int, *, steps: int) -> float:
    """Return the share of the peak rate at a step of transformers' `constant_with_warmup`."""
    return min(1.0, step / max(1, steps)) if steps else 1.0


def check_bitsandbytes(setting: str) -> None:
    """Raise SettingsError if bitsandbytes, which a setting of `train` needs, does not import."""
    try:
        import bitsandbytes  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        raise SettingsError(
            f"`train.{setting}` needs bitsandbytes, which is not installed",
            hint="pip install 'nanoskyrl[qlora]', or leave the setting out",
        ) from error


def use_settings(scheduler: Any, lr: float, config: OptimizerConfig) -> None:
    """Let an optimizer whose state was loaded continue with these settings: its state holds those it was made with.

    Args:
        scheduler: Of the optimizer; its place in the schedule stays.
        lr: The peak learning rate.
        config: Decays.
    """
    optimizer = scheduler.optimizer
    scheduler.base_lrs = [lr] * len(optimizer.param_groups)
    rates = [lr * factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        # A tuple of its own: one that two optimizers share is written once, unlike a live learner's.
        betas = (*config.adam_betas,)
        group |= {"lr": rate, "initial_lr": lr, "betas": betas, "weight_decay": config.weight_decay}
    scheduler._last_lr = rates
