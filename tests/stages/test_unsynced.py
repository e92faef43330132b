"""Continuing in a run with other settings, when it is steps ahead: what is made again, and what stays."""

import shutil

import pytest
from running import SMALL, same_bytes

from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.errors import NanoskyrlError
from nanoskyrl.stages.core.manifest import read_manifest
from nanoskyrl.stages.core.pipeline import STAGES
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.running.loop import loop
from nanoskyrl.stages.running.outdated_outputs import outdated
from nanoskyrl.stages.running.run_settings import settings_for
from nanoskyrl.stages.running.session import Session

LAGGED = merge(SMALL, {"run": {"lag": 1}, "loop": {"steps": 1}})
MADE = ("rollout", "score", "advantage", "train")
APART = {"loop": {"gpus_generate": "cpu", "gpus_train": "cpu"}}
COOLER = {"rollout": {"temperature": 0.9}, "loop": {"steps": 3}}


@pytest.fixture(scope="module")
def ahead(tmp_path_factory):
    """One step that is synced, and two that are trained and not synced, the second on a policy not published yet."""
    run = Run(tmp_path_factory.mktemp("runs") / "ahead")
    loop(run, LAGGED)
    session = Session(run, LAGGED, keep_up=True, ahead=True)
    for step in (1, 2):
        for stage in MADE:
            getattr(session, stage)(step)
    return run


def contents(run):
    return {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("changed", "processes", "firsts"),
    [
        ({}, 1, (None, None)),
        ({"train": {"lr": 1e-3}}, 1, ("train", "advantage")),
        ({"advantage": {"singleton": "drop"}}, 1, ("advantage", "advantage")),
        ({"text_math": {"format_weight": 0.5}}, 1, ("rollout", "rollout")),
        ({"rollout": {"temperature": 0.9}}, 1, ("rollout", "rollout")),
        ({"run": {"lag": 0}}, 1, ("rollout", "rollout")),
        ({}, 2, ("train", "advantage")),
    ],
)
def test_what_other_settings_would_not_give_is_outdated_and_the_rest_is_not(changed, processes, firsts, ahead):
    before = contents(ahead)
    wanted = [
        ahead.stage(step, stage)
        for step, first in zip((1, 2), firsts, strict=True)
        if first
        for stage in MADE[MADE.index(first) :]
    ]
    assert outdated(Session(ahead, merge(LAGGED, changed)), 1, processes) == wanted
    assert contents(ahead) == before


@pytest.fixture(scope="module")
def cooler(ahead, tmp_path_factory):
    """The same run after a forced loop under other settings, one stage after the other."""
    run = Run(tmp_path_factory.mktemp("runs") / "turns")
    shutil.copytree(ahead.root, run.root)
    assert loop(run, merge(LAGGED, COOLER), force=True) == 2
    return run


def test_a_forced_loop_makes_again_what_is_ahead(cooler):
    assert settings_for(cooler)["rollout"]["temperature"] == 0.9
    made = [read_manifest(cooler.stage(step, "rollout")).settings["rollout"]["temperature"] for step in range(3)]
    assert made == [1.0, 0.9, 0.9]


@pytest.mark.slow
def test_a_forced_loop_makes_the_same_again_beside_its_trainer(ahead, cooler, tmp_path):
    shutil.copytree(ahead.root, tmp_path / "apart")
    assert loop(Run(tmp_path / "apart"), merge(LAGGED, COOLER, APART), force=True) == 2
    assert settings_for(Run(tmp_path / "apart"))["rollout"]["temperature"] == 0.9
    assert same_bytes(cooler.root, tmp_path / "apart") == []


def test_a_forced_loop_keeps_what_was_made_under_the_same_settings(ahead, tmp_path):
    shutil.copytree(ahead.root, tmp_path / "run")
    run = Run(tmp_path / "run")
    kept = [run.stage(step, stage) / "_manifest.json" for step in (1, 2) for stage in STAGES[:-1]]
    before = [(file.read_bytes(), file.stat().st_mtime_ns) for file in kept]
    assert loop(run, merge(LAGGED, {"loop": {"steps": 3}}), force=True) == 2
    assert [(file.read_bytes(), file.stat().st_mtime_ns) for file in kept] == before


@pytest.mark.parametrize(
    "refused", [{"rollout": {"train_batch_size": 9000}}, {"score": {"rewards": {"json:reward": 1.0}}}]
)
def test_a_forced_loop_that_is_refused_changes_nothing(refused, ahead):
    before = contents(ahead)
    with pytest.raises(NanoskyrlError, match=r"tasks|json"):
        loop(ahead, merge(LAGGED, {"loop": {"steps": 3}}, refused), force=True)
    assert contents(ahead) == before
