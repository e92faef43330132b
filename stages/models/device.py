"""Which device and which type of number a model gets here."""

import torch

from nanoskyrl.stages.core.errors import EngineError


def pick_device(name: str) -> str:
    """Return the device that `auto` stands for here."""
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise EngineError(
            f"there is no `{name}` here", hint="Set the device to auto or cpu; `skyrl doctor` says what there is"
        )
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def pick_dtype(name: str, device: str) -> torch.dtype:
    """Return the type that `auto` stands for on a device."""
    if name == "auto":
        return torch.bfloat16 if device.startswith("cuda") else torch.float32
    return getattr(torch, name)
