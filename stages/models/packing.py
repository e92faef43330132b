"""Rows of unlike length laid end to end, so that no layer computes padding.

A packed batch is one long row. Attention sees where each row begins and ends, so it is
block-diagonal; everything else of a decoder works token by token. A prefix that rows
share lies there once (`prefix_tree.py`). Models whose layers mix tokens in
another way are run padded: their config says so, or a few packed rows that differ from rows
alone.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoskyrl.stages.core.errors import InputError, Notice
from nanoskyrl.stages.models.cascade_attention import cascade_of
from nanoskyrl.stages.models.kv_cache import accepted, without_wrapper
from nanoskyrl.stages.models.logits import logit_transform
from nanoskyrl.stages.models.packed_attention import Block, attend
from nanoskyrl.stages.models.prefix_tree import PrefixTree, prefix_tree
from nanoskyrl.stages.models.rows_alone import (
    FAMILIES_HINT,
    RowsAlone,
    a_,
    agree,
    decoder_of,
    embeddings_of,
    last_states,
    run_alone,
)

PACKED = "nanoskyrl_packed"
"""Name of our attention among those of transformers."""
PLAIN_LAYERS = {"full_attention", "sliding_attention", "attention"}


LONG = 2048
"""Tokens of a row from which its attention is worth the copies that padding it takes."""
PADDED_SPEED = 1.4
"""Times as many products a second that attention of padded rows makes, since Hopper; 1.5 to 1.6 were measured."""


SAVES = 0.1
"""Share of the tokens from which sharing them is worth its gathering of keys."""
CHECKED = 192
"""Tokens of the rows by which sharing is checked: more than a kernel takes at once."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What a pass over some rows computes."""

    tokens: int = 0
    """Of the rows as they are."""
    computed: int = 0
    """Of these, those that are no other row's, too."""
    pairs: int = 0
    """Of a token and one that it sees."""

    @property
    def shared(self) -> float:
        """Share of the tokens that are computed for another row."""
        return 1 - self.computed / self.tokens if self.tokens else 0.0

    def __add__(self, other: "Workload") -> "Workload":
        return Workload(self.tokens + other.tokens, self.computed + other.computed, self.pairs + other.pairs)


def work_of(lengths: Sequence[int], shared: Sequence[int] | None = None) -> Workload:
    """Return what rows of so many tokens compute, of which so many are computed for another row."""
    n, s = np.asarray(lengths, np.int64), np.asarray(shared or 0, np.int64)
    return Workload(int(n.sum()), int((n - s).sum()), int((n * (n + 1) - s * (s + 1)).sum()) // 2)


@dataclass(frozen=True, slots=True)
class Pack:
    """Where the tokens of a padded batch lie in a packed one of N tokens."""

    places: Tensor
    """[N] index of each token among the B * T of the padded batch."""
    positions: Tensor
    """[1, N] position of each token in its own row."""
    index: Tensor
    """[B, T] place of each token among the N, one for all rows that share it; 0 for padding."""
    before: Tensor
    """[N] place of the token before each in its row; a row's first token has itself there."""
    rows: dict[str, Any]
    """What attention takes of the rows, by name."""
    work: Workload

    @property
    def shares(self) -> bool:
        """Whether a token may stand for several rows'."""
        return "keys" in self.rows

    def flat(self, padded: Tensor) -> Tensor:
        """Return [N, ...] of [B, T, ...]."""
        return padded.flatten(0, 1).index_select(0, self.places)


def pack_of(
    lengths: Sequence[int], width: int, device: torch.device | str, shared: Sequence[int] | None = None
) -> Pack:
    """Return where the rows of a batch lie if they are packed.

    Args:
        lengths: Tokens of each row.
        width: Of the batch as it is padded, on the right.
        device: Where the batch is.
        shared: Leading tokens that each row has in common with the row before it; None: they are not looked at.
    """
    taken = list(shared or [0] * len(lengths))
    own = [length - of for length, of in zip(lengths, taken, strict=True)]
    # Rows of like size lie side by side, so that they can be padded together.
    laid = [row for row in range(len(lengths)) if own[row]]
    if shared is not None:
        laid.sort(key=lambda row: _size_class(own[row], taken[row]))
    bounds = np.cumsum([0, *(own[row] for row in laid)])
    starts = dict(zip(laid, bounds[:-1].tolist(), strict=True))
    index, before = np.zeros((len(lengths), width), np.int64), np.zeros(bounds[-1], np.int64)
    for row, (length, of) in enumerate(zip(lengths, taken, strict=True)):
        index[row, :of] = index[row - 1, :of]
        if of < length:
            start, end = starts[row], starts[row] + length - of
            index[row, of:length] = np.arange(start, end)
            before[start + 1 : end] = np.arange(start, end - 1)
            before[start] = index[row, of - 1] if of else start
    places = np.concatenate([row * width + np.arange(taken[row], lengths[row]) for row in laid])

    def moved(array: np.ndarray, kind: type = np.int64) -> Tensor:
        return torch.from_numpy(array.astype(kind, copy=False)).to(device)

    rows: dict[str, Any] = {"bounds": moved(bounds, np.int32), "longest": max(own), "pads": False}
    if shared is None:
        rows["pads"] = _has_fast_padding(device) and padding_is_faster(lengths)
    else:
        key_bounds = np.cumsum([0, *(lengths[row] for row in laid)])
        rows |= {
            "keys": moved(np.concatenate([index[row, : lengths[row]] for row in laid])),
            "key_bounds": moved(key_bounds, np.int32), "longest_key": max(lengths),
            "blocks": _blocks(laid, own, taken, bounds.tolist(), key_bounds.tolist()),
        }  # fmt: skip
        if torch.device(device).type == "cuda":
            rows["cascade"] = cascade_of(laid, starts, lengths, taken, index, device)
    return Pack(moved(places), moved(places % width)[None], moved(index), moved(before), rows, work_of(lengths, taken))


def _size_class(own: int, taken: int) -> int:
    """Return a number that rows have in common which are padded together; 0: those that take nothing."""
    return max(own - 1, 15).bit_length() if taken else 0


def _blocks(
    laid: Sequence[int], own: Sequence[int], taken: Sequence[int], bounds: list[int], key_bounds: list[int]
) -> tuple[Block, ...]:
    """Return the stretches of rows that are padded together."""
    classes = [_size_class(own[row], taken[row]) for row in laid]
    cuts = [place for place in range(len(laid)) if not place or classes[place] != classes[place - 1]]
    return tuple(
        (
            first, last, bounds[first], bounds[last], key_bounds[first], key_bounds[last],
            max(own[row] for row in laid[first:last]), max(own[row] + taken[row] for row in laid[first:last]),
        )
        for first, last in zip(cuts, [*cuts[1:], len(laid)], strict=True)
    )  # fmt: skip


def _has_fast_padding(device: torch.device | str) -> bool:
    """Say whether a device has kernels that are faster where rows are padded."""
    return torch.device(device).type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def sharing_saves(tree: PrefixTree, device: torch.device | str) -> bool:
    """Say whether computing what rows have in common once takes less time than packing them as they are."""
    if tree.computed > (1 - SAVES) * tree.tokens:
        return False
    as_they_are = work_of(tree.lengths).pairs
    if torch.device(device).type != "cuda":
        # Padded, a row that takes its first keys from others is multiplied with all of its keys, later ones too.
        rows = zip(tree.lengths, tree.shared, strict=True)
        return sum((length - of) * length if of else length**2 / 2 for length, of in rows) <= as_they_are
    if not _has_fast_padding(device) or not padding_is_faster(tree.lengths):
        return True
    # As they are, they would have the faster kernels: these are outdone by fewer products alone.
    return PADDED_SPEED * work_of(tree.lengths, tree.shared).pairs < as_they_are


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
    AttentionInterface.register(PACKED, attend)
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
    lengths = [len(row) for row in alone.rows]
    try:
        with torch.no_grad():
            found = hidden_states(decoder_of(base), ids, mask, pack_of(lengths, ids.shape[1], ids.device))
    except (TypeError, RuntimeError, ValueError):  # a layer does not hand on where rows begin, or shapes do not fit
        return False
    return agree(list(found.split(lengths)), alone.states)


def can_share(model: Any) -> bool:
    """Say whether rows whose shared prefixes are computed once have the states of rows packed as they are.

    If they have not, one line says so.

    Args:
        model: Prepared for packed rows.
    """
    base = without_wrapper(model)
    config = base.config.get_text_config()
    size, most = embeddings_of(base), min(CHECKED, getattr(config, "max_position_embeddings", None) or CHECKED)

    def ids_of(seed: int, count: int) -> list[int]:
        return [(7 + seed + 13 * place) % max(1, size - 1) for place in range(count)]

    whole = ids_of(0, most)
    # One that differs late, one that differs early, one that is the beginning of another.
    made = [whole[:-3] + ids_of(5, 3), whole[: most // 3] + ids_of(3, most // 2), whole[: -most // 4], whole]
    tree = prefix_tree([np.asarray(row) for row in made])
    rows = [torch.tensor(made[row], device=base.device) for row in tree.order]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    plain, shared = (pack_of(tree.lengths, ids.shape[1], ids.device, taken) for taken in (None, tree.shared))
    with torch.no_grad():
        expected, found = (hidden_states(decoder_of(base), ids, mask, pack) for pack in (plain, shared))
    # What no row takes from another is right in any case.
    own = [slice(taken, length) for taken, length in zip(tree.shared, tree.lengths, strict=True) if taken]
    at = [row for row, taken in enumerate(tree.shared) if taken]
    agrees = agree(
        [found[shared.index[row, part]] for row, part in zip(at, own, strict=True)],
        [expected[plain.index[row, part]] for row, part in zip(at, own, strict=True)],
    )
    if not agrees:
        message = f"{a_(base)} has other states where rows share what they begin with: it is computed for each row"
        warnings.warn(Notice(message), stacklevel=2)
    return agrees


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
    found = decoder(input_ids=pack.flat(ids)[None], position_ids=pack.positions, use_cache=False, **pack.rows)
    return last_states(found)[0]
