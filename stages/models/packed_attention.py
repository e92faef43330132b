"""Causal attention of rows laid end to end, each of which may begin with tokens that lie in another row.

On a GPU it is torch's own flash attention over rows of any length: a row's queries are the
tokens that it computes, its keys those of its whole way from the first token, of which a long
common prefix is read once for all rows (`cascade_attention.py`). Elsewhere, and where padding
costs less, rows are padded for attention alone.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nanoskyrl.stages.models.cascade_attention import Cascade, CascadeAttention


def _varlen_options() -> frozenset[str] | None:
    """Return what torch's attention over rows of any length takes; None where there is none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return frozenset(inspect.signature(varlen_attn).parameters)


VARLEN_OPTIONS = _varlen_options()
Block = tuple[int, int, int, int, int, int, int, int]
"""Rows of like size that are padded together: the first and the end of its rows, of their tokens and of their keys, and
the largest number of tokens and keys."""


class _Repeated(torch.autograd.Function):
    """Rows of a matrix, some of them several times; their slopes are added up in float32 at least."""

    @staticmethod
    def forward(ctx: Any, of: Tensor, places: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(places)
        ctx.count = of.shape[0]
        return of.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        kind = torch.promote_types(slopes.dtype, torch.float32)
        total = torch.zeros(ctx.count, *slopes.shape[1:], dtype=kind, device=slopes.device)
        return total.index_add_(0, places, slopes.to(kind)).to(slopes.dtype), None


def repeated(of: Tensor, places: Tensor) -> Tensor:
    """Return [K, ...] of [N, ...] at places that may come several times."""
    return _Repeated.apply(of, places)  # type: ignore[no-any-return]


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    bounds: Tensor,
    longest: int,
    pads: bool,
    keys: Tensor | None = None,
    key_bounds: Tensor | None = None,
    longest_key: int = 0,
    cascade: Cascade | None = None,
    blocks: Sequence[Block] = (),
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return causal attention within each row; [1, N, heads, D] of [1, heads, N, D].

    Args:
        module: The layer.
        query: Of the tokens that are computed.
        key: Of the same.
        value: Of the same.
        attention_mask: Not read.
        bounds: [R + 1] int32 where the tokens that each row computes begin, and where the last ones end.
        longest: The most tokens that a row computes.
        pads: Whether rows are padded, though they need not be.
        keys: [K] place among the N of each token of each row; None: rows share nothing.
        key_bounds: [R + 1] int32 where each row begins among these.
        longest_key: The most tokens of a row.
        cascade: Which rows see a common prefix; None: none does.
        blocks: Which rows are padded together where they share.
        scaling: Of the scores.
        sliding_window: Tokens that a token sees, with itself.
    """
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    if keys is None or key_bounds is None:
        keys, key_bounds, longest_key = None, bounds, longest
    window = sliding_window if sliding_window and sliding_window < longest_key else None
    # Torch's kernel takes half precision and equal sizes of heads up to 256; what it does not take is padded.
    flash = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] == value.shape[-1]
    unpadded = window is not None or not pads  # a window's mask is not for the fast kernels
    given = _varlen_mask(window)
    if unpadded and flash and query.shape[-1] <= 256 and given is not None:
        if cascade is not None and window is None:
            own, common = (tuple(repeated(of, at) for of in (key, value)) for at in (cascade.own_keys, cascade.keys))
            found = CascadeAttention.apply(query, *own, *common, bounds, longest, cascade, scaling)
            return found[None], None
        if keys is not None:
            key, value = repeated(key, keys), repeated(value, keys)
        return _varlen(query, key, value, bounds, key_bounds, longest, longest_key, scaling, given)[None], None
    if keys is None:
        return _padded(query, key, value, bounds, longest, scaling, window)[None], None
    found = []
    for first, last, begin, end, key_begin, key_end, most, most_keys in blocks:
        own, row_bounds = query[begin:end], bounds[first : last + 1] - begin
        if key_end - key_begin == end - begin:  # they take nothing
            found.append(_padded(own, key[begin:end], value[begin:end], row_bounds, most, scaling, window))
        else:
            of_rows, row_key_bounds = keys[key_begin:key_end], key_bounds[first : last + 1] - key_begin
            found.append(
                _padded_shared(own, key, value, row_bounds, of_rows, row_key_bounds, most, most_keys, scaling, window)
            )
    return torch.cat(found)[None], None


def _varlen_mask(window: int | None) -> dict[str, Any] | None:
    """Return the arguments that make torch's attention causal, within a window; None: it takes none."""
    # Its arguments changed from version to version of torch.
    if VARLEN_OPTIONS is not None and "window_size" in VARLEN_OPTIONS:
        return {"window_size": (-1 if window is None else window - 1, 0)}
    if VARLEN_OPTIONS is not None and "is_causal" in VARLEN_OPTIONS and window is None:
        return {"is_causal": True}
    return None


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    key_bounds: Tensor,
    longest: int,
    longest_key: int,
    scaling: float | None,
    given: dict[str, Any],
) -> Tensor:
    """Return torch's flash attention; where a row has more keys than queries, the last query sees the last key."""
    from torch.nn.attention.varlen import varlen_attn

    options = VARLEN_OPTIONS
    assert options is not None
    if "scale" in options:
        given = {**given, "scale": scaling}
    elif scaling is not None:
        query = query * (scaling * query.shape[-1] ** 0.5)
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in options:
            given = {**given, "enable_gqa": True}
        else:
            times = query.shape[1] // key.shape[1]
            key, value = (each.repeat_interleave(times, dim=1) for each in (key, value))
    return varlen_attn(  # type: ignore[return-value]
        query, key.contiguous(), value.contiguous(), bounds, key_bounds, longest, longest_key, **given
    )


def _places(bounds: Tensor, longest: int, count: int) -> Tensor:
    """Return where each of so many tokens lies if rows are padded on the right."""
    index = torch.arange(count, device=bounds.device)
    row = torch.bucketize(index, bounds[1:].long(), right=True)
    return row * longest + index - bounds[:-1].long()[row]


def _rows(of: Tensor, places: Tensor, longest: int, count: int) -> Tensor:
    """Return tokens as padded rows; [count, heads, longest, D] of [N, heads, D]."""
    room = of.new_zeros(count * longest, *of.shape[1:])
    return room.index_copy(0, places, of).unflatten(0, (count, longest)).transpose(1, 2)


def _padded(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    """Return attention of packed rows by padding them on the right, where no causal row can see."""
    count = len(bounds) - 1
    places = _places(bounds, longest, len(query))
    mask = None
    if window is not None:
        index = torch.arange(longest, device=query.device)
        ago = index[:, None] - index
        mask = (ago >= 0) & (ago < window)
    found = functional.scaled_dot_product_attention(
        *(_rows(each, places, longest, count) for each in (query, key, value)), attn_mask=mask,
        is_causal=mask is None, scale=scaling, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return found.transpose(1, 2).flatten(0, 1).index_select(0, places)


def _padded_shared(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    keys: Tensor,
    key_bounds: Tensor,
    longest: int,
    longest_key: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Return the same of rows that take their first keys from other rows; `key` and `value` are of all tokens."""
    count = len(bounds) - 1
    places, key_places = _places(bounds, longest, len(query)), _places(key_bounds, longest_key, len(keys))
    taken = keys.new_zeros(count * longest_key).index_copy(0, key_places, keys)
    lengths, key_lengths = bounds.diff()[:, None, None], key_bounds.diff()[:, None, None]
    own = torch.arange(longest, device=query.device)[:, None]
    # What pads the queries sees what the row's last token sees: a softmax over nothing would be NaN.
    position = torch.minimum(key_lengths - lengths + own, key_lengths - 1)
    ago = position - torch.arange(longest_key, device=query.device)
    mask = ago >= 0 if window is None else (ago >= 0) & (ago < window)
    found = functional.scaled_dot_product_attention(
        _rows(query, places, longest, count),
        *(repeated(each, taken).unflatten(0, (count, longest_key)).transpose(1, 2) for each in (key, value)),
        attn_mask=mask[:, None], scale=scaling, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return found.transpose(1, 2).flatten(0, 1).index_select(0, places)
