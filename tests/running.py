"""Running the command and the loop in tests, and comparing what they leave."""

import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest

from nanoskyrl.stages.core.manifest import MANIFEST, read_manifest
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.core.storage import as_path

ROOT = Path(__file__).parent.parent

SMALL = {
    "rollout": {"train_batch_size": 4, "n_samples_per_prompt": 4, "max_generate_length": 32, "rows_per_part": 8},
    "loop": {"steps": 2},
}
"""Settings of a run whose step takes a fraction of a second, in two parts."""


GUARD_SECONDS = 300.0
"""After which something hangs; no machine that is only busy takes as long."""


def as_from_a_terminal() -> None:
    """Take signals as usual, in a process to be: a script's background ignores Ctrl-C, and `nohup` ignores SIGHUP."""
    for name in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(name, signal.SIG_DFL)


def data_file(name: str) -> Path:
    """Return a file of the sample data sets, in $NANOSKYRL_DATA or beside the checkout, or skip the test."""
    places = [Path(place) for place in (os.environ.get("NANOSKYRL_DATA"), ROOT.parent / "shared" / "data") if place]
    found = next((place / name for place in places if (place / name).is_file()), None)
    if found is None:
        pytest.skip(f"no {name} here: name a folder of sample data sets in $NANOSKYRL_DATA")
    return found


def skyrl(*arguments: Any, cwd: Path | None = None, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Run the command in a new process, as a user does."""
    command = [sys.executable, "-c", "from nanoskyrl_cli.main import main; main()", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env={**os.environ, **(env or {})}, check=False
    )


def skyrl_here(*arguments: Any, stderr: TextIO | None = None) -> subprocess.CompletedProcess:
    """Run the command in this process: what it says is the same, and half a second to five of imports are saved."""
    from nanoskyrl_cli.main import run

    words, out, err = [str(argument) for argument in arguments], io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(stderr or err):
        code = run(words)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def as_flags(settings: dict[str, dict[str, Any]]) -> list[str]:
    """Return settings as `--set` flags."""
    return [
        flag
        for table, keys in settings.items()
        for key, value in keys.items()
        for flag in ("--set", f"{table}.{key}={value}")
    ]


def same_bytes(a: Path, b: Path) -> list[str]:
    """Return the names of files that differ between two runs; clocks, logs, settings files and pruned states aside."""
    aside = {"metrics.jsonl", "run.toml", "resolved.json", "train.log"}

    def files(root: Path) -> dict[str, bytes]:
        found = (path for path in root.rglob("*") if path.is_file() and path.name not in aside)
        return {str(path.relative_to(root)): path.read_bytes() for path in found if path.parent.name != "state"}

    left, right = files(a), files(b)
    return sorted(name for name in {*left, *right} if left.get(name) != right.get(name))


def manifests(root: Path | str) -> dict[str, bytes]:
    """Return the bytes of every manifest of a run and every file of its policies, by where they lie."""
    root = as_path(root)
    found = [*root.glob(f"step-*/*/{MANIFEST}"), *root.glob("policies/*/*"), *root.glob(f"evals/*/*/{MANIFEST}")]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in found if path.is_file()}


def differing_rows(a: Run, b: Run, steps: int) -> list[str]:
    """Return which rows of rollouts differ between two runs: tokens at all, log-probs by 1e-5."""
    found = []
    for step in range(steps):
        rows = []
        for run in (a, b):
            place = run.stage(step, "rollout")
            rows.append([row for part in read_parts(place, read_manifest(place)) for row in part.to_pylist()])
        if len(rows[0]) != len(rows[1]):
            found.append(f"step {step} has {len(rows[1])} rows, not {len(rows[0])}")
        for one, other in zip(*rows, strict=False):
            nats = [np.array(row["rollout_logprobs"], float) for row in (one, other)]
            same = (one["trajectory_id"], one["response_ids"]) == (other["trajectory_id"], other["response_ids"])
            if not same or np.abs(nats[0] - nats[1]).max(initial=0.0) >= 1e-5:
                found.append(f"step {step}: trajectory {other['trajectory_id']} differs")
    return found
