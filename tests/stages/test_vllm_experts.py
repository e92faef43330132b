"""Adapters of experts on real vLLM servers: what was trained arrives there, is proved, and computes."""

import dataclasses

import pytest
import torch
from families import write_family
from tiny_models import update
from vllm_servers import CONFIG, missing

from nanoskyrl.stages.engines.base import Request, SamplingParams
from nanoskyrl.stages.engines.vllm.engine import VllmEngine
from nanoskyrl.stages.learning.learner import Learner
from nanoskyrl.stages.learning.train_config import OptimizerConfig
from nanoskyrl.stages.models.loading import load_model
from nanoskyrl.stages.models.logprobs import sequence_logprobs
from nanoskyrl.stages.sync import deliver

PROMPT = [7, 20, 33, 46, 59]
WIDE = {"head_dim": 32, "hidden_size": 128}

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("granitemoe", marks=pytest.mark.slow)])
def test_trained_experts_arrive_at_a_server(kind, tmp_path):
    if reason := missing():
        pytest.skip(reason)
    write_family(kind, tmp_path / "base", **WIDE)
    learner = Learner(OptimizerConfig(lora_rank=2, lr=1e-2))
    learner.load(tmp_path / "base", seed=1)
    update(learner)
    learner.save(tmp_path / "policy", tmp_path / "state", PROMPT)
    engine = VllmEngine(dataclasses.replace(CONFIG, max_model_len=256))
    engine.place = tmp_path
    try:
        engine.load(tmp_path / "base")
        before = engine.logprobs(PROMPT)
        assert deliver(tmp_path / "policy", engine, 1e-3, parent=tmp_path / "base").largest < 1e-3
        assert engine.proof["sums_match"]
        assert max(abs(a - b) for a, b in zip(engine.logprobs(PROMPT), before, strict=True)) > 1e-3
        (found,) = engine.generate([Request(prompt_ids=PROMPT, seed=5, max_tokens=24)], SamplingParams())
    finally:
        engine.close()
    ids = torch.tensor([[*PROMPT, *found.token_ids]])
    model = load_model(tmp_path / "policy", dtype=torch.float32, device="cpu").eval()
    with torch.inference_mode():
        nats = sequence_logprobs(model, ids, torch.ones_like(ids), temperature=1.0).logprobs[0, len(PROMPT) - 1 :]
    assert float((nats - torch.from_numpy(found.rollout_logprobs)).abs().max()) < 1e-3
