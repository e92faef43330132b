"""Small random models of several families, and rows for them, for tests."""

from typing import Any

import numpy as np
import torch

from nanoskyrl.algos.off_policy import OffPolicyConfig
from nanoskyrl.stages.core.registry import lookup
from nanoskyrl.stages.learning.batching import Sequences
from nanoskyrl.stages.learning.learner import Learner
from nanoskyrl.stages.learning.objective import Objective
from nanoskyrl.stages.learning.train_config import TrainConfig
from nanoskyrl.stages.learning.update import Update

LENGTHS = ((5, 9), (3, 1), (1, 14), (7, 3), (4, 6), (2, 11), (6, 6), (3, 13))
"""Of the prompt and the response of each row."""

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


def rows(vocabulary, seed=0):
    """Return made-up rows, some tokens of which were observed and not sampled."""
    random = np.random.default_rng(seed)

    def ids(count):
        return random.integers(1, vocabulary, count).astype(np.int32)

    def each(make):
        return [make(response).astype(np.float32) for _, response in LENGTHS]

    masks = [np.asarray([*random.integers(0, 2, response - 1), 1], np.int8) for _, response in LENGTHS]
    prompts, responses = [ids(prompt) for prompt, _ in LENGTHS], [ids(response) for _, response in LENGTHS]
    nats = each(lambda n: -random.random(n) * 4)
    return Sequences(
        groups=[str(row // 2) for row in range(len(LENGTHS))],
        prompt_ids=prompts,
        response_ids=responses,
        loss_mask=masks,
        rollout_logprobs=nats,
        old_logprobs=nats,
        ref_logprobs=[None] * len(LENGTHS),
        advantages=each(lambda n: np.full(n, random.normal())),
        returns=[None] * len(LENGTHS),
        values=[None] * len(LENGTHS),
        weights=[None] * len(LENGTHS),
    )


def update(learner: Learner, count: int = 200) -> Any:
    """Let a learner take one step on eight made-up rows."""
    algorithm = lookup("algo", "grpo")
    config = TrainConfig(max_tokens_per_micro_batch=200)
    objective = Objective(algorithm, algorithm.Config(), config, rows(count), 1.0, off_policy=OffPolicyConfig())
    return Update(objective).step(learner, list(range(8)))
