"""One output against its own manifest: every file, every row that a number counts, an evaluation's numbers, itself."""

# pyarrow makes the functions of pyarrow.compute at import, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from nanoskyrl.eval.metrics import summarize
from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.core.manifest import (
    MANIFEST,
    PART_NAME,
    PASSES_ON,
    SCHEMA_1,
    STARTED,
    SUMMARY,
    Manifest,
    first_difference,
    is_finished,
    located,
    read_manifest,
)
from nanoskyrl.stages.core.output import FOLDERS
from nanoskyrl.stages.core.own_stage import dropped_rows
from nanoskyrl.stages.core.shards import read_part
from nanoskyrl.stages.core.storage import TEMPORARY
from nanoskyrl.stages.core.table_checks import check
from nanoskyrl.stages.engines.rollout_parts import failed
from nanoskyrl.stages.eval import short
from nanoskyrl.stages.learning.advantage_columns import dropped_by_reason
from nanoskyrl.stages.looking.eval_report import summary_of
from nanoskyrl.stages.looking.proof.findings import Findings
from nanoskyrl.stages.score import unjudged

COUNTS: dict[str, Callable[[pa.Table], Mapping[str, int]]] = {
    "rollout": failed, "score": unjudged, "advantage": dropped_by_reason, "eval": short,
}  # fmt: skip
"""What a stage's manifest counts as dropped; the others drop no row of their own."""


def check_output(folder: Path, findings: Findings) -> Manifest | None:
    """Check an output's files and its manifest; return the manifest if it can be read."""
    if not is_finished(folder):
        findings.unfinished.append(str(folder))
        return None
    try:
        manifest = read_manifest(folder)
    except InputError as error:
        findings.broken.append(str(error))
        return None
    place = located(folder, MANIFEST)
    as_written = place.read_bytes() == manifest.to_bytes() and manifest.seal in (None, manifest.sealed().seal)
    findings.expect("manifests", as_written, f"{place} is not as it was written")
    if manifest.seal is None:
        findings.recorded.append(f"{place} has no seal: it was made by an earlier version")
    _check_files(folder, manifest, findings)
    return manifest


def _check_files(folder: Path, manifest: Manifest, findings: Findings) -> None:
    wanted = {part.name: part.digest for part in manifest.parts} | manifest.files
    for name, digest in wanted.items():
        path = folder / name
        if not path.is_file():
            if name.startswith("state/") and not (folder / "state").exists():
                findings.pruned.append(str(path))
            else:
                findings.broken.append(f"{path} is missing")
            continue
        same = findings.digest(path) == digest
        findings.expect("files", same, f"{path} has another digest than its manifest says")
    for name in sorted(_names(folder) - set(wanted)):
        findings.broken.append(f"{folder / name} is in no manifest")


def _names(folder: Path) -> set[str]:
    """Return the files that a stage's directory holds, but for those that say how far it is; what is foreign aside."""
    aside = {MANIFEST, STARTED, SCHEMA_1[MANIFEST], SCHEMA_1[STARTED]}
    ours = [
        path for path in folder.iterdir() if PART_NAME.fullmatch(path.name) or path.name in (SUMMARY, "summary.json")
    ]
    ours += [path for name in FOLDERS for path in (folder / name).rglob("*") if path.is_file()]
    names = {path.relative_to(folder).as_posix() for path in ours if not path.name.endswith(TEMPORARY)}
    return names - aside


def read_rows(folder: Path, manifest: Manifest, findings: Findings, *, keep: bool = True) -> pa.Table | None:
    """Compare the rows of an output with what its manifest counts, a part at a time.

    Args:
        folder: The output.
        manifest: Its own.
        findings: Where it is noted.
        keep: Whether the rows are asked for.

    Returns:
        The rows, if they are asked for and can be read.
    """
    tables, ids, found, counts = [], [], 0, Counter()
    columns = manifest.facts.get(PASSES_ON, manifest.stage)
    count = COUNTS.get(manifest.stage) or (dropped_rows if columns != manifest.stage else lambda table: {})
    for part in manifest.parts:
        path = folder / part.name
        try:
            table = read_part(path, part.digest)
            if columns in COUNTS:
                check(table, columns)
        except InputError as error:
            if path.is_file() and findings.digest(path) == part.digest:  # another digest is named already
                findings.broken.append(f"{path}: {error}")
            return None
        rows = table.num_rows
        findings.expect("counts", rows == part.rows, f"{path} has {rows} rows, and its manifest says {part.rows}")
        counts.update(count(table))
        found += rows
        if manifest.stage in ("rollout", "eval"):
            ids += table.column("trajectory_id").chunks
        if keep:
            tables.append(table)
    facts = {"rows_out": (found, manifest.rows_out), "dropped": (dict(counts), manifest.dropped)}
    if manifest.stage in ("rollout", "eval") and manifest.parts:
        attempts = pc.count_distinct(pa.chunked_array(ids, pa.string())).as_py()
        facts["rows_in"] = (attempts, manifest.rows_in)
    for name, (given, said) in facts.items():
        findings.expect("counts", given == said, f"{folder}: its rows give `{name}` {given}, its manifest {said}")
    return pa.concat_tables(tables) if tables else None


def check_numbers_of(folder: Path, manifest: Manifest, table: pa.Table, findings: Findings) -> None:
    """Compute the numbers of an evaluation again from its rows; a benchmark's own metrics stay recorded."""
    try:
        said = summary_of(folder)
        asked = manifest.settings["eval"]
        found, _ = summarize([table], asked["n_samples"], ks=asked["pass_k"], prices=asked.get("prices"))
    except (InputError, KeyError, TypeError, ValueError) as error:
        findings.broken.append(f"{folder}: its numbers cannot be read: {error}")
        return
    # As JSON holds them.
    again = json.loads(json.dumps(found))
    difference = first_difference(again, {name: said.get(name) for name in again})
    otherwise = "" if difference is None else f"{difference[0]} is {difference[2]}, and its rows give {difference[1]}"
    findings.expect("evaluations", difference is None, f"{folder}: {otherwise}")
    tasks = sorted(set(table.column("task_id").to_pylist()))
    known = sorted(said.get("task_ids", tasks)) == tasks
    findings.expect("evaluations", known, f"{folder}: its numbers name other tasks than its rows are of")
    own = sorted(set(said) - set(again) - {"task_ids", "held_out"})
    if own:
        findings.recorded.append(f"{folder}: {', '.join(own)}, which the benchmark computed")
