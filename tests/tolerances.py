"""How far apart two results may lie that are sums of the same numbers in another order.

Processors, libraries, batch sizes and processes add in orders of their own. Each addition rounds by half an eps of the
sum at most, up or down: after n of them two results differ by about sqrt(n) eps of what was added. What is allowed
here is a small multiple of that, so that a test holds on a processor that nobody here has tried; a wrong mask,
position or scale is past it by orders of magnitude.
"""

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from nanoskyrl.stages.models.policy import resolve_policy

FACTOR = 4
"""Sums of one length do not all round as the mean of them does, and the largest of thousands is compared."""


def allowed(dtype: torch.dtype, terms: int, scale: float = 1.0) -> float:
    """Return how far apart two sums of so many terms may lie; `scale` is the size of the largest of them."""
    return FACTOR * torch.finfo(dtype).eps * math.sqrt(terms) * scale


def terms_of(config: Any, tokens: int) -> int:
    """Return how many numbers are added on the way from a row's tokens to a log-prob of them, one matrix after another.

    Args:
        config: Of the model, as transformers has it.
        tokens: Of the longest row. Of all rows, for a gradient.
    """
    heads = config.num_attention_heads * config.head_dim
    layer = config.hidden_size + config.head_dim + tokens + heads + config.hidden_size + config.intermediate_size
    return config.num_hidden_layers * layer + config.hidden_size + config.vocab_size


def _starter() -> Any:
    return SimpleNamespace(**json.loads((resolve_policy("starter") / "config.json").read_text()))


PASS = terms_of(_starter(), 100)
"""Numbers that are added for a log-prob of the starter policy, in rows as long as tests have them."""
LOGITS = 16.0
"""The size of its logits: each log-prob of it is the difference of two numbers as large."""
GRADIENT = 2 * terms_of(_starter(), 1000)
"""The same for a gradient of it, over the tokens of a batch."""


def assert_close(
    found: Any, wanted: Any, terms: int, *, dtype: torch.dtype = torch.float32, scale: float = 0.0
) -> None:
    """Say that two results differ by the order of their additions alone.

    Args:
        found: A tensor, an array, a list or a number; a mapping is compared name by name, under one scale.
        wanted: The same.
        terms: How many numbers are added for each, all sums on the way to it together.
        dtype: Of the coarsest of these sums.
        scale: The size of the largest number that is added, where it is above all results.
    """
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        scale = max([scale, *(_size(value) for value in wanted.values())])
        for name, value in wanted.items():
            assert_close(found[name], value, terms, dtype=dtype, scale=scale)
        return
    found, wanted = _tensor(found), _tensor(wanted)
    bound = allowed(dtype, terms, max(scale, _size(wanted)))
    torch.testing.assert_close(found, wanted, atol=bound, rtol=0)


def _tensor(values: Any) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values.detach().double()
    return torch.tensor(np.asarray(values, np.float64))


def _size(values: Any) -> float:
    return float(_tensor(values).abs().max()) if _tensor(values).numel() else 0.0
