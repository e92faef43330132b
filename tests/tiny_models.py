"""Small random models of several families, for tests."""

from typing import Any

import torch

COMMON = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "mistral, sliding": ("mistral", {"sliding_window": 4}),
    "gemma3": ("gemma3_text", {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 8, "sliding_window": 4}),
}
FAMILIES = {"llama": True, "qwen2": True, "qwen3": True, "mistral, sliding": True, "gemma3": True, "gemma2": False}
"""Whether packed rows can be given to it: Gemma 2 bounds its attention's scores."""


def tiny_model(family: str) -> Any:
    """Return a model with random weights in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, settings = KINDS[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**COMMON, **settings})
    attention = {"attn_implementation": "eager"} if family == "gemma2" else {}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **attention).eval()
    with torch.no_grad():  # the usual initial weights are so small that attention hardly matters
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model
