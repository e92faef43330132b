"""The loop, the same stages by hand, killed and resumed."""

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import cache

import pytest
from killing import kill_at
from running import ROOT, SMALL, as_flags, same_bytes, skyrl, skyrl_here
from tolerances import LOGITS, PASS, assert_close

from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.errors import ConflictError, InputError, OutputError
from nanoskyrl.stages.core.manifest import is_finished, read_manifest
from nanoskyrl.stages.core.metrics import latest, read_metrics
from nanoskyrl.stages.core.pipeline import STAGES
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.core.storage import locked
from nanoskyrl.stages.looking.export import export
from nanoskyrl.stages.looking.verify import verify
from nanoskyrl.stages.running.loop import loop
from nanoskyrl.stages.running.session import Session


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two steps of the loop, unbroken."""
    root = tmp_path_factory.mktemp("runs") / "whole"
    loop(Run(root), SMALL)
    return root


@pytest.fixture(scope="module")
def lagged(tmp_path_factory):
    """Return four steps of the loop by their lag, each made once."""

    @cache
    def run_of(lag):
        run = Run(tmp_path_factory.mktemp("lagged") / "run")
        loop(run, merge(SMALL, {"run": {"lag": lag}, "loop": {"steps": 4}}))
        return run

    return run_of


def test_stages_by_hand_give_the_bytes_of_the_loop(whole, tmp_path):
    for _ in range(2):
        for stage in STAGES:
            # A session of its own for each stage, as for commands in a shell script.
            getattr(Session(Run(tmp_path / "hand"), SMALL), stage)()
    assert same_bytes(whole, tmp_path / "hand") == []


def test_a_loop_that_is_done_does_nothing_more(whole):
    before = (whole / "metrics.jsonl").read_text().count('"stage": "train"')
    assert loop(Run(whole), SMALL) == 0
    assert (whole / "metrics.jsonl").read_text().count('"stage": "train"') == before


def test_a_longer_loop_goes_on_from_a_shorter_one_with_the_bytes_of_one_unbroken(whole, lagged, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    loop(Run(tmp_path / "run"), merge(SMALL, {"loop": {"steps": 4}}))
    assert same_bytes(tmp_path / "run", lagged(0).root) == []


@pytest.mark.parametrize(
    ("file", "other", "told"),
    [
        ("policies/00000002/model.safetensors", "policies/00000001/model.safetensors", "is not what step 1 trained"),
        ("step-000001/train/state/{}", "step-000000/train/state/{}", "has another digest than its manifest says"),
    ],
)
def test_weights_and_state_that_were_swapped_are_not_trained_on(whole, tmp_path, file, other, told):
    root = tmp_path / "run"
    shutil.copytree(whole, root)
    name = next(path.name for path in (root / "step-000001" / "train" / "state").iterdir())
    (root / file.format(name)).unlink()  # published weights are hard links
    shutil.copyfile(root / other.format(name), root / file.format(name))
    with pytest.raises(InputError, match=told):
        loop(Run(root), merge(SMALL, {"loop": {"steps": 3}}))


def test_damaged_weights_are_refused_before_anything_is_sampled_or_exported(whole, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(whole, root)
    weights = root / "policies" / "00000002" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.unlink()  # published weights are hard links
    weights.write_bytes(data)
    with pytest.raises(InputError, match="is not what step 1 trained"):
        loop(Run(root), merge(SMALL, {"loop": {"steps": 3}}))
    assert not (root / "step-000002" / "rollout").exists()
    with pytest.raises(InputError, match="is not what step 1 trained"):
        export(Run(root), 2, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_other_settings_are_refused_in_a_run_and_named(whole):
    with pytest.raises(ConflictError, match=r"another `train\.lr`: null, now 0\.5"):
        loop(Run(whole), merge(SMALL, {"train": {"lr": 0.5}}))


def test_another_seed_gives_another_run(whole, tmp_path):
    loop(Run(tmp_path / "other"), merge(SMALL, {"run": {"seed": 1}, "loop": {"steps": 1}}))
    a, b = (read_manifest(root / "step-000000" / "rollout").digest for root in (whole, tmp_path / "other"))
    assert a != b


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_step_k_samples_from_policy_k_minus_lag(lagged, lag):
    run = lagged(lag)
    for step in range(4):
        rollout, train = run.stage(step, "rollout"), run.stage(step, "train")
        versions = {
            v for t in read_parts(rollout, read_manifest(rollout)) for v in t.column("policy_version").to_pylist()
        }
        assert versions == {max(0, step - lag)}
        started_from = read_manifest(train).policy
        assert read_manifest(run.stage(step - 1, "train")).facts["policy"] == started_from if step else True
    assert verify(run.root).holds


def test_lag_changes_what_is_sampled_and_the_distance_to_the_sampler_shows_it(lagged):
    updates = [latest(read_metrics(lagged(lag).metrics), "train")[3] for lag in (0, 2)]
    for update in updates:  # the old policy is the one that the update starts from, at any lag
        assert_close(update["train/ratio/max"], 1.0, PASS, scale=LOGITS)
    on, off = (update["policy/rollout_train_logprobs_abs_diff_mean"] for update in updates)
    assert_close(on, 0.0, PASS, scale=LOGITS)
    assert off > 1e-3


def test_old_optimizer_states_are_pruned_and_verify_says_so(tmp_path):
    run = Run(tmp_path / "run")
    loop(run, merge(SMALL, {"loop": {"steps": 3, "keep_states": 1}}))
    assert [(run.stage(step, "train") / "state").exists() for step in range(3)] == [False, False, True]
    found = verify(run.root)
    assert found.holds
    assert len(found.pruned) == 2


def test_evaluations_lie_beside_the_policies(tmp_path):
    settings = merge(SMALL, {"loop": {"steps": 2, "eval_every": 2}, "eval": {"limit": 8, "n_samples": 2}})
    loop(Run(tmp_path / "run"), settings)
    found = sorted(path.parent.parent.name for path in (tmp_path / "run" / "evals").glob("*/*/_summary.json"))
    assert found == ["00000000", "00000002"]
    summary = json.loads((tmp_path / "run" / "evals" / "00000000" / "text_math" / "_summary.json").read_text())
    assert summary["tasks"] == 8
    assert summary["samples"] == 16
    assert 0 <= summary["pass_at_1"] <= summary["pass_at_2"] <= 1


def test_a_forced_loop_evaluates_again_where_it_goes_on_if_the_settings_are_others(tmp_path):
    settings = merge(SMALL, {"loop": {"steps": 1, "eval_every": 1}, "eval": {"limit": 8}})
    run = Run(tmp_path / "run")
    loop(run, settings)
    summaries = [run.root / "evals" / f"{version:08d}" / "text_math" / "_summary.json" for version in (0, 1, 2)]
    made = summaries[1].stat().st_mtime_ns
    longer = merge(settings, {"loop": {"steps": 2}})
    loop(run, merge(longer, {"rollout": {"temperature": 0.9}}), force=True)
    assert summaries[1].stat().st_mtime_ns == made
    loop(run, merge(longer, {"loop": {"steps": 3}, "eval": {"limit": 16}}), force=True)
    assert [json.loads(file.read_text())["tasks"] for file in summaries] == [8, 8, 16]


@pytest.mark.parametrize("what", ["part", "manifest", "policy"])
def test_verify_finds_one_changed_byte(whole, tmp_path, what):
    shutil.copytree(whole, tmp_path / "run")
    step = tmp_path / "run" / "step-000001"
    path = {
        "part": step / "score" / "part-00000.parquet",
        "manifest": step / "score" / "_manifest.json",
        "policy": tmp_path / "run" / "policies" / "00000001" / "model.safetensors",
    }[what]
    data = bytearray(path.read_bytes())
    place = data.index(b'"rows_in": ') + 11 if what == "manifest" else len(data) // 2
    data[place] = data[place] ^ 1
    path.unlink()  # a published policy shares its file with the train that made it
    path.write_bytes(data)
    assert not verify(tmp_path / "run").holds


@pytest.mark.parametrize(
    "kills",
    [
        [("rollout", 3), ("train", 3)],
        pytest.param([("score", 2), ("advantage", 4), ("sync", 2), ("train", 1)], marks=pytest.mark.slow),
    ],
    ids=["twice", "four times"],
)
def test_a_run_killed_in_every_stage_ends_with_the_bytes_of_an_unbroken_one(whole, tmp_path, kills):
    command = ["loop", "--run", tmp_path / "killed", "--steps", 2, *as_flags({"rollout": SMALL["rollout"]})]
    for stage, count in kills:
        assert kill_at(stage, count, command) == -signal.SIGKILL
        assert not is_finished(tmp_path / "killed" / "step-000001" / "sync")
    done = skyrl_here(*command)
    assert done.returncode == 0, done.stderr
    assert same_bytes(whole, tmp_path / "killed") == []
    assert not list((tmp_path / "killed").rglob("*.tmp"))
    assert verify(tmp_path / "killed").holds


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_example_script_gives_the_bytes_of_the_loop(tmp_path):
    env = {**os.environ, "STEPS": "2", "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    by_hand = subprocess.run(
        [ROOT / "examples" / "by_hand.sh", tmp_path / "hand"], env=env, capture_output=True, text=True, check=False
    )
    assert by_hand.returncode == 0, by_hand.stderr
    looped = skyrl(
        "loop", "--preset", "quickstart", "--steps", 2, "--set", "loop.eval_every=0", "--run", tmp_path / "looped"
    )
    assert looped.returncode == 0, looped.stderr
    assert same_bytes(tmp_path / "hand", tmp_path / "looped") == []


def test_a_second_loop_in_a_run_is_refused_while_the_first_is_at_work(tmp_path):
    with locked(tmp_path / "run"), pytest.raises(OutputError, match=r"another process is writing `.*/run`"):
        loop(Run(tmp_path / "run"), SMALL)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_training_adapters_prints_no_warning_of_the_libraries(tmp_path):
    small = {**SMALL, "loop": {"steps": 1}, "train": {"lora_rank": 2}}
    done = skyrl("loop", "--run", tmp_path / "run", *as_flags(small))
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
