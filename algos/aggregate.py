"""From one number a token to one number a batch, with denominators of the whole batch.

Each function returns weights that sum a micro-batch's tokens so that the sums of all
micro-batches, on all ranks, add up to the reduction of the whole mini-batch. Rows without
trained tokens count as rows unless the totals leave them out: how a batch is cut changes
nothing. A batch without trained tokens has loss 0.
"""

from collections.abc import Callable
from dataclasses import dataclass

from nanoskyrl.algos.ratios import row_tokens
from nanoskyrl.algos.tensors import Tensor
from nanoskyrl.stages.core.errors import SettingsError, did_you_mean


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over the whole mini-batch, across micro-batches and ranks."""

    tokens: int
    """Trained ones."""
    rows: int
    horizon: int | None = None
    """The constant that `seq_mean_token_sum_norm` divides by."""
    prompts: int = 0
    """Needed by `prompt_mean`."""


def token_mean(mask: Tensor, totals: Totals, prompt_tokens: Tensor | None = None) -> Tensor:
    """Weigh every token of the mini-batch equally; [B, T]."""
    return mask / max(totals.tokens, 1)


def sequence_mean(mask: Tensor, totals: Totals, prompt_tokens: Tensor | None = None) -> Tensor:
    """Weigh every row equally, and the tokens of a row equally: the mean of row means; [B, T]."""
    return mask / row_tokens(mask) / max(totals.rows, 1)


def prompt_mean(mask: Tensor, totals: Totals, prompt_tokens: Tensor | None = None) -> Tensor:
    """Weigh every prompt equally, and all tokens under a prompt equally; [B, T]."""
    if prompt_tokens is None or not totals.prompts:
        raise ValueError("prompt_mean needs the trained tokens of each row's prompt, and how many prompts there are")
    return mask / prompt_tokens[:, None].clamp(min=1) / totals.prompts


def seq_mean_token_sum(mask: Tensor, totals: Totals, prompt_tokens: Tensor | None = None) -> Tensor:
    """Weigh every token by 1 / rows: the mean of row sums; [B, T]."""
    return mask / max(totals.rows, 1)


def seq_mean_token_sum_norm(mask: Tensor, totals: Totals, prompt_tokens: Tensor | None = None) -> Tensor:
    """Weigh every token by 1 / (rows x horizon), with a constant horizon; [B, T]."""
    if not totals.horizon:
        raise SettingsError(
            "`seq_mean_token_sum_norm` needs a horizon", hint="Set `train.horizon`, for instance to max_generate_length"
        )
    return mask / (max(totals.rows, 1) * totals.horizon)


Reduction = Callable[[Tensor, Totals, Tensor | None], Tensor]
"""Takes the mask [B, T], the totals, and for each row how many trained tokens its prompt has in all of its rows [B]."""

REDUCTIONS: dict[str, Reduction] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "prompt_mean": prompt_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
}


def reduction(name: str) -> Reduction:
    """Return the reduction of this name.

    Raises:
        SettingsError: there is none.
    """
    if name not in REDUCTIONS:
        raise SettingsError(
            f"unknown loss_reduction `{name}`",
            hint=did_you_mean(name, REDUCTIONS) or f"Choose one of {', '.join(REDUCTIONS)}",
        )
    return REDUCTIONS[name]
