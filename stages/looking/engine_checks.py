"""Whether an engine can be trusted with a policy, tried on the engine itself.

What `sync` proves of every policy is cheap. What it relies on is tried here: that log-probs are transformers', that the
same seeds draw the same tokens, that new weights are used, and that old ones among them are found.
"""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nanoskyrl.stages.core.children import temporary_directory
from nanoskyrl.stages.core.config import plugin_config
from nanoskyrl.stages.core.errors import InputError, ProofError, SettingsError
from nanoskyrl.stages.engines.base import Request, SamplingParams, TokenEngine, make_engine
from nanoskyrl.stages.engines.vllm.delivery import PROBE
from nanoskyrl.stages.engines.vllm.engine import VllmEngine
from nanoskyrl.stages.engines.vllm.proof import SELF_TEST_TOLERANCE, self_test
from nanoskyrl.stages.looking.doctor import Check, tried
from nanoskyrl.stages.models.policy import is_adapter, is_weights, policy_digest, policy_files

SEQUENCES, TOKENS = 8, 32
STEP = 1e-3
"""Size of the step that is tried, as a share of each weight's spread."""


def examine_engine(name: str, policy: Path, settings: dict[str, dict[str, Any]]) -> list[Check]:
    """Start an engine, try it, and stop it.

    Args:
        name: A token engine.
        policy: Directory of a whole model.
        settings: Tables, the engine's among them.

    Raises:
        SettingsError: the engine holds no policy.
        InputError: the policy is an adapter, or has no safetensors.
        EngineError: the engine does not start.
    """
    engine = make_engine(name, plugin_config(settings, "engine", name))
    if not isinstance(engine, TokenEngine):
        raise SettingsError(f"engine `{name}` holds no policy", hint="Examine `hf` or `vllm`")
    if is_adapter(policy) or not any(policy.glob("*.safetensors")):
        raise InputError(f"`{policy}` is no whole model in safetensors", hint="Examine the engine with its base")
    try:
        began = time.perf_counter()
        engine.load(policy)
        checks = [Check("engine starts", True, f"in {time.perf_counter() - began:.1f} s; {_words(engine.proof)}")]
        prompt = engine.renderer.prompt_ids(PROBE)
        requests = [Request(prompt_ids=prompt, seed=seed, max_tokens=TOKENS) for seed in range(SEQUENCES)]
        first, again = (engine.generate(requests, SamplingParams()) for _ in range(2))
        same = sum(a.token_ids == b.token_ids for a, b in zip(first, again, strict=True))
        checks += [
            tried("log-probs are transformers'", lambda: _gap(engine, policy, prompt, first)),
            # On a GPU batches round differently, and a token in some hundreds turns.
            Check("seeds repeat themselves", True, f"{same} of {SEQUENCES} sequences", needed=False),
        ]
        with temporary_directory("nanoskyrl-doctor-") as folder:
            step = step_away(policy, folder / "step")
            checks.append(tried("a small step arrives", lambda: _changes(engine, step, prompt)))
            if isinstance(engine, VllmEngine):
                stale = step_away(policy, folder / "stale", keep=_a_layer(policy))
                checks.append(tried("a stale layer is found", lambda: _finds(engine, stale, step)))
        return checks
    finally:
        engine.close()


def step_away(policy: Path, target: Path, *, keep: str | None = None) -> Path:
    """Write a policy a small random step away, always the same one; return where.

    Args:
        policy: A whole model in safetensors.
        target: A new directory.
        keep: Weights whose names begin so stay as they are.
    """
    import torch
    from safetensors.torch import load_file, save_file

    target.mkdir()
    generator = torch.Generator().manual_seed(0)
    for file in policy_files(policy):
        if not is_weights(file) or file.suffix != ".safetensors":
            shutil.copyfile(file, target / file.name)
            continue
        weights = load_file(file)
        for name, weight in weights.items():
            noise = torch.randn(weight.shape, generator=generator)
            if keep is None or not name.startswith(keep):
                spread = float(weight.float().std()) if weight.numel() > 1 else 1.0
                # A weight that is the same everywhere, as a norm's at the start, is moved too.
                weights[name] = (weight + STEP * (spread or 1.0) * noise).to(weight.dtype)
        save_file(weights, target / file.name, metadata={"format": "pt"})
    return target


def _a_layer(policy: Path) -> str:
    """Return how the names of one layer's weights begin."""
    from safetensors import safe_open

    names: list[str] = []
    for file in sorted(policy.glob("*.safetensors")):  # a shard may hold embeddings alone
        with safe_open(file, framework="np") as opened:
            names += opened.keys()
    return next(name[: name.index("layers.") + 9] for name in names if "layers." in name)


def _gap(engine: TokenEngine, policy: Path, prompt: Sequence[int], sampled: Sequence[Any]) -> str:
    tolerance = SELF_TEST_TOLERANCE[str(engine.proof.get("dtype", "float32"))]
    found = self_test(policy, prompt, sampled, tolerance)
    return f"mean gap {found['self_test_gap/mean']:.2g} nats on {found['self_test_tokens']} tokens"


def _changes(engine: TokenEngine, step: Path, prompt: Sequence[int]) -> str:
    before = np.array(engine.logprobs(prompt))
    engine.load(step)
    change = float(np.abs(np.array(engine.logprobs(prompt)) - before).max())
    if not change:
        raise ProofError("log-probs stayed what they were", hint="The engine keeps old weights: do not train with it")
    return f"log-probs move by {change:.2g} nats; {_words(engine.proof)}"


def _finds(engine: VllmEngine, stale: Path, step: Path) -> str:
    """Have every server hold the step but for a layer, and say that it holds the step."""
    for server in engine.supervisor.living:
        engine.submit(server.client.worker("skyrl_load", str(stale), policy_digest(step))).result()
    engine.policy_digest = None
    try:
        engine.load(step)
    except ProofError as error:
        return str(error)
    raise ProofError("a server that kept an old layer was believed", hint="Sums cannot be taken of it: see its proof")


def _words(proof: Any) -> str:
    return "sums of the weights match" if proof.get("sums_match") else "no sums of its weights"
