"""Stage `sync`: a trained policy is published, and proved to be what the engine now holds.

The proof: sums of the weights that compute are those of the files, bit by bit. Where an engine can give none, its
log-probs of the canary must be the trainer's; beside sums, a canary that is not is a warning, for rounding moves it.
"""

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanoskyrl.stages.core.checked import Checked, FinitePositive
from nanoskyrl.stages.core.config import plugin_config, row_settings
from nanoskyrl.stages.core.errors import InputError, Notice, ProofError, SettingsError
from nanoskyrl.stages.core.manifest import Head, Manifest, read_manifest
from nanoskyrl.stages.core.metrics import MetricsLog, Stopwatch
from nanoskyrl.stages.core.output import open_output
from nanoskyrl.stages.core.runs import is_published, version_of
from nanoskyrl.stages.engines.base import Engine, TokenEngine, make_engine
from nanoskyrl.stages.models.policy import policy_digest, publish, read_info, same_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig(Checked):
    """How the arrival of new weights is proved."""

    engine: str | None = None
    """Engine that takes the weights; None: that of rollout, or hf where that one holds no policy."""
    tolerance: FinitePositive | None = None
    """Nats by which the engine's canary log-probs may differ from the trainer's, mean weighted by probability; None:
    1e-4, 0.06 for servers in bfloat16, any after training on weights in 4 bits. More is refused where no sums of
    weights prove that they arrived, else it is reported."""


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
    source, ours = read_manifest(trained, stage="train"), head(trained, config)
    with open_output(output, ours, force=force) as out:
        if out.manifest is not None and is_published(target):
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
            found = deliver(trained / "policy", engine, tolerance, parent=_parent_of(target))
        with watch("publish"):
            publish(trained / "policy", target)
        facts = {
            "policy": ours.policy, "parent": read_info(target).parent, "version": version_of(target),
            "changed": found.changed,
            "proof": {
                **engine.proof, "canary_gap": found.gap,
                "tolerance": None if tolerance == math.inf else tolerance or engine.canary_tolerance,
                "notices": found.notices,
            },
        }  # fmt: skip
        with watch("write"):
            manifest = out.finish(rows_in=source.rows_out, facts=facts)
    for notice in found.notices:
        warnings.warn(f"{notice}: {target}", Notice, stacklevel=2)
    numbers = {f"sync/engine/{key}": value for key, value in engine.facts().items()}
    gaps = {"sync/canary_gap": found.gap, "sync/canary_abs_diff/max": found.largest}
    log.write("sync", {**gaps, **numbers, **watch.timings()})
    return manifest


def head(trained: Path, config: SyncConfig) -> Head:
    """Return what is known of a sync before it begins.

    Raises:
        InputError: as in `sync`.
    """
    source, digest = read_manifest(trained, stage="train"), policy_digest(trained / "policy")
    if digest != source.facts.get("policy"):
        raise InputError(
            f"`{trained / 'policy'}` is not the policy that its manifest names", hint="Run `skyrl train --force` again"
        )
    return Head(stage="sync", settings={"sync": row_settings(config)}, inputs={"train": source.digest}, policy=digest)


def _parent_of(target: Path) -> Path | None:
    """Return `policies/N-1` for `policies/N`, if it is there."""
    version = version_of(target)
    parent = target.parent / f"{version - 1:08d}" if version else None
    return parent if parent is not None and is_published(parent) else None


@dataclass(frozen=True, slots=True)
class Arrival:
    """How a policy arrived in an engine."""

    gap: float
    """Nats between the engine's canary log-probs and the trainer's: mean of their absolute differences, weighted by the
    trainer's probabilities. In bfloat16 unlikely tokens move by tenths of a nat and say nothing."""
    largest: float
    """Largest of these differences."""
    changed: bool | None
    """Whether its weights are others than its parent's; None: it has none."""
    notices: list[str]
    """What should be known, in words."""


def deliver(policy: Path, engine: TokenEngine, tolerance: float | None, *, parent: Path | None) -> Arrival:
    """Load a policy into an engine and compare the canary's log-probs; servers compare sums of weights inside `load`.

    Args:
        policy: Directory of a trained policy.
        engine: One that may hold another.
        tolerance: Largest gap in nats; None: the engine's own.
        parent: The policy that it was trained from, where it is on disk.

    Raises:
        ProofError: sums differ; or there are none, and the log-probs differ from the trainer's.
    """
    info = read_info(policy)
    tolerance = engine.canary_tolerance if tolerance is None else tolerance
    before = engine.logprobs(info.canary_ids) if engine.policy_digest == info.parent and info.canary_ids else None
    engine.load(policy)
    after = engine.logprobs(info.canary_ids) if info.canary_ids else []
    trained, held = np.array(info.canary_logprobs), np.array(after)
    differences, weights = np.abs(held - trained), np.exp(trained)
    gap = float((differences * weights).sum() / weights.sum()) if len(weights) else 0.0
    changed = None if parent is None else not same_weights(parent, policy)
    notices = [] if changed is not False else ["the step changed nothing: the weights are those of the policy before"]
    if not gap <= tolerance:
        words = f"the engine's canary log-probs differ from the trainer's by {gap:.3g} nats, more than {tolerance:.3g}"
        if not engine.proof.get("sums_match"):
            raise ProofError(
                words, hint="The engine does not hold the trained weights: restart it; or raise `sync.tolerance`"
            )
        notices.append(f"{words}; its weights are the trained ones, so engine and trainer compute differently")
    elif before == after and changed and not engine.proof.get("sums_match"):
        notices.append(
            "the engine's canary log-probs did not change, and it has no sums to prove that it took the step"
        )
    return Arrival(gap, float(differences.max(initial=0.0)), changed, notices)
