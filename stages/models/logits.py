"""What a model does to its head's logits: a scale, a soft cap, or a vocabulary that is cut.

Families name these in their configs, and one word multiplies in one family and divides in
another. So the model's own logits decide which of them are applied.
"""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.models.rows_alone import FAMILIES_HINT, RowsAlone, a_, relative, rounding, run_alone

SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "logits_mup_width_multiplier")
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """From a head's logits to the model's."""

    scale: float = 1.0
    cap: float | None = None
    """Bound of the logits: cap * tanh(logits / cap), after the scale."""
    width: int | None = None
    """So many tokens have logits, the first ones; None: all."""

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the model's logits, in float32 at least; [..., V]."""
        logits = full(logits[..., : self.width]) * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def full(values: Tensor) -> Tensor:
    """Return numbers in float32; those in float64 stay."""
    return values if values.dtype == torch.float64 else values.float()


_FOUND: "WeakKeyDictionary[Any, LogitTransform]" = WeakKeyDictionary()


def logit_transform(base: Any, alone: RowsAlone | None = None) -> LogitTransform:
    """Return what a model does to its head's logits; found once for a model.

    Args:
        base: A causal language model of transformers, whose attention is still its own.
        alone: What it made of rows, if that is known.

    Raises:
        InputError: it has no head, or does what no scale or cap of its config explains.
    """
    if base not in _FOUND:
        _FOUND[base] = _find(base, alone or run_alone(base))
    return _FOUND[base]


def _find(base: Any, alone: RowsAlone) -> LogitTransform:
    head = base.get_output_embeddings()
    if head is None or alone.logits is None:
        raise InputError(f"{a_(base)} has no head that gives logits", hint=FAMILIES_HINT)
    states, own = torch.cat(alone.states), torch.cat(alone.logits)
    try:
        with torch.no_grad():
            raw = head(states.to(head.weight.dtype))
    except (RuntimeError, TypeError, AttributeError):  # states of another size: something is in between
        raw = own.new_empty(len(own), 0)
    gaps: dict[LogitTransform, float] = {}
    if raw.shape[-1] >= own.shape[-1]:
        width = None if raw.shape == own.shape else own.shape[-1]
        gaps = {each: float(relative(each(raw), own).max()) for each in _candidates(base.config, width)}
    best = min(gaps.values(), default=float("inf"))
    if not best <= rounding(own.dtype):
        differ = f" by {best:.2g} of their size" if gaps else " in number"
        raise InputError(
            f"the logits of {a_(base)} differ from those of its head{differ}, and no scale or cap in its config "
            "explains it",
            hint=FAMILIES_HINT,
        )
    # Where weights are so small that a cap hardly shows, it is there all the same: candidates with more come first.
    near = 2 * best + 4 * torch.finfo(own.dtype).eps
    return next(each for each, gap in gaps.items() if gap <= near)


def _candidates(config: Any, width: int | None) -> list[LogitTransform]:
    """Return what a config's numbers may mean, that with most of them first."""
    config = config.get_text_config()
    scales = [float(value) for name in SCALES if (value := getattr(config, name, None))]
    caps = [float(value) for name in CAPS if (value := getattr(config, name, None))]
    return [
        LogitTransform(scale, cap, width)
        for cap in (*caps, None)
        for scale in (*scales, *(1 / each for each in scales), 1.0)
    ]
