"""What a decoder keeps for the backward pass: all, or what is needed to compute it again."""

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.models.rows_alone import decoder_of


def keep_less(base: Any, share: float, *, compiled: bool = False) -> None:
    """Let a share of the decoder's layers be computed again in the backward pass instead of being kept.

    Args:
        base: A causal language model of transformers.
        share: From 0, none, to 1, all.
        compiled: Compile every layer, so that a GPU reads and writes its states fewer times.

    Raises:
        SettingsError: the model cannot do this.
    """
    layers = list(getattr(decoder_of(base), "layers", ()))
    if (share or compiled) and not has_layers(base):
        raise SettingsError(
            f"a {type(base).__name__} has no layers that can be computed again or compiled one by one",
            hint="Set `train.gradient_checkpointing = 0` and `train.compile = false`",
        )
    if compiled and not (embedding := base.get_input_embeddings()).weight.requires_grad:
        # The first layer's states would be without gradient, those of all others with: two programs to compile.
        embedding.register_forward_hook(_with_gradient)
    count = round(share * len(layers))
    for index, layer in enumerate(layers):
        if (index + 1) * count // len(layers) > index * count // len(layers):  # spread evenly
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
            # A layer asks for checkpoints only while training; what is inside it stays without dropout.
            layer.training = True
        if compiled:
            layer.compile(dynamic=True)


def has_layers(base: Any) -> bool:
    """Say whether a model has layers that can be computed again, or compiled, one by one."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = list(getattr(decoder_of(base), "layers", ()))
    return bool(layers) and all(isinstance(layer, GradientCheckpointingLayer) for layer in layers)


def _with_gradient(module: Any, given: Any, states: Any) -> Any:
    return states.requires_grad_(True) if torch.is_grad_enabled() else states
