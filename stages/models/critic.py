"""PPO's critic: a value head on a backbone of its own, or on the policy's.

It is saved beside the policy, in `critic/` of its directory, and is no part of the policy's
digest: two policies that differ in their critics alone give the same answers. A policy without a
`critic/` has one that predicts 0 everywhere, which is what a new head does.
"""

import copy
import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nanoskyrl.stages.core.errors import InputError, SettingsError, told_as
from nanoskyrl.stages.core.storage import as_usual, make_directory
from nanoskyrl.stages.models.kv_cache import without_wrapper
from nanoskyrl.stages.models.loading import align
from nanoskyrl.stages.models.packing import Pack, hidden_states, is_packing, prepare_packing
from nanoskyrl.stages.models.policy import CRITIC, check_critic
from nanoskyrl.stages.models.remote_code import trust
from nanoskyrl.stages.models.rows_alone import decoder_of

HEAD, DESCRIPTION = "value_head.safetensors", "critic.json"


class Critic(nn.Module):
    """What a state is worth: one number before each token is drawn."""

    def __init__(self, backbone: nn.Module | None, hidden_size: int) -> None:
        """Begin with a head that predicts 0.

        Args:
            backbone: A decoder of transformers; None: the policy's own hidden states come in.
            hidden_size: Of those states.
        """
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, ids: Tensor, mask: Tensor, pack: Pack | None, hidden: Tensor | None = None) -> Tensor:
        """Return the value before each token but the first is drawn; [B, T-1] float32.

        Args:
            ids: [B, T] token ids, padded on the right.
            mask: [B, T] 1 for real tokens.
            pack: Where they lie packed; None: the policy is run padded.
            hidden: [N, H], or [B, T, H], the policy's states, for a critic without a backbone.
        """
        if self.backbone is not None:
            pack = pack if is_packing(self.backbone) else None
            hidden = hidden_states(self.backbone, ids, mask, pack)
        assert hidden is not None
        values = self.head(hidden.to(self.head.weight.dtype))[..., 0].float()
        if pack is not None:
            values = values.index_select(0, pack.index.flatten()).view(ids.shape)
        return values[:, :-1]


def new_critic(model: Any, backbone: str) -> Critic:
    """Return an untrained critic for a policy.

    Args:
        model: The policy's model.
        backbone: own (a copy of the policy's decoder), or shared (the policy's own states).

    Raises:
        SettingsError: a backbone of its own is asked for, and the policy has adapters already.
    """
    base = without_wrapper(model)
    if backbone == "own" and base is not model:
        raise SettingsError(
            "a critic of its own cannot begin from a policy with adapters", hint="Set `critic.backbone = shared`"
        )
    decoder = copy.deepcopy(decoder_of(base)) if backbone == "own" else None
    if decoder is not None:
        decoder.requires_grad_(True)
    return Critic(decoder, base.config.get_text_config().hidden_size).to(base.device)


def load_critic(policy: Path, model: Any, backbone: str | None, *, dtype: torch.dtype, device: str) -> Critic | None:
    """Return the critic saved beside a policy; None if there is none.

    Args:
        policy: The policy's directory.
        model: Its model.
        backbone: What it must be, own or shared; None: either.
        dtype: Of a backbone of its own.
        device: Where it goes.

    Raises:
        InputError: its files cannot be read.
        SettingsError: it has another kind of backbone than is asked for.
    """
    from safetensors import SafetensorError
    from transformers import AutoModel

    check_critic(policy)
    folder = policy / CRITIC
    if not folder.is_dir():
        return None
    base = without_wrapper(model)
    with told_as(
        InputError,
        f"the critic in `{folder}` does not load",
        OSError,
        ValueError,
        KeyError,
        TypeError,
        RuntimeError,
        SafetensorError,
        hint="Run `skyrl train` again with `--force`",
    ):
        kind = json.loads((folder / DESCRIPTION).read_bytes())["backbone"]
        decoder = AutoModel.from_pretrained(folder, dtype=dtype, **trust()) if kind == "own" else None
        if decoder is not None:
            align(decoder)
            prepare_packing(decoder)
        critic = Critic(cast(nn.Module, decoder), base.config.get_text_config().hidden_size)
        critic.head.load_state_dict(load_file(folder / HEAD))
    if backbone is not None and backbone != kind:
        raise SettingsError(
            f"the critic in `{folder}` has the backbone `{kind}`, and `critic.backbone` is {backbone}",
            hint="Continue with its own, or begin another run",
        )
    return critic.to(device)


def save_critic(critic: Critic, policy: Path) -> None:
    """Write a critic beside its policy."""
    folder = policy / CRITIC
    make_directory(folder)
    if critic.backbone is not None:
        cast(Any, critic.backbone).save_pretrained(folder)
    state = {name: value.detach().cpu().contiguous() for name, value in critic.head.state_dict().items()}
    save_file(state, folder / HEAD)
    for file in folder.glob("*.safetensors"):
        as_usual(file)
    kind = "own" if critic.backbone is not None else "shared"
    (folder / DESCRIPTION).write_text(json.dumps({"backbone": kind}) + "\n")
