"""From one number a token to one number a batch, with denominators of the whole batch.

Each function returns weights that sum a micro-batch's tokens so that the sums of all
micro-batches, on all ranks, add up to the reduction of the whole mini-batch. Rows without
trained tokens count as rows: how a batch is cut changes nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanoskyrl.stages.errors import SettingsError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over the whole mini-batch, across micro-batches and ranks."""

    tokens: int
    rows: int
    horizon: int | None = None
    """The constant that `seq_mean_token_sum_norm` divides by."""


def token_mean(mask: "Tensor", totals: Totals) -> "Tensor":
    """Weigh every token of the mini-batch alike; [B, T]."""
    return mask / max(totals.tokens, 1)


def sequence_mean(mask: "Tensor", totals: Totals) -> "Tensor":
    """Weigh every row alike, and the tokens of a row alike: the mean of row means; [B, T]."""
    return mask / mask.sum(-1, keepdim=True).clamp(min=1) / max(totals.rows, 1)


def seq_mean_token_sum_norm(mask: "Tensor", totals: Totals) -> "Tensor":
    """Weigh every token by 1 / (rows x horizon), with a constant horizon; [B, T]."""
    if not totals.horizon:
        raise SettingsError(
            "`seq_mean_token_sum_norm` needs a horizon", hint="Set `train.horizon`, for instance to max_generate_length"
        )
    return mask / (max(totals.rows, 1) * totals.horizon)


Reduction = Callable[["Tensor", Totals], "Tensor"]

REDUCTIONS: dict[str, Reduction] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
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
