"""How much of a device's arithmetic a training step uses."""

from typing import Any

PEAK_FLOPS = {"H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
"""Dense bfloat16, as their makers say, by a part of the device's name."""


def device_peak(name: str) -> float | None:
    """Return floating-point operations a second that a device is sold as doing in bfloat16; None if unknown."""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def training_flops(parameters: int, config: Any, tokens: int, pairs: int, *, lora: bool) -> float:
    """Return the operations of one forward and backward pass, what is computed twice counted once.

    Two a weight and token forward and four backward, or two where the weights are frozen; and attention's products.

    Args:
        parameters: Of the model.
        config: Of its text part; an input embedding that is not the output's too is a look-up, and not counted.
        tokens: That are computed.
        pairs: Of a token and one that it sees, each with itself.
        lora: Whether adapters alone learn.
    """
    heads = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    lookup = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    passes = 2 if lora else 3
    dense = 2 * passes * (parameters - lookup) * tokens
    # Attention has no weights: its backward pass is twice its forward pass in either case.
    return dense + 3 * 4 * config.num_hidden_layers * config.num_attention_heads * heads * pairs
