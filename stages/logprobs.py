"""Log-probs and entropy of given tokens, in chunks: the logits never exist whole.

The hidden states of the last layer are turned into logits a few thousand tokens at a
time. With gradients, each chunk's logits are computed again in the backward pass.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nanoskyrl.stages.kv_cache import without_wrapper

CHUNK_ELEMENTS = 1 << 25
"""Tokens times vocabulary in one chunk of float32 logits: 128 MiB."""


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """Of each token but the first of a row, given those before it."""

    logprobs: Tensor
    """[B, T-1] float32 nats; carries the gradient."""
    entropy: Tensor
    """[B, T-1] float32 nats; without gradient."""
    hidden: Tensor
    """[B, T-1, H] states that the tokens were foretold from; carry the gradient."""


def sequence_logprobs(
    model: Any, ids: Tensor, mask: Tensor, *, temperature: float, select: Tensor | None = None
) -> TokenStatistics:
    """Return the log-prob of every token under the model, and the entropy where it was drawn.

    Args:
        model: A causal language model of transformers, or a PeftModel over one.
        ids: [B, T] token ids, padded on the right.
        mask: [B, T] 1 for real tokens.
        temperature: Logits are divided by it, as they were when the tokens were sampled.
        select: [B, T-1] True where the statistics are wanted; elsewhere they are 0. None: everywhere.

    Returns:
        Statistics of tokens 1..T-1.
    """
    base = without_wrapper(model)
    # Through the wrapped model's own modules, so that adapters inside them take part.
    body, head = base.get_decoder(), base.get_output_embeddings()
    cap = getattr(base.config, "final_logit_softcapping", None)  # Gemma bounds its logits after the head
    hidden = body(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[:, :-1]
    targets = ids[:, 1:]
    chosen = torch.ones_like(targets, dtype=torch.bool) if select is None else select.bool()
    picked, wanted = hidden[chosen], targets[chosen]
    size = max(1, CHUNK_ELEMENTS // head.weight.shape[0])

    def chunk(states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(states).float()
        if cap:
            logits = cap * torch.tanh(logits / cap)
        logits = logits / temperature
        logp = logits.log_softmax(-1)
        with torch.no_grad():
            entropy = -(logp.exp() * logp).sum(-1)
        return logp.gather(-1, labels[:, None])[:, 0], entropy

    pieces = []
    for start in range(0, len(wanted), size):
        part = (picked[start : start + size], wanted[start : start + size])
        one_chunk = len(wanted) <= size
        pieces.append(
            chunk(*part) if one_chunk or not torch.is_grad_enabled() else checkpoint(chunk, *part, use_reentrant=False)
        )
    flat = [
        torch.cat([piece[i] for piece in pieces]) if pieces else hidden.new_zeros(0, dtype=torch.float32)
        for i in (0, 1)
    ]
    zeros = torch.zeros(targets.shape, dtype=torch.float32, device=ids.device)
    return TokenStatistics(zeros.masked_scatter(chosen, flat[0]), zeros.masked_scatter(chosen, flat[1]), hidden)
