"""MemoryUse that training and generation take on one device, estimated from settings and the model's shape."""

from dataclasses import dataclass
from typing import Any

from nanoskyrl.stages.learning.train_config import FULL_BELOW, ZERO_BUCKET, TrainConfig, strategy_or_default

FLOAT32, BFLOAT16, NF4 = 4, 2, 0.56
"""Bytes of a number; NF4's with the scales of its blocks."""
LOGITS_AT_ONCE = {False: 1 << 25, True: 1 << 27}
"""On a CPU and on a GPU, as in `stages/models/logprobs.py`, which is not imported here because it loads torch."""
LOGIT_COPIES = 3
"""Of a chunk's logits in float32: themselves, their softmax, their slopes."""
LAYER_NUMBERS = 24
"""Numbers of hidden size that one token leaves in a layer beside what its MLP leaves: states, norms, heads."""
MLP_NUMBERS = 5
"""Numbers of the MLP's size that one token leaves in a layer."""
GATHERED_AT_ONCE = 1_000_000_000
"""Weights that ZeRO-3 holds whole beside its share, DeepSpeed's own bound."""
SEQUENCES = 16
"""An engine in this process ought to hold so many sequences at once, or it hardly batches."""
BESIDES = 5 << 29
"""Bytes of a vLLM server that are neither weights nor keys and values: CUDA's context, graphs, activations."""


class Bytes(int):
    """A count of bytes, which prints as people read it."""

    def __str__(self) -> str:
        """Return it in GiB or MiB."""
        return f"{self / (1 << 30):.2f} GiB" if self >= (1 << 30) / 10 else f"{self / (1 << 20):.1f} MiB"


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on one device, by what takes them."""

    parts: dict[str, float]

    @property
    def total(self) -> Bytes:
        """All of them."""
        return Bytes(sum(self.parts.values()))


def training_memory(
    train: TrainConfig,
    shape: dict[str, Any],
    parameters: int,
    rank: int,
    *,
    on_gpu: bool,
    processes: int,
    critic: bool = False,
) -> MemoryUse:
    """Return the most that one process of training holds at once: in the backward pass of a full micro-batch.

    Args:
        train: Its settings.
        shape: The model's config.
        parameters: Of the model.
        rank: Of adapters; 0: all of it learns.
        on_gpu: Whether bfloat16 is the default.
        processes: How many share the work.
        critic: Whether a critic with a decoder of its own is trained beside the policy; another takes little.

    Returns:
        What tensors take; CUDA's context and what its allocator keeps in reserve come on top.
    """
    half = train.dtype == "bfloat16" or (train.dtype == "auto" and on_gpu)
    size = BFLOAT16 if half else FLOAT32
    hidden, layers = shape.get("hidden_size", 0), shape.get("num_hidden_layers", 0)
    inner, vocabulary = shape.get("intermediate_size", 4 * hidden), shape.get("vocab_size", 0)
    # Adapters: two matrices beside each of a layer's seven.
    learnt = layers * rank * (7 * hidden + 3 * (hidden + inner)) if rank else parameters
    alone = processes == 1 and not train.strategy.startswith("zero")
    strategy = "one" if alone else strategy_or_default(train.strategy, parameters, lora=bool(rank))
    zero = strategy.startswith("zero")
    states, shares = processes if zero else 1, processes if strategy == "zero3" else 1
    tokens = train.max_tokens_per_micro_batch
    again = train.gradient_checkpointing
    again = float(parameters >= FULL_BELOW) if again is None else again
    # Layers that are computed again keep their input; one at a time has all of its numbers.
    a_layer = tokens * (LAYER_NUMBERS * hidden + MLP_NUMBERS * inner) * size
    logits = LOGIT_COPIES * min(tokens * vocabulary, LOGITS_AT_ONCE[on_gpu]) * FLOAT32
    moments = 2 * (1 if train.optimizer == "adamw_8bit" else FLOAT32)
    exchanged = {
        "zero2": 2 * ZERO_BUCKET * size,
        "zero3": min(parameters, GATHERED_AT_ONCE) * size + 2 * ZERO_BUCKET * size,
        "ddp": learnt * size,
    }.get(strategy, 0)
    kept = layers * ((1 - again) * a_layer + again * tokens * hidden * size)
    decoder = parameters - (0 if shape.get("tie_word_embeddings") else vocabulary * hidden)
    beside = decoder * (size + FLOAT32 + moments + (FLOAT32 if half else 0) + (size if processes > 1 else 0)) + kept
    return MemoryUse({
        "weights": (parameters * (NF4 if train.quantization else size) + (learnt * size if rank else 0)) / shares,
        "gradients": learnt * FLOAT32 / states + (0 if rank else vocabulary * hidden * size),
        "optimizer": learnt * (moments + (FLOAT32 if half else 0)) / states,
        "gathered and exchanged": exchanged,
        "kept for the backward pass": kept,
        "one layer, or a chunk of logits": max(a_layer if again else 0, logits),
        **({"critic": beside} if critic else {}),
    })  # fmt: skip


def generation_memory(shape: dict[str, Any], parameters: int, length: int, *, on_gpu: bool) -> MemoryUse:
    """Return what an engine in this process takes: weights, and keys and values of a few sequences."""
    size = BFLOAT16 if on_gpu else FLOAT32
    heads = shape.get("num_attention_heads", 1)
    head = shape.get("head_dim") or shape.get("hidden_size", 0) // max(1, heads)
    token = 2 * shape.get("num_hidden_layers", 0) * (shape.get("num_key_value_heads") or heads) * head * size
    return MemoryUse({
        "weights": parameters * size, f"keys and values of {SEQUENCES} sequences": SEQUENCES * length * token,
    })  # fmt: skip


def serving_memory(weights: int, servers: int, cache: int | None, share: float, device: int) -> MemoryUse:
    """Return what vLLM's servers on one GPU take.

    Args:
        weights: Bytes of a server's weights.
        servers: On the GPU.
        cache: Bytes for keys and values of each; None: vLLM takes what its share leaves.
        share: Of the GPU, that they take together.
        device: Bytes of the GPU.
    """
    held = cache if cache is not None else max(0.0, share * device / servers - weights - BESIDES)
    return MemoryUse({
        f"weights, {servers} x": servers * weights, "keys and values": servers * held,
        "context, graphs and buffers": servers * BESIDES,
    })  # fmt: skip
