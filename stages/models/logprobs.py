"""Log-probs and entropy of given tokens, in chunks: the logits never exist whole.

The states of the last layer are turned into logits some thousand tokens at a time, and
again in the backward pass, which keeps one number a token in between.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from nanoskyrl.stages.models.kv_cache import without_wrapper
from nanoskyrl.stages.models.logits import full, logit_transform
from nanoskyrl.stages.models.packed_attention import repeated
from nanoskyrl.stages.models.packing import Pack, hidden_states, is_packing, pack_of
from nanoskyrl.stages.models.rows_alone import decoder_of

CHUNK_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 27}
"""Tokens times vocabulary in one chunk: 128 and 512 MiB of float32. A GPU's matrix products want a thousand tokens."""


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """Of each token but the first of a row, given those before it."""

    logprobs: Tensor
    """[B, T-1] nats, float32 at least; carries the gradient."""
    entropy: Tensor
    """[B, T-1] nats, float32 at least; without gradient."""
    hidden: Tensor | None
    """[N, H] or [B, T, H] the decoder's last states, packed or not, if asked for; carry the gradient."""


def sequence_logprobs(
    model: Any,
    ids: Tensor,
    mask: Tensor,
    *,
    temperature: float,
    select: Tensor | None = None,
    head: "LogprobHead | None" = None,
    pack: Pack | None = None,
    want_hidden: bool = False,
) -> TokenStatistics:
    """Return the log-prob of every token under the model, and the entropy where it was drawn.

    Args:
        model: A causal language model of transformers, or a PeftModel over one; run packed if it was prepared for it.
        ids: [B, T] token ids, padded on the right.
        mask: [B, T] 1 for real tokens.
        temperature: Logits are divided by it, as they were when the tokens were sampled.
        select: [B, T-1] True where the statistics are wanted; elsewhere they are 0. None: of every real token.
        head: Of the model; made here if it is not given.
        pack: Where the tokens lie if they are packed; made here if it is not given.
        want_hidden: Whether the states are wanted, too.

    Returns:
        Statistics of tokens 1..T-1.
    """
    base = without_wrapper(model)
    head = head or LogprobHead(base)
    if pack is None and is_packing(base):
        pack = pack_of(mask.sum(-1).tolist(), ids.shape[1], ids.device)
    # Through the wrapped model's own modules, so that adapters inside them take part.
    states = hidden_states(decoder_of(base), ids, mask, pack)
    flat = states.reshape(-1, states.shape[-1])
    if pack is None:
        index = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
        tokens, before = ids.flatten(), index.flatten() - 1
    else:
        tokens, before, index = pack.flat(ids), pack.before, pack.index
    chosen = (mask[:, 1:] if select is None else select) != 0
    index = index[:, 1:]
    # A token that stands for several rows' is predicted once.
    wanted = torch.zeros(len(flat), dtype=torch.bool, device=ids.device)
    places = wanted.index_fill_(0, index[chosen], True).nonzero()[:, 0]
    sources = before.index_select(0, places)
    picked = repeated(flat, sources) if pack is not None and pack.shares else flat.index_select(0, sources)

    def by_row(values: Tensor) -> Tensor:
        room = values.new_zeros(len(flat)).index_copy(0, places, values)
        return room.index_select(0, index.flatten()).view(index.shape).masked_fill(~chosen, 0)

    logprobs, entropy = head(picked, tokens.index_select(0, places), temperature)
    return TokenStatistics(by_row(logprobs), by_row(entropy), states if want_hidden else None)


class LogprobHead(nn.Module):
    """From states to log-probs and entropy; shares its weights with the model's own head."""

    def __init__(self, base: Any, *, fused: bool = False) -> None:
        """Take the head of a model.

        Args:
            base: A causal language model of transformers, whose attention is still its own, or was asked before.
            fused: Compile what is done with logits, so that a GPU reads and writes them fewer times.
        """
        super().__init__()
        head = base.get_output_embeddings()
        self.transform = logit_transform(base)
        # A scale alone is a temperature.
        self.plain = type(head) is nn.Linear and self.transform.cap is None and self.transform.width is None
        self.fused = fused
        if self.plain:
            # Its own parameters: ZeRO-3 gathers what a module holds when it is called.
            self.weight, self.bias = head.weight, head.bias
        else:
            self.head = head

    def forward(self, states: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return nats of the labels, with gradient, and entropy in nats; [N] float32 each.

        Args:
            states: [N, H]
            labels: [N]
            temperature: Logits are divided by it.
        """
        if not len(states):
            nothing = full(states.sum(-1))
            return nothing, nothing.detach()
        elements = CHUNK_ELEMENTS["cuda" if states.is_cuda else "cpu"]
        if self.plain:
            size = max(1, elements // self.weight.shape[0])
            scaled = temperature / self.transform.scale
            found = _LogProbs.apply(states, self.weight, self.bias, labels, scaled, size, self.fused)
            return found[0], found[1]
        size = max(1, elements // self.head.weight.shape[0])
        pieces = [
            checkpoint(self._whole, *part, temperature, use_reentrant=False)
            for part in zip(states.split(size), labels.split(size), strict=True)
        ]
        return torch.cat([logprobs for logprobs, _ in pieces]), torch.cat([entropy for _, entropy in pieces])

    def _whole(self, states: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return the same of one chunk, for heads that are more than a matrix."""
        logp = (self.transform(self.head(states)) / temperature).log_softmax(-1)
        with torch.no_grad():
            entropy = -(logp.exp() * logp).sum(-1)
        return logp.gather(-1, labels[:, None])[:, 0], entropy


class _LogProbs(torch.autograd.Function):
    """Log-probs of labels under a linear head; keeps the states and the log of each softmax's sum."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        size: int,
        fused: bool,
    ) -> tuple[Tensor, Tensor]:
        found = full(states.new_empty(3, len(states)))
        work = _compiled(_statistics) if fused and states.is_cuda else _statistics
        for start in range(0, len(states), size):
            part = slice(start, start + size)
            found[:, part] = work(linear(states[part], weight, bias), labels[part], temperature)
        logprobs, entropy, total = (line.clone() for line in found)
        ctx.save_for_backward(states, weight, bias, labels, total)
        ctx.temperature, ctx.size, ctx.fused = temperature, size, fused
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor, _: Any) -> tuple[Any, ...]:  # type: ignore[override]
        states, weight, bias, labels, total = ctx.saved_tensors
        of_states = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        work = _compiled(_slopes) if ctx.fused and states.is_cuda else _slopes
        for start in range(0, len(states), ctx.size):
            part = slice(start, start + ctx.size)
            logits = linear(states[part], weight, bias)
            by_logits = work(logits, labels[part], total[part], slopes[part], ctx.temperature)
            if of_states is not None:
                torch.mm(by_logits, weight, out=of_states[part])
            if of_weight is not None:
                of_weight.addmm_(by_logits.t(), states[part])
            if of_bias is not None:
                of_bias += by_logits.sum(0)
        return of_states, of_weight, of_bias, None, None, None, None


def _statistics(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return log-probs, entropies and the logs of the softmaxes' sums; [3, N] of [N, V]."""
    logits = full(logits)
    if temperature != 1:
        logits = logits / temperature
    total = logits.logsumexp(-1)
    mean = (logits - total[:, None]).exp_().mul_(logits).sum(-1)
    return torch.stack([logits.gather(-1, labels[:, None])[:, 0] - total, total - mean, total])


def _slopes(logits: Tensor, labels: Tensor, total: Tensor, slopes: Tensor, temperature: float) -> Tensor:
    """Return the slope of the loss by the logits, [N, V], from its slopes by the log-probs, [N]."""
    slopes = slopes / temperature
    kind, logits = logits.dtype, full(logits)
    if temperature != 1:
        logits = logits / temperature
    share = (logits - total[:, None]).exp_().mul_(-slopes[:, None])
    return share.scatter_add_(1, labels[:, None], slopes[:, None]).to(kind)


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=True)
