"""Adapters of experts on real vLLM servers: what was trained arrives there, is proved, and computes."""

import contextlib
import dataclasses
import shutil

import pytest
import torch
from families import write_family
from tiny_models import update
from tolerances import LOGITS, allowed
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
"""vLLM's kernels on a CPU want them so."""
KINDS: dict[str, dict[str, int]] = {
    "glm4_moe": {}, "gpt_oss": {}, "granitemoe": {}, "llama4_text": {"num_experts_per_tok": 1}, "mixtral": {},
    "olmoe": {}, "qwen2_moe": {},
}  # fmt: skip
"""What each needs beside the recipe: as of the real Llama 4, one expert a token."""
OTHERWISE = {
    "ernie4_5_moe": "on CPUs, vLLM routes without the correction bias of a softmax router",
    "jetmoe": "vLLM has no class for it, and its backend for transformers computes otherwise",
}
"""Families whose log-probs vLLM 0.32 gets wrong, whatever their weights."""

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def a_family(kind, changes, place):
    """Write a family's tiny model, and train its experts for a step."""
    write_family(kind, place / "base", **WIDE, **changes)
    learner = Learner(OptimizerConfig(lora_rank=2, lr=1e-2))
    learner.load(place / "base", seed=1)
    update(learner)
    learner.save(place / "policy", place / "state", PROMPT)


@contextlib.contextmanager
def served(place):
    """Start a server with the family's model."""
    engine = VllmEngine(dataclasses.replace(CONFIG, max_model_len=256))
    engine.place = place
    try:
        engine.load(place / "base")
        yield engine
    finally:
        engine.close()


def gap_of_written(policy, engine):
    """Return how far the log-probs of what a server writes are from the trainer's, in nats."""
    (found,) = engine.generate([Request(prompt_ids=PROMPT, seed=5, max_tokens=24)], SamplingParams())
    ids = torch.tensor([[*PROMPT, *found.token_ids]])
    model = load_model(policy, dtype=torch.float32, device="cpu").eval()
    with torch.inference_mode():
        nats = sequence_logprobs(model, ids, torch.ones_like(ids), temperature=1.0).logprobs[0, len(PROMPT) - 1 :]
    return float((nats - torch.from_numpy(found.rollout_logprobs)).abs().max())


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("qwen3_moe", {}), *(pytest.param(*pair, marks=pytest.mark.slow, id=pair[0]) for pair in KINDS.items())],
)
def test_trained_experts_arrive_at_a_server(kind, changes, tmp_path):
    if reason := missing():
        pytest.skip(reason)
    a_family(kind, changes, tmp_path)
    with served(tmp_path) as engine:
        before = engine.logprobs(PROMPT)
        assert deliver(tmp_path / "policy", engine, 1e-5, parent=tmp_path / "base").largest < 1e-5
        assert engine.proof["sums_match"]
        assert max(abs(a - b) for a, b in zip(engine.logprobs(PROMPT), before, strict=True)) > 1e-3
        # Tokens of -30 nats are written, too, whose last bits are worth 2e-6 nats.
        assert gap_of_written(tmp_path / "policy", engine) < allowed(torch.float32, 16, LOGITS)


@pytest.mark.slow
def test_every_weight_of_gpt_oss_arrives(tmp_path):
    """Its sinks and experts, which vLLM's own reload leaves as they were."""
    if reason := missing():
        pytest.skip(reason)
    a_family("gpt_oss", {}, tmp_path)
    model = load_model(tmp_path / "base", dtype=torch.float32, device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    shutil.copytree(tmp_path / "base", tmp_path / "other")
    model.save_pretrained(tmp_path / "other")
    with served(tmp_path) as engine:
        engine.load(tmp_path / "other")
        assert engine.proof["sums_match"]
        assert gap_of_written(tmp_path / "other", engine) < allowed(torch.float32, 16, LOGITS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERWISE)
def test_where_vllm_computes_otherwise_it_is_said(kind, tmp_path):
    """Once this fails, vLLM computes as the trainer does: move the family up, and out of docs/models.md's table."""
    if reason := missing():
        pytest.skip(reason)
    a_family(kind, {}, tmp_path)
    with served(tmp_path) as engine:
        (notice,) = deliver(tmp_path / "policy", engine, None, parent=tmp_path / "base").notices
    assert "engine and trainer compute differently" in notice
