"""The numbers of a stage's output, for programs: what its rows give, and what its manifest says beside them."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanoskyrl.stages import rollout as rollout_stage, score as score_stage
from nanoskyrl.stages.core.manifest import Manifest, is_finished, read_manifest
from nanoskyrl.stages.core.metrics import METRICS, finite, latest, read_metrics
from nanoskyrl.stages.core.runs import Run, step_of
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.learning import advantage_columns
from nanoskyrl.stages.looking.eval_report import summary_of

WITH_NUMBERS = {"rollout": rollout_stage, "score": score_stage}
"""Stages that keep their numbers in the manifest, and read rows only where an earlier version did not."""
NO_NUMBERS = ("step", "stage", "time", "host")


def numbers_of(manifest: Manifest, output: Path) -> dict[str, Any]:
    """Return the numbers of an output; those of a train are what its run logged, beside its manifest's facts."""
    if manifest.stage == "eval":
        return summary_of(output)
    if (stage := WITH_NUMBERS.get(manifest.stage)) is not None:
        return finite(stage.numbers_of(output, manifest))
    if manifest.stage == "advantage":
        columns = advantage_columns.SUMMARY_COLUMNS
        return finite(advantage_columns.summary(read_parts(output, manifest, columns)))
    facts = {f"{manifest.stage}/{name}": value for name, value in manifest.facts.items() if not isinstance(value, dict)}
    if manifest.stage == "sync":
        return facts | {"sync/canary_gap": manifest.facts.get("proof", {}).get("canary_gap")}
    step = step_of(output.parent)
    logged = (
        latest(read_metrics(output.parent.parent / METRICS), manifest.stage).get(step, {}) if step is not None else {}
    )
    return facts | {name: value for name, value in logged.items() if name not in NO_NUMBERS}


def plain(place: Path) -> dict[str, Any]:
    """Return a stage's output or a run as JSON-ready values: of a run, the numbers of every finished output.

    Raises:
        InputError: it is neither, or cannot be read.
    """
    if is_finished(place):
        manifest = read_manifest(place)
        return {"output": str(place), "numbers": numbers_of(manifest, place), "manifest": asdict(manifest)}
    run = Run(place)
    if not run.steps() and not run.policies():
        read_manifest(place)  # says what is wrong with it
    steps = {
        str(step): {
            stage: numbers_of(read_manifest(run.stage(step, stage)), run.stage(step, stage))
            for stage in run.made(step)
            if is_finished(run.stage(step, stage))
        }
        for step in run.steps()
    }
    evaluations = {f"{folder.parent.name}/{folder.name}": summary_of(folder) for folder in run.evaluations()}
    return {"output": str(place), "numbers": {"steps": steps, "evaluations": evaluations}, "manifest": None}
