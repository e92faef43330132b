"""Rows that are written token by token: the prompts at once, then a token a row, from a cache.

Attention skips padding, so prompts of any length share a batch, padded on the left. A
recurrence or a convolution runs through padding: its model gets prompts of one length at a
time, and a few get one row at a time. Which of these a model needs is asked of the model, on
rows that were run alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.models.kv_cache import forward, select_rows
from nanoskyrl.stages.models.policy import first_line
from nanoskyrl.stages.models.rows_alone import FAMILIES_HINT, RowsAlone, a_, agree

SHARING = ("any length", "one length", "one row")
"""Which rows can share a batch, from the fastest way to the slowest."""
STEPS = 2
"""Tokens a row that a model is asked to continue by: the second reads what the first left in its cache."""


class Decoding:
    """Rows of a batch, and where each of them stands."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], *, masked: bool) -> None:
        """Run each different prompt once.

        Args:
            model: A causal language model of transformers.
            prompts: Token ids of each row.
            masked: Whether the model is given what is padding; else the prompts have one length.
        """
        self._model, self._device, self._masked = model, model.device, masked
        different = {tuple(prompt): None for prompt in prompts}
        place = {prompt: index for index, prompt in enumerate(different)}
        width = max(map(len, different))
        ids = torch.zeros(len(different), width, dtype=torch.long)
        mask = torch.zeros(len(different), width, dtype=torch.long)
        for row, prompt in enumerate(different):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        self._kv: Any = None
        logits = self._forward(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0))
        rows = torch.tensor([place[tuple(prompt)] for prompt in prompts])
        self._kv = select_rows(self._kv, rows.to(self._device))
        self.logits = logits[rows.to(self._device)]
        """[B, V] of the next token of each row."""
        self._mask = mask[rows]  # [B, P] padded on the left
        self._positions = self._mask.sum(-1)  # [B] position of the next token

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these."""
        self._kv = select_rows(self._kv, rows.to(self._device))
        self._mask, self._positions = self._mask[rows], self._positions[rows]

    def step(self, ids: Tensor) -> None:
        """Add a token to each row, [B], and find the logits of the next."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], dim=1)
        self.logits = self._forward(ids[:, None], self._mask, self._positions[:, None])
        self._positions = self._positions + 1

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        # Mamba multiplies the states of a step by the mask of all tokens before it.
        told = {"attention_mask": mask.to(self._device)} if self._masked else {}
        output, self._kv = forward(
            self._model, self._kv, input_ids=ids.to(self._device), position_ids=positions.to(self._device),
            logits_to_keep=1, **told,
        )  # fmt: skip
        if self._kv is None:
            raise TypeError("it keeps no cache")
        return output.logits[:, -1]


def find_sharing(model: Any, alone: RowsAlone) -> str:
    """Return which rows can share a batch, one of SHARING.

    Args:
        model: A causal language model of transformers.
        alone: What it made of rows.

    Raises:
        InputError: no way gives what the model makes of rows alone.
    """
    assert alone.logits is not None
    rows = [(row, logits) for row, logits in zip(alone.rows, alone.logits, strict=True) if len(row) > STEPS]
    error: Exception | None = None
    # Twice the same row, so that one of both can be dropped.
    for sharing, held in zip(SHARING, ([*rows, *rows], [rows[0], rows[0]], [rows[0]]), strict=True):
        error = None
        try:
            if _as_alone(model, held, masked=sharing == SHARING[0]):
                return sharing
        except Exception as raised:  # what their caches cannot do, they raise as anything
            error = raised
    raise InputError(
        f"{a_(model)} cannot be sampled here: "
        + (
            "from its cache it answers otherwise than by rows alone"
            if error is None
            else f"{type(error).__name__}: {first_line(error)}"
        ),
        hint=FAMILIES_HINT,
    )


def _as_alone(model: Any, held: list[tuple[Tensor, Tensor]], *, masked: bool) -> bool:
    """Say whether rows whose last tokens are given one by one have the logits of rows alone; one is dropped midway."""
    with torch.inference_mode():
        decoding = Decoding(model, [row[:-STEPS].tolist() for row, _ in held], masked=masked)
        found = [[logits] for logits in decoding.logits]
        kept = list(range(len(held)))
        for step in range(STEPS):
            decoding.step(torch.stack([held[row][0][step - STEPS].cpu() for row in kept]))
            for row, logits in zip(kept, decoding.logits, strict=True):
                found[row].append(logits)
            if step == 0 and len(kept) > 1:
                kept = kept[1:]
                decoding.keep(torch.tensor(kept))
    lines = [torch.stack(line) for line in found]
    return agree(lines, [logits[-STEPS - 1 :][: len(line)] for (_, logits), line in zip(held, lines, strict=True)])
