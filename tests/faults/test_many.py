"""Many at once: 200,000 trajectories through score and advantage, and 10,000 environments side by side."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, resource, sys, time
from pathlib import Path
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.running.session import Session
settings, stages = json.loads(sys.argv[2]), sys.argv[3].split(",")
found = {}
for stage in stages:
    session, began = Session(Run(Path(sys.argv[1])), settings), time.perf_counter()
    manifest = getattr(session, stage)(0).manifest
    found[stage] = {
        "rows": manifest.rows_out, "dropped": sum(manifest.dropped.values()), "seconds": round(time.perf_counter() - began),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }
print(json.dumps(found))
"""


def done(folder, rollout, stages):
    """Return rows, seconds and the largest memory after each stage, in a process of its own."""
    command = [sys.executable, "-c", PROGRAM, str(folder / "run"), json.dumps({"rollout": rollout}), stages]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    print(found)
    return found


@pytest.mark.long
def test_200_000_trajectories_are_scored_and_estimated(tmp_path):
    rollout = {"engine": "scripted", "train_batch_size": 6250, "n_samples_per_prompt": 32, "rows_per_part": 4096}
    found = done(tmp_path, rollout, "rollout,score,advantage")
    assert [stage["rows"] for stage in found.values()] == [200_000] * 3
    assert found["score"]["dropped"] == 0
    assert found["advantage"]["peak_mb"] < 8192


@pytest.mark.long
def test_10_000_environments_are_played_at_once(tmp_path):
    # All rows of a part are played together, turn by turn.
    rollout = {
        "engine": "hf", "env": "tool_use", "train_batch_size": 625, "n_samples_per_prompt": 16, "rows_per_part": 10_000,
        "max_generate_length": 2, "max_turns": 2,
    }  # fmt: skip
    found = done(tmp_path, rollout, "rollout")
    assert found["rollout"]["rows"] == 10_000
    assert found["rollout"]["peak_mb"] < 8192
