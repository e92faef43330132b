"""The numbers of an evaluation against its rows."""

import json
from pathlib import Path

import pyarrow as pa

from nanoskyrl.eval.metrics import summarize
from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.core.manifest import Manifest, first_difference
from nanoskyrl.stages.looking.eval_report import summary_of
from nanoskyrl.stages.looking.proof.findings import Findings


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
