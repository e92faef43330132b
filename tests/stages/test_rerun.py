"""`verify --rerun`: what is equal when it is made again, which code is asked for first, and the first difference."""

import shutil
from pathlib import Path

import pytest
import torch
from falsified import edit_part, relink, with_value
from running import SMALL, skyrl_here
from safetensors.torch import save_file

from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.manifest import Manifest
from nanoskyrl.stages.looking.proof.differences import difference
from nanoskyrl.stages.looking.proof.rerun import ranges
from nanoskyrl.stages.looking.verify import verify
from nanoskyrl.stages.running.interface import open_run

REWARDS = """
from pathlib import Path
(Path(__file__).parent / "imported").touch()

def short(completions, **kwargs):
    return [1.0 / (1 + len(text)) for text in completions]
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A folder with a run of two steps whose reward is the user's."""
    here = tmp_path_factory.mktemp("rerun")
    (here / "rerun_rewards.py").write_text(REWARDS)
    settings = merge(
        SMALL,
        {
            "score": {"rewards": {"rerun_rewards:short": 1.0}},
            "run": {"folders": [str(here)], "stages": ["filter"]},
            "filter": {"drop": {"long": "completion_tokens > 30"}},
        },
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(here))
        with open_run(here / "run", settings) as run:
            run.loop()
    return here


def test_all_that_is_made_again_is_equal(lab):
    done = skyrl_here("verify", lab / "run", "--rerun", "--yes")
    assert done.returncode == 0, done.stderr
    for line in (
        "rollout of steps 0 to 1", "score of steps 0 to 1", "filter of steps 0 to 1", "advantage of steps 0 to 1",
        f"train of steps 0 to 1, from {lab / 'run' / 'policies' / '00000000'}",
    ):  # fmt: skip
        assert f"made again, and equal: {line}" in done.stderr


def test_code_that_the_run_names_is_listed_and_runs_only_when_somebody_says_so(lab, tmp_path):
    shutil.copytree(lab, tmp_path / "lab")
    (tmp_path / "lab" / "imported").unlink()
    skyrl_here("set", tmp_path / "lab" / "run", f"run.folders=['{tmp_path / 'lab'}']")
    assert skyrl_here("verify", tmp_path / "lab" / "run").returncode == 0
    refused = skyrl_here("verify", tmp_path / "lab" / "run", "--rerun")
    assert refused.returncode == 2
    assert "rerun_rewards:short" in refused.stderr
    assert "--yes" in refused.stderr
    assert not (tmp_path / "lab" / "imported").exists()


def changed_logprob(table):
    row = with_value_in(table.column("rollout_logprobs")[3].as_py(), 1, -9.5)
    return with_value(table, "rollout_logprobs", 3, row)


def with_value_in(values, place, value):
    return [*values[:place], value, *values[place + 1 :]]


@pytest.mark.parametrize(
    ("stage", "change", "named"),
    [
        ("score", lambda table: with_value(table, "reward", 2, 7.0), "column `reward`, row 2: 7.0 -> "),
        ("rollout", changed_logprob, "column `rollout_logprobs`, row 3: token 1 of "),
        (
            "advantage",
            lambda table: with_value(table, "drop_reason", 1, "overlong"),
            "column `drop_reason`, row 1: overlong -> null",
        ),
    ],
)
def test_the_first_difference_is_named(lab, tmp_path, stage, change, named):
    run = tmp_path / "run"
    shutil.copytree(lab / "run", run)
    edit_part(run / "step-000001" / stage, change)
    relink(run)
    done = skyrl_here("verify", "--rerun", stage, run, "--yes")
    assert done.returncode == 1
    assert f"{run / 'step-000001' / stage}, made again: {named}" in done.stderr


def test_one_train_begins_from_the_state_before_it_and_says_so_where_that_was_pruned(lab, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(lab / "run", run)
    done = skyrl_here("verify", run / "step-000001" / "train", "--rerun", "--yes")
    assert done.returncode == 0, done.stderr
    assert "train of step 1, from the state that step 0 left" in done.stderr
    shutil.rmtree(run / "step-000000" / "train" / "state")
    done = skyrl_here("verify", run / "step-000001" / "train", "--rerun", "--yes")
    assert done.returncode == 3
    assert "not made again: step 1: train: the optimizer's state before it was pruned" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--rerun", "scores"], "no `scores` that can be made again"),
        (["score"], "`score` goes with `--rerun`"),
        (["--yes"], "`--yes` goes with `--rerun`"),
    ],
)
def test_what_cannot_be_made_again_is_refused(lab, arguments, told):
    done = skyrl_here("verify", lab / "run", *arguments)
    assert done.returncode == 2
    assert told in done.stderr


def test_weights_differ_first_in_a_tensor_and_its_element(tmp_path):
    manifests = []
    for name, value in (("then", 2.0), ("now", 2.5)):
        (tmp_path / name / "policy").mkdir(parents=True)
        tensors = {"a": torch.ones(2), "b": torch.tensor([[1.0, 3.0], [value, 4.0]])}
        save_file(tensors, tmp_path / name / "policy" / "model.safetensors")
        manifests.append(
            Manifest(
                stage="train", schema_version=2, settings={}, inputs={}, policy=None, code={}, packages={}, parts=(),
                rows_in=0, rows_out=0, dropped={}, files={"policy/model.safetensors": name},
            )
        )  # fmt: skip
    found = difference(tmp_path / "then", manifests[0], tmp_path / "now", manifests[1])
    assert found == "`policy/model.safetensors`, tensor `b`, element 2: 2.0 was recorded, and 2.5 comes out"
    assert difference(tmp_path / "then", manifests[0], tmp_path / "then", manifests[0]) is None


def test_steps_are_told_as_ranges():
    assert ranges([5]) == "step 5"
    assert ranges([0, 1, 2, 5, 7, 8]) == "steps 0 to 2, 5, 7 to 8"


def test_plain_verify_imports_no_code_of_the_run(lab, monkeypatch):
    (lab / "imported").unlink(missing_ok=True)
    assert verify(Path(lab / "run")).holds
    assert not (lab / "imported").exists()
