"""The numbers of a stage's output, for programs: what its rows give, and what its manifest says beside them."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from nanoskyrl.stages import rollout as rollout_stage, score as score_stage
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.manifest import Manifest, is_finished, read_manifest
from nanoskyrl.stages.core.metrics import METRICS, finite, latest, read_metrics
from nanoskyrl.stages.core.runs import Run, step_of
from nanoskyrl.stages.core.shards import read_part, read_parts
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


def plain_row(place: Path, row: int) -> dict[str, Any]:
    """Return one row of a stage's output, or of a part, as JSON-ready values, every column of it; NaN is null.

    Raises:
        InputError: there are no shards.
        SettingsError: there is no such row.
    """
    tables = [read_part(place)] if place.suffix == ".parquet" else list(read_parts(place, read_manifest(place)))
    count = sum(table.num_rows for table in tables)
    if not -count <= row < count:
        hint = f"Rows are 0 to {count - 1}" if count else "There are no rows at all"
        raise SettingsError(f"there is no row {row}", hint=hint)
    return _plain(pa.concat_tables(tables).slice(row % count, 1).to_pylist()[0])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
