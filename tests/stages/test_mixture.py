"""Several environments in one run: drawn by weight, played and scored by their own, learnt from within each."""

import shlex
import shutil
import signal
import sys
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from killing import kill_at
from outputs import add_advantages
from running import ROOT, SMALL, as_flags, same_bytes, skyrl_here

from nanoskyrl.stages.core.config import merge, parse_set
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.manifest import read_manifest
from nanoskyrl.stages.core.metrics import latest, read_metrics
from nanoskyrl.stages.core.rows import row_arrays
from nanoskyrl.stages.core.runs import EVALUATIONS, Run
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.engines.rollout_config import RolloutConfig
from nanoskyrl.stages.engines.task_order import drawn
from nanoskyrl.stages.learning.advantage_config import AdvantageConfig
from nanoskyrl.stages.looking.curve import curve, report_line
from nanoskyrl.stages.looking.verify import verify
from nanoskyrl.stages.rollout import environment_and_tasks
from nanoskyrl.stages.running.loop import loop, step_numbers

MIXED = merge(
    SMALL,
    {
        "rollout": {"env": {"text_math": 1.0, "tool_use": 2.0}, "train_batch_size": 6, "max_turns": 2},
        "train": {"lr": 1e-3},
        "eval": {"limit": 4},
        "loop": {"steps": 2, "eval_every": 2},
    },
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs") / "whole"
    loop(Run(root), MIXED)
    return root


def rows(directory):
    return [row for table in read_parts(directory, read_manifest(directory)) for row in table.to_pylist()]


def test_prompts_are_drawn_by_weight_and_none_comes_twice_before_all_have():
    weights = {"tool_use": 2.0, "text_math": 1.0}
    steps = [drawn(weights, 3, "train", step, 60) for step in range(20)]
    names = [name for draws, _ in steps for name in draws]
    assert Counter(names)["tool_use"] / len(names) == pytest.approx(2 / 3, abs=0.05)
    for step, (_, before) in enumerate(steps):
        assert before == Counter(names[: 60 * step])
    assert drawn(weights, 4, "train", 0, 60)[0] != steps[0][0]
    seen = []
    for step in range(4):
        config = RolloutConfig(env=weights, train_batch_size=30, step=step, seed=3)
        _, tasks = environment_and_tasks(config, {})
        seen += [(task.env, task.task_id) for task in tasks]
    assert len(set(seen)) == len(seen)


def test_one_environment_with_a_weight_poses_what_it_poses_alone():
    alone, mixed = (
        environment_and_tasks(RolloutConfig(env=env, train_batch_size=8, step=2), {})[1]
        for env in ("text_math", {"text_math": 3.0})
    )
    assert [task.task_id for task in alone] == [task.task_id for task in mixed]


def test_each_row_is_played_and_scored_by_its_own_environment(whole):
    found = rows(Run(whole).stage(0, "score"))
    by_env = Counter(row["env"] for row in found)
    assert set(by_env) == {"text_math", "tool_use"}
    assert {row["score_status"] for row in found} == {"scored"}
    for row in found:
        assert ("calculator" in row["prompt"]) is (row["env"] == "tool_use")
    assert verify(whole).holds


def test_curves_and_evaluations_are_by_environment(whole):
    run = Run(whole)
    scores = latest(read_metrics(run.metrics), "score")
    found = rows(run.stage(1, "score"))
    for env in ("text_math", "tool_use"):
        own = [float(row["success"]) for row in found if row["env"] == env]
        assert scores[1][f"reward/{env}/success"] == pytest.approx(sum(own) / len(own))
        assert f"reward/{env}/variance_per_prompt" in scores[1]
    plotted = curve(run)
    for env in ("text_math", "tool_use"):
        assert (run.root / EVALUATIONS / "00000002" / env / "_manifest.json").is_file()
        assert f"held-out {env}, policy 2" in plotted
        assert plotted.count(env) > 2  # its line in the plot, too
        assert f"  {env} " in report_line(1, step_numbers(run, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "count"), [("rollout", 3), ("score", 2), ("train", 2)])
def test_a_run_that_was_killed_ends_with_the_same_bytes(whole, stage, count, tmp_path):
    env = {**MIXED, "rollout": {**MIXED["rollout"], "env": "{ text_math = 1.0, tool_use = 2.0 }"}}
    killed = kill_at(stage, count, ["loop", "--run", tmp_path / "run", *as_flags(env)])
    assert killed == -signal.SIGKILL
    loop(Run(tmp_path / "run"), MIXED)
    assert same_bytes(whole, tmp_path / "run") == []


@pytest.mark.slow
def test_a_run_that_stopped_between_steps_goes_on_with_the_same_bytes(whole, tmp_path):
    root = tmp_path / "run"
    loop(Run(root), merge(MIXED, {"loop": {"steps": 1, "eval_every": 2}}))
    shutil.rmtree(root / EVALUATIONS / "00000001")  # the last policy is evaluated in any case
    loop(Run(root), MIXED)
    assert same_bytes(whole, root) == []


@pytest.mark.slow
def test_one_of_two_environments_takes_its_tools_from_a_server(tmp_path):
    pytest.importorskip("mcp")
    server = f"{shlex.quote(sys.executable)} {shlex.quote(str(ROOT / 'tests' / 'mcp_server.py'))}"
    run = Run(tmp_path / "run")
    loop(run, merge(MIXED, {"tool_use": {"mcp": (server,), "tools": ("calculator",), "mcp_timeout_seconds": 120}}))
    for step in (0, 1):
        found = rows(run.stage(step, "score"))
        assert {row["env"] for row in found} == {"text_math", "tool_use"}
        assert {row["score_status"] for row in found} == {"scored"}
        offered = {row["env"]: row["prompt"] for row in found}
        assert "read_note" in offered["tool_use"]
        assert "read_note" not in offered["text_math"]
    scores = latest(read_metrics(run.metrics), "score")
    assert all(f"reward/{env}/success" in scores[1] for env in ("text_math", "tool_use"))
    assert all(f"held-out {env}, policy 2" in curve(run) for env in ("text_math", "tool_use"))
    assert verify(run.root).holds


@pytest.mark.parametrize("name", ["batch_std", "reinforce_pp", "grpo"])
def test_statistics_of_a_batch_are_taken_within_an_environment(whole, name):
    """Rewards of one environment, made ten times as large, move no advantage of another."""
    place = Run(whole).stage(0, "score")
    scored = pa.concat_tables(read_parts(place, read_manifest(place)))
    envs = scored.column("env").to_pylist()

    def advantages(scale):
        random = np.random.default_rng(0)
        rewards = [random.random() * (scale if env == "tool_use" else 1) for env in envs]
        column = scored.column_names.index("reward")
        table = scored.set_column(column, scored.field(column), pa.array(rewards))
        found = row_arrays(add_advantages(table, AdvantageConfig(estimator=name)).column("advantages"))
        return {env: np.concatenate([row for row, of in zip(found, envs, strict=True) if of == env]) for env in envs}

    one, ten = advantages(1), advantages(10)
    np.testing.assert_array_equal(one["text_math"], ten["text_math"])
    assert np.abs(one["text_math"]).max() > 0


def test_a_flag_names_several_by_weight(tmp_path):
    run = tmp_path / "run"
    asked = ("--env", "text_math=1,tool_use=2", "--train-batch-size", 6, "--n-samples-per-prompt", 1)
    done = skyrl_here("rollout", "--run", run, *asked, "--engine", "scripted")
    assert done.returncode == 0, done.stderr
    assert skyrl_here("score", "--run", run).returncode == 0
    assert read_manifest(Run(run).stage(0, "rollout")).settings["rollout"]["env"] == {"text_math": 1.0, "tool_use": 2.0}
    assert {row["reward"] for row in rows(Run(run).stage(0, "score"))} == {1.0}
    assert parse_set("rollout.env={ text_math = 1, tool_use = 2 }")["rollout"]["env"] == {"text_math": 1, "tool_use": 2}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--env", "text_math=1,tool_us=2"), "unknown env `tool_us`"),
        (("--env", "text_math=0,tool_use=2"), "the weight of environment `text_math` must be above 0"),
        (("--env", "text_math=many,tool_use=2"), "has no number after the sign"),
        (("--env", "text_math=1,tool_use=2", "--tasks", "a"), "names tasks, and `rollout.env` several environments"),
        (("--env", "text_math=1,tool_use=2", "--tools", "search"), "the run has several environments, and `tools`"),
    ],
)
def test_mixtures_that_cannot_be_meant_are_refused(arguments, says, tmp_path):
    done = skyrl_here("rollout", "--run", tmp_path / "run", *arguments)
    assert done.returncode == 2
    assert says in done.stderr


def test_a_mixture_of_nothing_is_refused():
    with pytest.raises(SettingsError, match=r"`rollout.env` is empty"):
        RolloutConfig(env={})
