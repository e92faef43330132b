"""How a stage of somebody's own works: part by part, in the same columns, with an account of the rows that it drops."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from nanoskyrl.stages.core.code import plugin_digests
from nanoskyrl.stages.core.config import row_settings
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.manifest import PASSES_ON, Head, Manifest, read_manifest
from nanoskyrl.stages.core.metrics import MetricsLog, Stopwatch
from nanoskyrl.stages.core.output import open_output
from nanoskyrl.stages.core.pipeline import Stage
from nanoskyrl.stages.core.registry import plugin_errors
from nanoskyrl.stages.core.shards import read_part
from nanoskyrl.stages.core.table_checks import check

DROPPED = b"nanoskyrl.dropped"
"""In the metadata of a part: the rows that were dropped, by reason, as JSON. So a resumed stage counts them, too."""


def run_own(
    stage: Stage, source: Path, output: Path, config: Any, *, force: bool = False, log: MetricsLog = MetricsLog()
) -> Manifest:
    """Let a stage of somebody's own work on shards.

    Args:
        stage: As the run's pipeline has it.
        source: Shards of its input.
        output: Directory for the shards that it passes on.
        config: Its settings; None: it has none.
        force: Replace an output made under other settings.
        log: Where numbers go.

    Raises:
        InputError: the input is missing, unfinished or corrupt.
        SettingsError: the stage fails, or does not keep what `docs/extending.md` asks for.
    """
    watch = Stopwatch()
    made, head = read_manifest(source, stage=stage.table), head_of_own(stage, source, config)
    with open_output(output, head, force=force, dropped=dropped_rows) as out:
        if out.manifest is not None:
            return out.manifest
        for index, part in enumerate(made.parts):
            if out.has_part(index):
                continue
            with watch("read"):
                table = read_part(source / part.name, part.digest)
            with watch("work"), plugin_errors(f"stage `{stage.name}`"):
                left, dropped = stage.run(table, config)  # type: ignore[operator]
                _check_account(stage, table, left, dropped)
            with watch("check"):
                check(left, stage.table)
            with watch("write"):
                metadata = {**(left.schema.metadata or {}), DROPPED: json.dumps(dict(sorted(dropped.items()))).encode()}
                out.write_part(index, left.replace_schema_metadata(metadata))
        with watch("write"):
            manifest = out.finish(rows_in=made.rows_out, facts={**made.facts, PASSES_ON: stage.table})
    counts = {f"{stage.name}/dropped/{reason}": count for reason, count in manifest.dropped.items()}
    log.write(stage.name, {f"{stage.name}/rows": manifest.rows_out, **counts, **watch.timings()})
    return manifest


def head_of_own(stage: Stage, source: Path, config: Any) -> Head:
    """Return what is known of a stage's work before it begins; later stages find the settings of earlier ones in it."""
    made = read_manifest(source, stage=stage.table)
    plugins = {**made.settings.get("plugins", {}), **plugin_digests(stage.command).get("plugins", {})}
    return Head(
        stage=stage.name,
        settings={**made.settings, stage.command: row_settings(config), **({"plugins": plugins} if plugins else {})},
        inputs={made.stage: made.digest},
        policy=made.policy,
    )


def dropped_rows(table: pa.Table) -> Mapping[str, int]:
    """Return the rows that were dropped from a part, by reason."""
    return json.loads((table.schema.metadata or {}).get(DROPPED, b"{}"))


def _check_account(stage: Stage, before: pa.Table, after: pa.Table, dropped: Mapping[str, int]) -> None:
    """Raise SettingsError unless what is left are whole trajectories of before, and the others are accounted for."""
    lost = before.num_rows - after.num_rows
    if lost != sum(dropped.values()):
        raise SettingsError(
            f"stage `{stage.name}` dropped {lost} rows, and gives reasons for {sum(dropped.values())}",
            hint="Count each row that it drops under one reason",
        )
    were, are = (Counter(table.column("trajectory_id").to_pylist()) for table in (before, after))
    if cut := next((name for name, rows in are.items() if were[name] != rows), None):
        raise SettingsError(
            f"stage `{stage.name}` left {are[cut]} of {were[cut]} rows of trajectory {cut}",
            hint="Keep all rows of a trajectory, or none",
        )
