"""A run that the last commit of schema 1 made: shown, verified, continued, and the same as one of today."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from running import ROOT, as_flags, skyrl

from nanoskyrl.stages.core.manifest import is_finished, read_manifest
from nanoskyrl.stages.core.pipeline import STAGES
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.models.policy import STARTER_DIRECTORY

LAST = "306e4ba"
"""The commit whose code makes the run."""
SETTINGS = {
    "rollout": {"train_batch_size": 4, "n_samples_per_prompt": 4, "max_generate_length": 32, "rows_per_part": 4},
    "train": {"lora_rank": 8, "lr": 1e-3},
    "eval": {"limit": 8},
    "loop": {"eval_every": 1, "steps": 2},
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """Return the run: two steps of LoRA with evaluations, and a rollout that was killed behind its first part."""
    top = tmp_path_factory.mktemp("schema-1")
    archive = subprocess.run(["git", "archive", LAST], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"commit {LAST} is not in this clone")
    (top / "code").mkdir()
    subprocess.run(["tar", "x"], input=archive.stdout, cwd=top / "code", check=True)
    (top / "path" / "nanoskyrl").mkdir(parents=True)
    for name in ("stages", "envs", "algos", "eval"):
        (top / "path" / "nanoskyrl" / name).symlink_to(top / "code" / name)
    (top / "path" / "nanoskyrl_cli").symlink_to(top / "code" / "nanoskyrl_cli")
    # Found before what is installed, and elsewhere than here, where a package of today lies.
    place: dict[str, Any] = {"env": {**os.environ, "PYTHONPATH": str(top / "path")}, "cwd": top}
    command = [sys.executable, "-c", "from nanoskyrl_cli.main import main; main()"]
    subprocess.run([*command, "loop", "--run", top / "run", *as_flags(SETTINGS)], **place, check=True)
    part = Run(top / "run").stage(2, "rollout") / "part-00000.parquet"
    with subprocess.Popen([*command, "rollout", "--run", top / "run"], **place) as killed:
        while not part.exists():
            assert killed.poll() is None
            time.sleep(0.001)
        killed.send_signal(signal.SIGKILL)
    assert (part.parent / "started.json").is_file()
    assert read_manifest(Run(top / "run").stage(0, "rollout")).schema_version == 1
    return top / "run"


def test_it_is_shown_and_verified(old):
    shown = skyrl("show", old)
    assert shown.returncode == 0, shown.stderr
    assert "held-out text_math, policy 2" in shown.stdout
    assert skyrl("show", old / "step-000001" / "advantage").returncode == 0
    proved = skyrl("verify", old)
    assert proved.returncode == 0, proved.stderr
    assert "0 broken" in proved.stderr
    assert "made by other code" in proved.stderr


def test_it_is_continued_and_what_was_killed_is_begun_again(old, tmp_path):
    shutil.copytree(old, tmp_path / "run")
    run = Run(tmp_path / "run")
    before = {
        path: path.read_bytes() for path in run.step(1).rglob("*") if path.is_file() and "state" not in path.parts
    }
    done = skyrl("loop", "--run", run.root, "--steps", 3, "--set", "loop.eval_every=1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("was made by other code, it is begun again: `nanoskyrl` changed since") == 1
    assert {path: path.read_bytes() for path in before} == before
    assert all(is_finished(run.stage(2, stage)) for stage in STAGES)
    assert read_manifest(run.stage(2, "rollout")).schema_version == 2
    proved = skyrl("verify", run.root)
    assert (proved.returncode, "0 broken" in proved.stderr) == (0, True), proved.stderr


def test_a_run_of_today_holds_the_same_but_for_the_name_of_a_column(old, tmp_path):
    # That code computed a group's prompt once for each of its rows, which rounds otherwise.
    made = skyrl("loop", "--run", tmp_path / "new", *as_flags(SETTINGS), "--set", "train.share_prefixes=false")
    assert made.returncode == 0, made.stderr
    shutil.copytree(old, tmp_path / "old")
    # That code wrote an adapter's layers in an order of its process, so later digests differ from run to run.
    config = Run(tmp_path / "old").stage(0, "train") / "policy" / "adapter_config.json"
    adapter = json.loads(config.read_text())
    changed = {"base_model_name_or_path": str(STARTER_DIRECTORY), "target_modules": sorted(adapter["target_modules"])}
    config.write_text(json.dumps({**adapter, **changed}, indent=2))
    info = config.with_name("policy.json")
    info.write_text(json.dumps({**json.loads(info.read_text()), "merged": None}, sort_keys=True) + "\n")
    steps = [Run(tmp_path / name).step(0) for name in ("old", "new")]
    compare = [sys.executable, ROOT / "benchmarks" / "same_columns.py", *steps]
    compared = subprocess.run(compare, capture_output=True, text=True, check=False)
    assert compared.returncode == 0, compared.stdout + compared.stderr
