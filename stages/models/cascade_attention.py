"""Attention of rows with a common prefix, as two kernels: what they share is read once for all of them.

Known as cascade or shared-prefix attention. The queries of all rows of a run see the run's
common prefix without a mask, and each row's queries what is its own, causally. Both are merged by their
log-sum-exp; each backward pass takes the merged result, as in ring attention (arXiv 2310.01889).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

LEAST = 64
"""Tokens of a common prefix that are worth kernels of their own."""
SIMILAR = 0.75
"""Rows join a run whose common prefix is at least this share of what they take themselves, or the other way round."""


class CommonPrefix(NamedTuple):
    """Neighbouring rows, each of which has these leading tokens in common with the row before it."""

    first: int
    end: int
    tokens: int


class Cascade(NamedTuple):
    """Which tokens see which common prefix, and what each row sees besides; places are among the N computed ones."""

    queries: Tensor
    """[M] place of each token that sees a common prefix, run by run."""
    bounds: Tensor
    """[S + 1] int32 where each run begins among these."""
    longest: int
    """The most of them in a run."""
    keys: Tensor
    """[C] place of each token of the common prefixes."""
    key_bounds: Tensor
    """[S + 1] int32 where each prefix begins among these."""
    longest_key: int
    own_keys: Tensor
    """[K] place of each token that a row sees besides, row by row."""
    own_key_bounds: Tensor
    """[R + 1] int32 where each row begins among these."""
    longest_own_key: int


def common_prefixes(shared: Sequence[int]) -> list[CommonPrefix]:
    """Return the runs of rows with a common prefix.

    Args:
        shared: Leading tokens that each row takes from the row before it.
    """
    found: list[CommonPrefix] = []
    for row, of in enumerate(shared):
        if of < LEAST:
            continue
        last = found[-1] if found and found[-1].end == row else None
        if last is not None and min(of, last.tokens) >= SIMILAR * max(of, last.tokens):
            found[-1] = CommonPrefix(last.first, row + 1, min(of, last.tokens))
        else:
            found.append(CommonPrefix(row, row + 1, of))
    return found


def cascade_of(
    laid: Sequence[int],
    starts: dict[int, int],
    lengths: Sequence[int],
    shared: Sequence[int],
    index: np.ndarray,
    device: torch.device | str,
) -> Cascade | None:
    """Return the cascade of packed rows; None: none have enough in common.

    Args:
        laid: The rows that compute tokens, in the order in which these lie.
        starts: Where the tokens of each begin.
        lengths: Tokens of every row.
        shared: Of these, what it takes from the row before it.
        index: [B, T] place of each token.
        device: Where tensors go.
    """
    runs = [run for run in common_prefixes(shared) if any(row in starts for row in range(run.first, run.end))]
    if not runs:
        return None
    common = {row: run.tokens for run in runs for row in range(run.first, run.end)}
    queries = [
        np.concatenate([index[row, shared[row] : lengths[row]] for row in range(run.first, run.end)]) for run in runs
    ]
    keys = [index[run.first, : run.tokens] for run in runs]
    own = [index[row, common.get(row, 0) : lengths[row]] for row in laid]

    def moved(pieces: Sequence[np.ndarray]) -> tuple[Tensor, Tensor, int]:
        sizes = [len(piece) for piece in pieces]
        bounds = np.cumsum([0, *sizes]).astype(np.int32)
        return torch.from_numpy(np.concatenate(pieces)).to(device), torch.from_numpy(bounds).to(device), max(sizes)

    return Cascade(*moved(queries), *moved(keys), *moved(own))


def _forward(query: Tensor, key: Tensor, value: Tensor, *given: Any, causal: bool, scale: float | None) -> Any:
    """Return [N, heads, D] and the log-sum-exp of its scores, [heads, N] float32, by torch's flash attention."""
    found = torch.ops.aten._flash_attention_forward(query, key, value, *given, 0.0, causal, False, scale=scale)
    return found[0], found[1]


def _backward(
    slopes: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *given: Any,
    causal: bool, scale: float | None,
) -> Any:  # fmt: skip
    """Return the slopes by query, key and value."""
    # Without dropout the state of the random numbers is not read.
    state, unused = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
    return torch.ops.aten._flash_attention_backward(
        slopes, query, key, value, out, lse, *given, 0.0, causal, state, unused, scale=scale
    )


class CascadeAttention(torch.autograd.Function):
    """Causal attention of each row to what is its own, merged with that to the common prefix of its run."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, own_key: Tensor, own_value: Tensor, key: Tensor, value: Tensor,
        bounds: Tensor, longest: int, cascade: Cascade, scale: float | None,
    ) -> Tensor:  # fmt: skip
        """Return [N, heads, D].

        Args:
            ctx: Keeps what the backward pass needs.
            query: [N, heads, D]
            own_key: [K, key heads, D]
            own_value: The same.
            key: [C, key heads, D] of the common prefixes.
            value: The same.
            bounds: [R + 1] int32 where the queries of each row begin.
            longest: The most of a row.
            cascade: What sees what.
            scale: Of the scores; None: one over the root of D.
        """
        at = cascade.queries
        # For rows of one token each, the kernel has another order of the log-sum-exp where heads share keys.
        of_own = (bounds, cascade.own_key_bounds, max(longest, 2), cascade.longest_own_key)
        of_common = (cascade.bounds, cascade.key_bounds, max(cascade.longest, 2), cascade.longest_key)
        out, lse = _forward(query, own_key, own_value, *of_own, causal=True, scale=scale)
        more, more_lse = _forward(query[at], key, value, *of_common, causal=False, scale=scale)
        before = lse.index_select(1, at)
        both = torch.logaddexp(before, more_lse)
        first = out[at].to(lse.dtype)
        merged = first + (more.to(lse.dtype) - first) * (more_lse - both).exp().transpose(0, 1)[..., None]
        out = out.index_copy(0, at, merged.to(out.dtype))
        lse = lse.index_copy(1, at, both)
        ctx.save_for_backward(query, own_key, own_value, key, value, out, lse, at, *of_own[:2], *of_common[:2])
        ctx.sizes, ctx.scale = (of_own[2:], of_common[2:]), scale
        return out

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the slopes by all keys, values and queries."""
        query, own_key, own_value, key, value, out, lse, at, *all_bounds = ctx.saved_tensors
        (own_sizes, common_sizes), scale = ctx.sizes, ctx.scale
        slopes = slopes.contiguous()
        by_query, *by_own = _backward(
            slopes, query, own_key, own_value, out, lse, *all_bounds[:2], *own_sizes, causal=True, scale=scale
        )
        more, *by_common = _backward(
            slopes[at], query[at], key, value, out[at], lse.index_select(1, at), *all_bounds[2:], *common_sizes,
            causal=False, scale=scale,
        )  # fmt: skip
        return by_query.index_add(0, at, more), *by_own, *by_common, None, None, None, None
