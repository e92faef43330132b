"""What docs/extending.md says, done."""

import json
import re
import shlex
import signal
import sys

import pytest
from killing import SPAWNED, kill_at
from running import ROOT

from nanoskyrl.envs.worlds.tool_use.environment import ToolUse, ToolUseConfig
from nanoskyrl.stages.core.manifest import read_manifest
from nanoskyrl.stages.core.rows import from_table
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.core.storage import as_path
from nanoskyrl_cli.main import run as skyrl

PAGE = (ROOT / "docs" / "extending.md").read_text()
QUICK = ("--set", "rollout.n_samples_per_prompt=2", "--set", "rollout.max_generate_length=8")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder of the user's with modules in it, as the current directory."""
    (tmp_path / "guess_env.py").write_text((ROOT / "examples" / "guess_env.py").read_text())
    (tmp_path / "my_rewards.py").write_text(
        "def short(trajectory):\n    return 1.0 if len(trajectory.turns) < 4 else 0.0\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in (
        "guess_env",
        "my_rewards",
        "my_algo",
        "my_estimator",
        "my_format",
        "broken_format",
        "hotter",
        "my_engine",
        "my_stage",
    ):
        sys.modules.pop(name, None)


def test_an_environment_and_a_reward_in_the_current_directory_are_found(here, capsys):
    assert skyrl(["rollout", "--env", "guess_env:Guess", "--engine", "scripted"]) == 0
    assert skyrl(["score", "--reward", "env", "--reward", "my_rewards:short=0.5"]) == 0
    assert "success 1.000" in capsys.readouterr().err
    assert skyrl(["show", "runs/default/step-000000/score", "--row", "0"]) == 0
    assert "my_rewards:short" in capsys.readouterr().out


def test_the_settings_of_a_plug_in_environment_are_kept_for_later_commands(here, capsys):
    assert (
        skyrl(["rollout", "--env", "guess_env:Guess", "--engine", "scripted", "--set", "guess_env:Guess.n_train=20"])
        == 0
    )
    text = (here / "runs" / "default" / "run.toml").read_text()
    assert 'env = "guess_env:Guess"' in text
    assert "n_train = 20" in text
    assert (
        skyrl(
            [
                "init",
                "--run",
                "runs/other",
                "--set",
                "rollout.env=guess_env:Guess",
                "--set",
                "guess_env:Guess.n_train=20",
            ]
        )
        == 0
    )
    assert "n_train = 20" in (here / "runs" / "other" / "run.toml").read_text()


def test_an_algorithm_chosen_at_the_first_train_is_that_of_the_next_steps(here):
    small = ["--train-batch-size", "2", "--n-samples-per-prompt", "2", "--max-generate-length", "16"]
    assert skyrl(["rollout", *small]) == 0
    for command in (["score"], ["advantage"], ["train", "--algo", "sapo"], ["sync"]):
        assert skyrl(command) == 0
    text = (here / "runs" / "default" / "run.toml").read_text()
    assert 'algo = "sapo"' in text
    for command in (["rollout"], ["score"], ["advantage"], ["train"]):
        assert skyrl(command) == 0
    assert read_manifest(here / "runs" / "default" / "step-000001" / "train").settings["train"]["algo"] == "sapo"


def test_what_an_engine_without_our_policies_sampled_is_not_said_to_be_of_one(here):
    (here / "my_engine.py").write_text(
        "from nanoskyrl.stages.engines.scripted import ScriptedEngine\nclass Mine(ScriptedEngine):\n    pass\n"
    )
    assert skyrl(["rollout", "--engine", "my_engine:Mine", *QUICK]) == 0
    made = here / "runs" / "default" / "step-000000" / "rollout"
    tables = read_parts(made, read_manifest(made))
    assert {digest for table in tables for digest in table.column("policy_digest").to_pylist()} == {None}
    assert skyrl(["eval", "--limit", "2"]) == 0
    assert [path.name for path in (here / "runs" / "default" / "evals").iterdir()] == ["my_engine_Mine"]


def test_settings_are_written_for_runs_behind_a_url_too():
    assert skyrl(["init", "--run", "memory://mine"]) == 0
    assert "[rollout]" in as_path("memory://mine/run.toml").read_text()


def test_a_stage_that_was_killed_goes_on_without_being_told_again(here):
    told = ["--set", "rollout.train_batch_size=4", "--set", "rollout.rows_per_part=2", *QUICK]
    assert (
        kill_at("rollout", 4, ["rollout", *told, "--env", "tool_use", "--engine", "scripted"], context=SPAWNED)
        == -signal.SIGKILL
    )
    assert skyrl(["rollout"]) == 0
    manifest = read_manifest(here / "runs" / "default" / "step-000000" / "rollout")
    assert (manifest.settings["rollout"]["env"], len(manifest.parts)) == ("tool_use", 4)


def test_what_a_stage_was_told_that_did_not_begin_is_not_kept(here):
    assert skyrl(["rollout", *QUICK]) == 0
    file = here / "runs" / "default" / "run.toml"
    before = file.read_bytes()
    assert skyrl(["score", "--reward", "nobody:nothing"]) == 2
    assert file.read_bytes() == before


def test_every_default_in_a_written_settings_file_can_be_uncommented(here):
    import tomllib

    assert skyrl(["init", "--run", "runs/all"]) == 0
    path = here / "runs" / "all" / "run.toml"
    lines = [
        line[2:] if line.startswith("# ") and " = " in line and not line.endswith(".") else line
        for line in path.read_text().splitlines()
    ]
    path.write_text("\n".join(lines))
    assert tomllib.loads(path.read_text())["score"]["rewards"] == {"env": 1.0}
    assert skyrl(["plan", "--run", "runs/all"]) == 0


def test_a_command_that_failed_leaves_no_run_behind(here):
    assert skyrl(["rollout", "--data", "nowhere.jsonl"]) == 2
    assert not (here / "runs").exists()


@pytest.fixture
def of_the_page(here):
    """The files of the page in the current directory, each under the name that it has there."""
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        name = re.match(r"# (\w+\.py)\n", code)[1]
        assert name == "my_rewards.py" or not (here / name).exists()
        (here / name).write_text(code)
    (here / "tasks.jsonl").write_text(re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)[1])
    environments = (ROOT / "docs" / "environments.md").read_text()
    (here / "hotter.py").write_text(re.search(r"```python\n(.*?)```", environments, re.DOTALL)[1])
    return here


def loops():
    """Return the loops of the page as arguments."""
    text = PAGE.replace("\\\n", " ")
    return [shlex.split(line)[1:] for line in re.findall(r"^\$ (skyrl loop .*)$", text, re.MULTILINE)]


@pytest.mark.parametrize("arguments", loops(), ids=["tasks", "environment"])
def test_the_loop_of_the_page_takes_everything_of_the_user_s(of_the_page, arguments):
    assert skyrl([*arguments, *QUICK]) == 0
    run = of_the_page / arguments[arguments.index("--run") + 1]
    trained = read_manifest(run / "step-000001" / "train")
    assert trained.settings["train"]["algo"] == "my_algo:MINE"
    scored = run / "step-000001" / "score"
    parts = [json.loads(p) for t in read_parts(scored, read_manifest(scored)) for p in t["reward_parts"].to_pylist()]
    assert all({"env", "my_rewards:short"} <= part.keys() for part in parts)


def test_the_estimator_of_the_page_takes_the_mean_of_the_group_off(of_the_page):
    small = ["--train-batch-size", "2", "--n-samples-per-prompt", "4", "--max-generate-length", "32"]
    assert skyrl(["rollout", *small]) == 0
    assert skyrl(["score"]) == 0
    commands = re.findall(r"^\$ (skyrl (?:advantage|train) .*)$", PAGE, re.MULTILINE)
    assert [skyrl(shlex.split(command)[1:]) for command in commands] == [0, 0]
    place = of_the_page / "runs" / "default" / "step-000000" / "advantage"
    rows = [row for table in read_parts(place, read_manifest(place)) for row in table.to_pylist()]
    means = {g: sum(r["reward"] for r in rows if r["group_id"] == g) / 4 for g in {r["group_id"] for r in rows}}
    kept = [row for row in rows if row["kept"]]
    assert kept
    for row in kept:
        assert max(row["advantages"], key=abs) == pytest.approx(row["reward"] - means[row["group_id"]])


def test_the_format_of_the_page_is_read_and_one_that_breaks_is_named(of_the_page, capsys):
    (command,) = re.findall(r"^\$ (skyrl rollout .*tool_format.*)$", PAGE, re.MULTILINE)
    assert skyrl([*shlex.split(command)[1:], "--n-samples-per-prompt", "1", "--max-generate-length", "8"]) == 0
    actions = ['[[call calculator {"expression": "2*3"}]]', "<answer>6</answer>"]
    (task,) = ToolUse(ToolUseConfig(n_train=1)).tasks("train")
    (of_the_page / "actions.jsonl").write_text(json.dumps({"task_id": task.task_id, "actions": actions}))
    scripted = ["--engine", "scripted", "--set", "scripted.actions=actions.jsonl", "--tasks", task.task_id]
    words = ["rollout", "--env", "tool_use", "--n-samples-per-prompt", "1", "--set"]
    assert skyrl([*words, "rollout.tool_format=my_format:MINE", *scripted, "--run", "runs/mine"]) == 0
    place = of_the_page / "runs" / "mine" / "step-000000" / "rollout"
    (row,) = [row for table in read_parts(place, read_manifest(place), None) for row in from_table(table)]
    (call,) = row.turns[0].tool_calls
    assert (call.tool, call.args, call.result, call.ok) == ("calculator", {"expression": "2*3"}, "6", True)
    (of_the_page / "broken_format.py").write_text(
        "from nanoskyrl.envs.tool_formats.base import ToolFormat\n"
        "BROKEN = ToolFormat(read=lambda text, tools=(): 1 / 0, write=lambda name, args: name)\n"
    )
    capsys.readouterr()
    assert skyrl([*words, "rollout.tool_format=broken_format:BROKEN", *QUICK, "--run", "runs/broken"]) == 2
    assert "error: a format of tool calls failed: ZeroDivisionError" in capsys.readouterr().err
