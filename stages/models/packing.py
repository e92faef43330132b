"""Rows of unlike length laid end to end, so that no layer computes padding.

A packed batch is one long row. Attention sees where each row begins and ends, so it is
block-diagonal; everything else of a decoder works token by token. On a GPU attention is
flash attention over rows of any length, from torch itself; elsewhere, and where padding
costs less, rows are padded for attention alone. Models whose layers mix tokens in another
way are run padded: their config says so, or a few packed rows that differ from rows alone.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.models.kv_cache import accepted, without_wrapper
from nanoskyrl.stages.models.logits import logit_transform
from nanoskyrl.stages.models.rows_alone import (
    FAMILIES_HINT,
    RowsAlone,
    a_,
    agree,
    decoder_of,
    last_states,
    run_alone,
)

PACKED = "nanoskyrl_packed"
"""Name of our attention among those of transformers."""
PLAIN_LAYERS = {"full_attention", "sliding_attention", "attention"}


def _varlen_options() -> frozenset[str] | None:
    """Return what torch's attention over rows of any length takes; None where there is none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return frozenset(inspect.signature(varlen_attn).parameters)


VARLEN_OPTIONS = _varlen_options()
LONG = 2048
"""Tokens of a row from which its attention is worth the copies that padding it takes."""
PADDED_SPEED = 1.4
"""Times as many products a second that attention of padded rows makes, since Hopper; 1.5 to 1.6 were measured."""


@dataclass(frozen=True, slots=True)
class Pack:
    """Where the rows of a padded batch lie in a packed one of N tokens."""

    places: Tensor
    """[N] index of each token among the B * T of the padded batch."""
    positions: Tensor
    """[1, N] position of each token in its own row."""
    bounds: Tensor
    """[B + 1] int32 where each row begins, and where the last one ends."""
    longest: int
    pads: bool
    """Whether rows are padded for attention, though they need not be."""

    def flat(self, padded: Tensor) -> Tensor:
        """Return [N, ...] of [B, T, ...]."""
        return padded.flatten(0, 1).index_select(0, self.places)


def pack_of(mask: Tensor) -> Pack:
    """Return where the rows of a batch lie if they are packed.

    Args:
        mask: [B, T] 1 for real tokens, padded on the right.
    """
    lengths = mask.sum(-1)
    places = mask.flatten().nonzero()[:, 0]
    bounds = functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    known = lengths.tolist()
    pads = mask.is_cuda and torch.cuda.get_device_capability(mask.device) >= (9, 0) and padding_is_faster(known)
    return Pack(places, (places % mask.shape[1])[None], bounds, max(known), pads)


def padding_is_faster(lengths: Sequence[int]) -> bool:
    """Say whether attention over these rows takes less time padded: torch has faster kernels for that (cuDNN's).

    Products grow with the square of a row's length. `benchmarks/README.md` has what was measured.
    """
    longest = max(lengths)
    needed = sum(length**2 for length in lengths)
    return longest >= LONG and len(lengths) * longest**2 < PADDED_SPEED * needed


def prepare_packing(model: Any, alone: RowsAlone | None = None) -> bool:
    """Give the model attention that takes packed rows, if its layers are of a kind that can; say whether they are.

    Args:
        model: A causal language model of transformers, or a decoder of one.
        alone: What it made of rows, if that is known.
    """
    base = without_wrapper(model)
    if not can_pack(base):
        return False
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    alone = alone or run_alone(base)
    if alone.logits is not None:
        logit_transform(base, alone)
    own = base.config.get_text_config()._attn_implementation
    AttentionInterface.register(PACKED, _attend)
    AttentionMaskInterface.register(PACKED, lambda *args, **kwargs: None)  # bounds say it all
    base.set_attn_implementation(PACKED)
    if not _packed_agree(base, alone):
        base.set_attn_implementation(own)
        return False
    return True


def check_padding(model: Any) -> RowsAlone:
    """Return what the model makes of rows alone, and refuse one that makes something else of them padded.

    Raises:
        InputError: says what it does otherwise; also where its head is not understood.
    """
    base = without_wrapper(model)
    alone = run_alone(base)
    logit_transform(base, alone)
    ids, mask = alone.padded()
    with torch.no_grad():
        found = hidden_states(decoder_of(base), ids, mask, None)
    if not agree([states[: len(row)] for states, row in zip(found, alone.rows, strict=True)], alone.states):
        raise InputError(
            f"{a_(base)} answers otherwise where rows of unlike length share a batch: it cannot be trained here",
            hint=FAMILIES_HINT,
        )
    return alone


def _packed_agree(base: Any, alone: RowsAlone) -> bool:
    """Say whether packed rows give the states of rows alone."""
    ids, mask = alone.padded()
    pack = pack_of(mask)
    try:
        with torch.no_grad():
            found = hidden_states(decoder_of(base), ids, mask, pack)
    except (TypeError, RuntimeError, ValueError):  # a layer does not hand on where rows begin, or shapes do not fit
        return False
    return agree(list(found.split([len(row) for row in alone.rows])), alone.states)


def can_pack(base: Any) -> bool:
    """Say whether tokens of a model meet in plain attention alone: no recurrence, no bound on scores, no sinks."""
    config = base.config.get_text_config()
    return bool(
        getattr(base, "_supports_attention_backend", False)
        and not getattr(base, "_is_stateful", False)
        and set(getattr(config, "layer_types", None) or ()) <= PLAIN_LAYERS
        and not getattr(config, "attn_logit_softcapping", None)
        and not any(hasattr(module, "sinks") for module in base.modules())
    )


def is_packing(base: Any) -> bool:
    """Say whether the model was prepared for packed rows."""
    return base.config.get_text_config()._attn_implementation == PACKED


def hidden_states(decoder: Any, ids: Tensor, mask: Tensor, pack: Pack | None) -> Tensor:
    """Return the decoder's last states.

    Args:
        decoder: Of transformers.
        ids: [B, T] padded on the right.
        mask: [B, T] 1 for real tokens.
        pack: Where they lie packed; None: the decoder is run padded.

    Returns:
        [N, H] packed, or [B, T, H].
    """
    if pack is None:
        return last_states(decoder(**accepted(decoder, input_ids=ids, attention_mask=mask, use_cache=False)))
    found = decoder(
        input_ids=pack.flat(ids)[None], position_ids=pack.positions, use_cache=False,
        bounds=pack.bounds, longest=pack.longest, pads=pack.pads,
    )  # fmt: skip
    return last_states(found)[0]


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    bounds: Tensor,
    longest: int,
    pads: bool,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return causal attention within each row; [1, N, heads, D] of [1, heads, N, D]."""
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    window = sliding_window if sliding_window and sliding_window < longest else None
    # Torch's kernel takes half precision and equal sizes of heads up to 256; what it does not take is padded.
    flash = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] == value.shape[-1]
    unpadded = window is not None or not pads  # a window's mask is not for the fast kernels
    if unpadded and flash and query.shape[-1] <= 256 and VARLEN_OPTIONS is not None:
        return _varlen(query, key, value, bounds, longest, scaling, window)[None], None
    return _padded(query, key, value, bounds, longest, scaling, window)[None], None


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options, given = VARLEN_OPTIONS, {}
    assert options is not None
    # Its arguments changed from version to version of torch.
    if "window_size" in options:
        given["window_size"] = (-1 if window is None else window - 1, 0)
    elif "is_causal" in options and window is None:
        given["is_causal"] = True
    else:
        return _padded(query, key, value, bounds, longest, scaling, window)
    if "scale" in options:
        given["scale"] = scaling
    elif scaling is not None:
        query = query * (scaling * query.shape[-1] ** 0.5)
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in options:
            given["enable_gqa"] = True
        else:
            times = query.shape[1] // key.shape[1]
            key, value = (each.repeat_interleave(times, dim=1) for each in (key, value))
    return varlen_attn(query, key.contiguous(), value.contiguous(), bounds, bounds, longest, longest, **given)  # type: ignore[return-value]


def _padded(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    """Return attention of packed rows by padding them on the right, where no causal row can see."""
    starts, count = bounds[:-1].long(), len(bounds) - 1
    index = torch.arange(len(query), device=query.device)
    row = torch.bucketize(index, bounds[1:].long(), right=True)
    places = row * longest + index - starts[row]

    def padded(of: Tensor) -> Tensor:
        room = of.new_zeros(count * longest, *of.shape[1:])
        return room.index_copy(0, places, of).unflatten(0, (count, longest)).transpose(1, 2)

    mask = None
    if window is not None:
        ago = index[:longest, None] - index[None, :longest]
        mask = (ago >= 0) & (ago < window)
    found = functional.scaled_dot_product_attention(
        padded(query), padded(key), padded(value), attn_mask=mask, is_causal=mask is None, scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return found.transpose(1, 2).flatten(0, 1).index_select(0, places)
