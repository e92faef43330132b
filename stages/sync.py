"""Stage `sync`: a trained policy is published, and proved to be what the engine now holds.

The proof: the engine's own log-probs of the canary agree with the trainer's, and they
changed if the weights did. Agreement alone would prove nothing after a small step.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoskyrl.stages.core.config import plugin_config, to_plain
from nanoskyrl.stages.core.errors import InputError, ProofError, SettingsError, check_numbers
from nanoskyrl.stages.core.manifest import Head, Manifest, read_manifest
from nanoskyrl.stages.core.metrics import MetricsLog, Stopwatch
from nanoskyrl.stages.core.output import open_output
from nanoskyrl.stages.core.runs import version_of
from nanoskyrl.stages.engines.base import AsyncTokenEngine, Engine, TokenEngine, make_engine
from nanoskyrl.stages.models.policy import policy_digest, publish, read_info, weights_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """How the arrival of new weights is proved."""

    engine: str | None = None
    """Engine that takes the weights; None: vllm where rollout uses it, else hf."""
    tolerance: float | None = None
    """Largest difference in nats between the engine's canary log-probs and the trainer's; None: 1e-4; 0.5 for
    servers in bfloat16, of whom more is asked; any after training on weights in 4 bits."""

    def __post_init__(self) -> None:
        """Refuse a tolerance that nothing could meet, or that everything would."""
        check_numbers("sync", self, "tolerance", above=0, below=math.inf, hint="1e-4 suits float32")


def sync(
    trained: Path,
    output: Path,
    config: SyncConfig,
    *,
    target: Path,
    engine: Engine | None = None,
    settings: dict[str, dict[str, Any]] | None = None,
    force: bool = False,
    log: MetricsLog = MetricsLog(),
) -> Manifest:
    """Publish a trained policy, load it into an engine, and prove that it arrived.

    Args:
        trained: Output of `train`.
        output: Directory for the record of the proof.
        config: Which engine, and how near is near enough.
        target: The policy's place, `policies/N`.
        engine: One that is up; else it is made here.
        settings: The engine's table.
        force: Replace an output made under other settings.
        log: Where numbers go.

    Raises:
        InputError: the input is missing or unfinished, or its policy is not the one its manifest names.
        ProofError: the engine does not hold the weights that were trained.
    """
    watch = Stopwatch()
    source = read_manifest(trained, stage="train")
    digest = policy_digest(trained / "policy")
    if digest != source.facts.get("policy"):
        raise InputError(
            f"`{trained / 'policy'}` is not the policy that its manifest names", hint="Run `skyrl train --force` again"
        )
    head = Head(stage="sync", settings={"sync": to_plain(config)}, inputs={"train": source.digest}, policy=digest)
    with open_output(output, head, force=force) as out:
        if out.manifest is not None and target.is_dir():
            return out.manifest
        name = config.engine or "hf"
        if engine is None:
            engine = make_engine(name, plugin_config(settings or {}, "engine", name))
        if not isinstance(engine, TokenEngine):
            raise SettingsError(f"engine `{name}` holds no policy", hint="Sync into `hf` or `vllm`")
        quantized = source.settings.get("train", {}).get("quantization")
        # The trainer's base is in 4 bits, and the engine's is not: how far they are apart proves nothing.
        tolerance = config.tolerance or (math.inf if quantized else None)
        with watch("proof"):
            gap = deliver(trained / "policy", engine, tolerance, parent=_parent_of(target))
        with watch("publish"):
            publish(trained / "policy", target)
        facts = {"policy": digest, "parent": read_info(target).parent, "version": version_of(target)}
        if engine.proof:
            facts["proof"] = {
                **engine.proof,
                "trainer_gap": gap,
                "tolerance": None if tolerance == math.inf else tolerance or engine.canary_tolerance,
            }
        manifest = out.finish(rows_in=source.rows_out, facts=facts)
    numbers = engine.facts() if isinstance(engine, AsyncTokenEngine) else {}
    numbers = {f"sync/engine/{key}": value for key, value in numbers.items()}
    log.write("sync", {"sync/canary_abs_diff/max": gap, **numbers, **watch.timings()})
    return manifest


def _parent_of(target: Path) -> Path | None:
    """Return `policies/N-1` for `policies/N`, if it is there."""
    version = version_of(target)
    parent = target.parent / f"{version - 1:08d}" if version else None
    return parent if parent is not None and parent.is_dir() else None


def deliver(policy: Path, engine: TokenEngine, tolerance: float | None, *, parent: Path | None) -> float:
    """Load a policy into an engine and return the largest canary difference in nats.

    Servers prove besides, inside `load`, that their weights sum to what the files do and that their canary changed.

    Raises:
        ProofError: the log-probs differ from the trainer's, or stayed what they were under other weights.
    """
    info = read_info(policy)
    before = None
    if engine.policy_digest is not None and engine.policy_digest == info.parent:
        before = engine.logprobs(info.canary_ids)
    engine.load(policy)
    after = engine.logprobs(info.canary_ids)
    tolerance = engine.canary_tolerance if tolerance is None else tolerance
    gap = max((abs(a - b) for a, b in zip(after, info.canary_logprobs, strict=True)), default=0.0)
    if not gap <= tolerance:
        raise ProofError(
            f"the engine's canary log-probs differ from the trainer's by {gap:.3g} nats, more than {tolerance:.3g}",
            hint="The engine does not hold the trained weights: restart it; with bfloat16 raise `sync.tolerance`",
        )
    if (
        before is not None
        and before == after
        and not engine.proof.get("rounded_away")
        and parent is not None
        and weights_digest(parent) != weights_digest(policy)
    ):
        raise ProofError(
            "the engine's canary log-probs did not change, although the weights did",
            hint="The engine kept the old weights: restart it",
        )
    return gap
