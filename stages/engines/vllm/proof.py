"""Proofs that a server holds a policy: sums of its weights, and transformers' own word."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanoskyrl.stages.core.errors import EngineError, ProofError
from nanoskyrl.stages.engines.base import Generation
from nanoskyrl.stages.engines.vllm.client import Client, Refused
from nanoskyrl.stages.engines.vllm.weights import expected_adapter_sums

SELF_TEST_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}


def sums_match(proof: Mapping[str, Any]) -> bool:
    """Say whether the sums of all weights that compute are those of the policy's files."""
    return proof.get("checksum") == "matches" and proof.get("adapter_checksum", "matches") == "matches"


def compare_weights(found: dict[str, Any], expected: dict[str, list[str]], url: str) -> None:
    """Compare what a worker sums with what the files sum.

    Raises:
        ProofError: they differ, or it computes with copies of older weights.
    """
    if found["stale"]:
        raise ProofError(f"server {url} computes with old weights in `{found['stale'][0]}`", hint="Restart it")
    names = {*expected, *found["sums"]}
    wrong = sorted(name for name in names if expected.get(name) != found["sums"].get(name))
    if wrong:
        raise ProofError(
            f"the weights in server {url} are not those of the policy: checksums differ in {len(wrong)} of "
            f"{len(expected)} parts, first in {wrong[0]}",
            hint="Restart the server; one that rewrites weights, as a quantized one, needs `vllm.checksum=false`",
        )


async def compare_adapter(client: Client, adapter: Path, dtype: str) -> str:
    """Say how the sums of the adapters that compute compare with those of the files.

    Raises:
        ProofError: none of them is this one.
    """
    expected = await asyncio.to_thread(expected_adapter_sums, adapter, dtype)
    try:
        found = await client.worker("skyrl_adapter_checksum")
    except Refused:
        return "not ours to take"
    if expected is None or len(found) > 1 or found[0]["sums"] is None:
        return "not comparable"
    if expected not in found[0]["sums"]:
        raise ProofError(
            f"no adapter in server {client.url} has the weights of `{adapter}`: checksums differ",
            hint="Restart the server",
        )
    return "matches"


def self_test(
    policy: Path, prompt: Sequence[int], generations: Sequence[Generation], tolerance: float
) -> dict[str, float | int]:
    """Compare a server's log-probs of what it sampled with transformers', and return the gaps in nats.

    Args:
        policy: The policy that it holds.
        prompt: What all were given.
        generations: Sampled at temperature 1.
        tolerance: Largest mean gap.

    Raises:
        EngineError: nothing was sampled.
        ProofError: the gap is larger than rounding explains.
    """
    import torch

    from nanoskyrl.stages.models.loading import load_model
    from nanoskyrl.stages.models.logprobs import sequence_logprobs

    model = load_model(policy, dtype=torch.float32, device="cpu").eval()
    gaps: list[float] = []
    for generation in generations:
        if generation.error or generation.rollout_logprobs is None:
            raise EngineError(f"the self-test failed: {generation.error}", hint="Look at the server's log")
        ids = torch.tensor([[*prompt, *generation.token_ids]])
        with torch.inference_mode():
            found = sequence_logprobs(model, ids, torch.ones_like(ids), temperature=1.0).logprobs[0]
        gaps += (found[len(prompt) - 1 :] - torch.from_numpy(generation.rollout_logprobs)).abs().tolist()
    mean = sum(gaps) / len(gaps)
    if not mean <= tolerance:
        raise ProofError(
            f"the servers' log-probs differ from transformers' by {mean:.3g} nats on average, over {tolerance:g}",
            hint="Other weights, another type or a fault of the server; `vllm.self_test_tolerance` allows more",
        )
    return {"self_test_gap/mean": mean, "self_test_gap/max": max(gaps), "self_test_tokens": len(gaps)}
