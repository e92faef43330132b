"""A model's own forward pass over short rows, each alone: what every faster way of computing is held against.

Families differ in what they do between layers, after their last layer and to padding. What
is asked of a model here takes milliseconds, once a load, and does not depend on anyone
having read its code: a way that gives other numbers is not taken, or the model is refused.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.models.kv_cache import without_wrapper
from nanoskyrl.stages.models.policy import first_line

FAMILIES_HINT = "docs/models.md lists the families that can be sampled and trained"


@dataclass(frozen=True, slots=True)
class RowsAlone:
    """What a model makes of a few rows, one at a time."""

    rows: list[Tensor]
    """[T] token ids of each."""
    states: list[Tensor]
    """[T, H] the decoder's last states of each."""
    logits: list[Tensor] | None
    """[T, V] the model's own of each; None for a decoder without a head."""

    def padded(self) -> tuple[Tensor, Tensor]:
        """Return all rows as one batch padded on the right, and its mask; [B, T] each."""
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in self.rows], batch_first=True)
        return torch.nn.utils.rnn.pad_sequence(self.rows, batch_first=True), mask


@contextlib.contextmanager
def whole_weights(model: Any) -> Iterator[None]:
    """Hold weights whole that ZeRO-3 cuts up among processes: after its first model, others are loaded in pieces."""
    cut = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    if not cut:
        yield
        return
    import deepspeed  # type: ignore[import-not-found]

    with deepspeed.zero.GatheredParameters(cut):
        yield


def run_alone(model: Any) -> RowsAlone:
    """Run rows of one to six tokens through a model, each alone.

    Raises:
        InputError: it does not run on tokens alone, or looks at tokens that come later.
    """
    base = without_wrapper(model)
    if "indexed_attention" in (getattr(base.config.get_text_config(), "layer_types", None) or ()):
        # Scores of its index are often equal, at 0, in rows longer than any that are run here.
        raise InputError(
            f"{a_(base)} attends to the best keys of an index: which of equal ones it takes depends on the batch",
            hint=FAMILIES_HINT,
        )
    decoder, size = decoder_of(base), embeddings_of(base)
    # Neither the first ids, which are often special, nor the last, which may be unused.
    long = [(7 + 13 * place) % max(1, size - 1) for place in range(6)]
    other = [(11 + 29 * place) % max(1, size - 1) for place in range(4)]
    rows = [torch.tensor(ids, device=base.device) for ids in (long, long[:3], other, other[:1])]
    states, logits, caught = [], [], []
    try:
        with torch.no_grad(), decoder.register_forward_hook(lambda module, given, output: caught.append(output)):
            for row in rows:
                output = base(input_ids=row[None])
                states.append(last_states(caught.pop())[0])
                caught.clear()
                if base is not decoder:
                    logits.append(output.logits[0])
    except Exception as error:  # they raise all kinds: those that want images, an encoder's states, kernels
        raise InputError(
            f"{a_(base)} does not run on tokens alone: {type(error).__name__}: {first_line(error)}", hint=FAMILIES_HINT
        ) from error
    found = RowsAlone(rows, states, logits or None)
    if not agree([states[0][:3], states[2][:1]], [states[1], states[3]]):
        raise InputError(
            f"{a_(base)} looks at later tokens: what it says of a token changes with what follows",
            hint="Set `is_decoder` to true in its config.json, if it was made to write; " + FAMILIES_HINT,
        )
    return found


def agree(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Say whether two ways of computing rows differ by rounding alone.

    In full precision by every token. In half precision by the median token: rounding may send a token to another
    expert, while a wrong mask, position or state is wrong at most tokens of rows as short as these.

    Args:
        found: [T, ...] of each row.
        expected: The same.
    """
    if any(a.shape != b.shape for a, b in zip(found, expected, strict=True)):
        return False
    apart = torch.cat([relative(a, b) for a, b in zip(found, expected, strict=True)])
    full = torch.finfo(expected[0].dtype).bits >= 32
    return bool((apart.max() if full else apart.median()) <= rounding(expected[0].dtype))


def relative(found: Tensor, expected: Tensor) -> Tensor:
    """Return the largest difference at each token as a share of the largest number there; [T] of [T, D]."""
    found, expected = found.double(), expected.double()
    return (found - expected).abs().amax(-1) / expected.abs().amax(-1).clamp(min=1e-30)


def rounding(dtype: torch.dtype) -> float:
    """Return the share by which results of a type may differ: between its rounding and what a mistake makes."""
    return torch.finfo(dtype).eps ** 0.5


def decoder_of(base: Any) -> Any:
    """Return the part of a causal model that makes the states its head reads.

    Raises:
        InputError: there is none apart from the whole.
    """
    from transformers import PreTrainedModel

    decoder = base.get_decoder()
    if decoder is base and base.get_output_embeddings() is not None:  # Llama 4's and others' do not name it
        inner = [module for module in base.children() if isinstance(module, PreTrainedModel)]
        if len(inner) != 1:
            raise InputError(f"{a_(base)} has no decoder apart from its head", hint=FAMILIES_HINT)
        decoder = inner[0]
    return decoder


def last_states(output: Any) -> Tensor:
    """Return the last layer's states of what a decoder returned; [B, T, H]."""
    found = getattr(output, "last_hidden_state", None)
    return output[0] if found is None else found


def embeddings_of(base: Any) -> int:
    """Return how many tokens a model embeds."""
    return int(base.get_input_embeddings().weight.shape[0])


def a_(base: Any) -> str:
    """Return a model's class with its article, for errors."""
    name = type(base).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
