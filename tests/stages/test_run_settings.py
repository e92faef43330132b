"""What a run's `run.toml` says after each kind of command, and that a run works from every folder."""

import json
import os
import shutil
import sys
import tomllib

import pytest
from running import SMALL, as_flags

from nanoskyrl.stages.core.manifest import read_manifest
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.models.policy import STARTER_DIRECTORY
from nanoskyrl.stages.running.loop import loop
from nanoskyrl.stages.running.run_settings import begin_run, kept_settings
from nanoskyrl_cli.main import run as skyrl

TINY = ["--train-batch-size", "2", "--n-samples-per-prompt", "2", "--max-generate-length", "8"]
SCRIPTED = ["--engine", "scripted", "--train-batch-size", "2", "--n-samples-per-prompt", "2"]
REWARDS = "def short(prompts, completions, **rest):\n    return [1.0 for _ in completions]\n"
QUESTIONS = "".join(f'{{"prompt": "What is {i}?", "ground_truth": "{i}"}}\n' for i in range(4))


WRITTEN_HERE = ("rw", "kitchen", "parcels", "parcels.rewards", "vf_home")
"""Modules of tests here; others write some of these names, too."""


def forget_modules():
    for name in WRITTEN_HERE:
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def leaves_no_module():
    before = list(sys.path)
    forget_modules()
    yield
    sys.path[:] = before
    forget_modules()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with one whole step."""
    root = tmp_path_factory.mktemp("finished") / "run"
    loop(Run(root), {**SMALL, "train": {"lr": 1e-4}, "loop": {"steps": 1}})
    return root


@pytest.fixture
def run(finished, tmp_path, monkeypatch):
    """A copy of that run, seen from the folder that it lies in."""
    shutil.copytree(finished, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return Run(tmp_path / "run")


def told(run):
    return tomllib.loads(run.settings_file.read_text()) if run.settings_file.is_file() else None


def fresh(run, stage="advantage"):
    """Take away the outputs of the first step from a stage on, so that it is to be made again."""
    order = ("rollout", "score", "advantage", "train", "sync")
    for name in order[order.index(stage) :]:
        shutil.rmtree(run.stage(0, name), ignore_errors=True)


STAGES_ELSEWHERE = {
    "score": ["score", "run/step-000000/rollout", "--set", "score.timeout_seconds=7"],
    "advantage": ["advantage", "run/step-000000/score", "--estimator", "rloo"],
    "train": ["train", "run/step-000000/advantage", "--lr", "0.5"],
    "train by --set": ["train", "run/step-000000/advantage", "--set", "train.weight_decay=0.5"],
    "sync": ["sync", "run/step-000000/train", "--set", "sync.tolerance=0.5", "--target", "published"],
    "rollout": ["rollout", *SCRIPTED, "--temperature", "0.5"],
    "eval": ["eval", "--engine", "scripted", "--limit", "2", "--temperature", "0.5"],
}


@pytest.mark.parametrize("name", STAGES_ELSEWHERE)
def test_output_elsewhere_writes_nothing_into_the_run(name, run):
    before = run.settings_file.read_bytes()
    assert skyrl([*STAGES_ELSEWHERE[name], "--out", "elsewhere", "--run", "run"]) == 0
    assert run.settings_file.read_bytes() == before
    assert skyrl(["loop", "--run", "run"]) == 0  # it is not said to have begun with others


def test_output_in_the_run_that_is_no_place_of_a_stage_writes_nothing_either(run):
    before = run.settings_file.read_bytes()
    assert (
        skyrl(["advantage", "run/step-000000/score", "--estimator", "rloo", "--out", "run/tried", "--run", "run"]) == 0
    )
    assert run.settings_file.read_bytes() == before


def test_output_elsewhere_begins_no_run(run):
    command = ["score", "run/step-000000/rollout", "--set", "score.timeout_seconds=7", "--out", "elsewhere"]
    assert skyrl([*command, "--run", "new"]) == 0
    assert not os.path.exists("new")


FIRST = {
    "a flag": (["advantage", "--estimator", "rloo"], "advantage", "estimator", "rloo"),
    "--set": (["advantage", "--set", "advantage.eps=1e-4"], "advantage", "eps", 1e-4),
    "--out that names the run's own place": (
        ["advantage", "run/step-000000/score", "--out", "run/step-000000/advantage", "--estimator", "rloo"],
        "advantage", "estimator", "rloo",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FIRST)
def test_what_the_first_command_says_is_kept_and_a_later_flag_holds_for_its_command_alone(name, run, capsys):
    command, table, key, value = FIRST[name]
    fresh(run)
    assert skyrl([*command, "--run", "run"]) == 0
    assert told(run)[table][key] == value
    assert "for this command alone" not in capsys.readouterr().err
    before = run.settings_file.read_bytes()
    fresh(run)
    later = {"estimator": "grpo", "eps": 1e-3}[key]
    assert skyrl(["advantage", "--run", "run", "--set", f"{table}.{key}={later}"]) == 0
    says = capsys.readouterr().err
    assert f"note: for this command alone: {table}.{key} = {later!r} (the run has {value!r})" in says
    assert read_manifest(run.stage(0, "advantage")).settings[table][key] == later
    assert run.settings_file.read_bytes() == before
    fresh(run)
    assert skyrl(["advantage", "--run", "run", "--set", f"{table}.{key}={value}"]) == 0
    assert "for this command alone" not in capsys.readouterr().err


def test_a_file_given_later_holds_for_its_command_alone_too(run, capsys):
    fresh(run, "train")
    (run.root.parent / "hot.toml").write_text("[train]\nlr = 0.01\n")
    assert skyrl(["train", "--config", "hot.toml", "--run", "run"]) == 0
    assert told(run)["train"] == {"lr": 1e-4}
    assert "for this command alone: train.lr = 0.01 (the run has 0.0001)" in capsys.readouterr().err


def test_tasks_and_a_split_are_said_for_one_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["rollout", "--tasks", "addition-1-000003", "--set", "rollout.split=train", *SCRIPTED, "--run", "new"]
    assert skyrl(words) == 0
    assert told(Run(tmp_path / "new"))["rollout"] == {
        "engine": "scripted", "train_batch_size": 2, "n_samples_per_prompt": 2,
    }  # fmt: skip


def test_a_loop_keeps_what_it_was_told_where_a_file_was_there_already(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert skyrl(["init", "--run", "new", *as_flags(SMALL)]) == 0
    assert skyrl(["loop", "--run", "new", "--steps", "1", "--set", "train.lr=1e-5"]) == 0
    assert "loop.steps = 1 (the run has 2)" in capsys.readouterr().err
    assert told(Run(tmp_path / "new"))["train"] == {"lr": 1e-5}
    assert told(Run(tmp_path / "new"))["loop"] == {"steps": 2}
    assert "# Learning" in (text := Run(tmp_path / "new").settings_file.read_text()) or "# None: 2e-4" in text
    assert skyrl(["loop", "--run", "new", "--steps", "1"]) == 0
    assert skyrl(["loop", "--run", "new", "--steps", "1", "--set", "train.lr=1e-6"]) == 2
    assert told(Run(tmp_path / "new"))["train"] == {"lr": 1e-5}
    capsys.readouterr()
    assert skyrl(["loop", "--run", "new", "--steps", "1", "--set", "train.lr=1e-6", "--force"]) == 0
    says = capsys.readouterr().err
    assert told(Run(tmp_path / "new"))["train"] == {"lr": 1e-6}
    assert "has from now on: " in says
    assert "train.lr = 1e-06" in says


# skyrl set, skyrl settings


def test_set_changes_the_file_and_leaves_its_comments(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert skyrl(["init", "--run", "new", "--set", "train.lr=0.1"]) == 0
    before = Run(tmp_path / "new").settings_file.read_text()
    assert skyrl(["set", "new", "train.lr=0.2", "run.lag=1"]) == 0
    says = capsys.readouterr().err
    assert "train.lr = 0.2 (was 0.1)" in says
    assert "run.lag = 1 (was the default)" in says
    after = Run(tmp_path / "new").settings_file.read_text()
    assert sorted(set(after.splitlines()) ^ set(before.splitlines())) == ["lag = 1", "lr = 0.1", "lr = 0.2"]
    assert skyrl(["set", "new", "train.lr=null"]) == 0
    assert "lr" not in told(Run(tmp_path / "new"))["train"]


REFUSED = {
    "a misspelt key": (["train.lrr=1"], "unknown key `train.lrr`"),
    "a value out of range": (["run.lag=-1"], "`run.lag` must be at least 0"),
    "what does not go together": (["rollout.memory=summary", "rollout.trajectory_mode=whole"], "`rollout.memory` is"),
    "what does not go with the file": (["rollout.n_samples_per_prompt=1"], "looks for spread"),
    "no assignment": (["train.lr"], "is not `table.key=value`"),
    "what follows from the run": (["rollout.step=3"], "follows from the run"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_set_leaves_the_file_as_it_was(name, tmp_path, capsys):
    run, (words, message) = Run(tmp_path / "new"), REFUSED[name]
    begin_run(run, {"rollout": {"dynamic_sampling": True}})
    before = run.settings_file.read_bytes()
    assert skyrl(["set", str(run.root), *words]) == 2
    assert message in capsys.readouterr().err
    assert run.settings_file.read_bytes() == before


def test_set_begins_no_run(tmp_path, capsys):
    assert skyrl(["set", str(tmp_path / "typo"), "train.lr=1"]) == 2
    assert "there is no run" in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()


def test_settings_says_what_holds_and_where_it_is_from(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    begin_run(Run(tmp_path / "new"), {"train": {"max_grad_norm": 0.1, "algo": "sapo"}})
    (tmp_path / "more.toml").write_text("[sapo]\ntau_neg = 2.0\n")
    command = ["settings", "new", "--preset", "quickstart", "--config", "more.toml", "--set", "run.lag=1", "--json"]
    assert skyrl(command) == 0
    held = {one["name"]: (one["value"], one["source"]) for one in json.loads(capsys.readouterr().out)}
    assert held["train.max_grad_norm"] == (0.1, "run.toml")
    assert held["train.weight_decay"] == (0.01, "default")
    assert held["sapo.tau_neg"] == (2.0, "more.toml")
    assert held["run.lag"] == (1, "flag")
    assert held["off_policy.kl_coef"][1] == "lag"
    assert {source for _, source in held.values()} == {
        "default", "lag", "run.toml", "preset quickstart", "more.toml", "flag",
    }  # fmt: skip
    assert "rollout.step" not in held
    assert "webshop_lite.n_products" not in held
    assert skyrl(["settings", "new", "--changed"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["train.max_grad_norm", "0.1", "run.toml"], ["train.algo", '"sapo"', "run.toml"],
    ]  # fmt: skip


# From every folder


def project(tmp_path, monkeypatch):
    """Return a folder with data, a policy, rewards and an environment, in which one works."""
    home = tmp_path / "project"
    home.mkdir()
    (home / "qa.jsonl").write_text(QUESTIONS)
    (home / "rw.py").write_text(REWARDS)
    (home / "parcels").mkdir()
    (home / "parcels" / "__init__.py").write_text("")
    (home / "parcels" / "rewards.py").write_text(REWARDS)
    (home / "kitchen.py").write_text(
        "from nanoskyrl.envs.worlds.text_math.environment import TextMath, TextMathConfig\n\n"
        "class Oven(TextMath):\n    Config = TextMathConfig\n"
    )
    shutil.copytree(STARTER_DIRECTORY, home / "merged")
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(home))  # as the command does with the current folder
    return home


KEPT = {
    "data": (["--data", "qa.jsonl"], "text_math", "data", "{home}/qa.jsonl"),
    "data above": (["--data", "../project/./qa.jsonl"], "text_math", "data", "{home}/qa.jsonl"),
    "data by --set": (["--set", "text_math.data=qa.jsonl"], "text_math", "data", "{home}/qa.jsonl"),
    "data at home": (["--set", "text_math.data=$HOME/qa.jsonl"], "text_math", "data", "{home}/qa.jsonl"),
    "data in braces": (["--set", "text_math.data=${HOME}/qa.jsonl"], "text_math", "data", "{home}/qa.jsonl"),
    "data at ~": (["--set", "text_math.data=~/qa.jsonl"], "text_math", "data", "{home}/qa.jsonl"),
    "test data": (["--set", "text_math.test_data=qa.jsonl"], "text_math", "test_data", "{home}/qa.jsonl"),
    "a policy": (["--policy", "./merged"], "run", "policy", "{home}/merged"),
    "a policy by its bare name": (["--policy", "merged"], "run", "policy", "{home}/merged"),
    "the starter": (["--policy", "starter"], "run", "policy", "starter"),
    "a judge's folder": (["--set", "judge.cache=verdicts"], "judge", "cache", "{home}/verdicts"),
    "a command": (
        ["--set", 'tool_use.mcp=["python server.py --port 1"]'], "tool_use", "mcp", ["python server.py --port 1"],
    ),
    "a command's file": (
        ["--set", 'tool_use.mcp=["python rw.py --data=qa.jsonl", "http://a/b"]'],
        "tool_use", "mcp", ["python {home}/rw.py --data={home}/qa.jsonl", "http://a/b"],
    ),
    "a list of words": (
        ["--set", 'fleet.command=["python", "./rw.py"]'], "fleet", "command", ["python", "{home}/rw.py"],
    ),
    "arguments": (
        ["--set", 'verifiers.args={path = "qa.jsonl", split = "merged"}'],
        "verifiers", "args", {"path": "{home}/qa.jsonl", "split": "merged"},
    ),
    "a python": (["--set", "vllm.python=./rw.py"], "vllm", "python", "{home}/rw.py"),
    "a python of the path": (["--set", "vllm.python=python3"], "vllm", "python", "python3"),
    "a hub's": (["--set", "text_math.test_data=hub:a/b"], "text_math", "test_data", "hub:a/b"),
    "a store's": (["--set", "judge.cache=s3://a/b"], "judge", "cache", "s3://a/b"),
    "modules": (["--env", "kitchen:Oven"], "run", "folders", ["{home}"]),
    "a module of a reward": (["--set", 'score.rewards={"rw:short" = 1}'], "run", "folders", ["{home}"]),
    "a module in a package": (["--set", 'score.rewards={"parcels.rewards:short" = 1}'], "run", "folders", ["{home}"]),
    "a module's own name": (["--set", "verifiers.env=rw"], "run", "folders", ["{home}"]),
    "a module of ours": (["--env", "nanoskyrl.envs.worlds.text_math.environment:TextMath"], "run", "folders", None),
    "a module of a package": (["--set", 'tool_use.tools=["json:loads"]'], "run", "folders", None),
}  # fmt: skip


def filled(value, home):
    return json.loads(json.dumps(value).replace("{home}", str(home)))


@pytest.mark.parametrize("how", ["init", "set", "rollout"])
@pytest.mark.parametrize("name", KEPT)
def test_paths_are_kept_whole_and_modules_with_their_folder(name, how, tmp_path, monkeypatch):
    home = project(tmp_path, monkeypatch)
    monkeypatch.setenv("HOME", str(home))
    words, table, key, value = KEPT[name]
    run = Run(home / "runs" / "default")
    if how == "rollout":
        # What is kept does not hang on whether the engine wants it.
        given = [*words, "--set", "rollout.engine=scripted", "--train-batch-size", "2", "--n-samples-per-prompt", "1"]
        assert skyrl(["rollout", *given]) == 0
    else:
        short = {"--data": "text_math.data", "--policy": "run.policy", "--env": "rollout.env"}
        assignment = words[1] if words[0] == "--set" else f"{short[words[0]]}={words[1]}"
        begun = ["init", "--set", assignment] if how == "init" else ["init"]
        assert skyrl(begun) == 0
        if how == "set":
            assert skyrl(["set", "runs/default", assignment]) == 0
    assert told(run).get(table, {}).get(key) == filled(value, home)


def test_a_run_that_was_begun_in_a_folder_goes_on_from_cron_s(tmp_path, monkeypatch):
    home = project(tmp_path, monkeypatch)
    given = ["--env", "kitchen:Oven", "--data", "qa.jsonl", "--policy", "./merged", *TINY]
    assert skyrl(["rollout", *given]) == 0
    assert skyrl(["score", "--reward", "rw:short=0.5", "--reward", "parcels.rewards:short"]) == 0
    run = Run(home / "runs" / "default")
    before = told(run)
    assert before["run"]["folders"] == [str(home)]
    assert before["kitchen:Oven"]["data"] == str(home / "qa.jsonl")
    assert before["run"]["policy"] == str(home / "merged")
    (tmp_path / "cron").mkdir()
    monkeypatch.chdir(tmp_path / "cron")
    sys.path.remove(str(home))
    for name in ("rw", "kitchen", "parcels", "parcels.rewards"):
        sys.modules.pop(name, None)
    (tmp_path / "cron" / "rw.py").write_text("def short(completions, **rest):\n    return [9.0 for _ in completions]\n")
    assert skyrl(["score", "--run", str(run.root)]) == 0  # up to date: the same rewards, not those of the folder
    for stage in ("advantage", "train", "sync", "rollout", "score"):
        assert skyrl([stage, "--run", str(run.root)]) == 0, stage
    assert (
        read_manifest(run.stage(1, "score")).settings["score"] == read_manifest(run.stage(0, "score")).settings["score"]
    )
    assert told(run) == before


def test_a_run_by_a_link_is_the_run(run):
    os.symlink("run", "link")
    fresh(run)
    assert skyrl(["advantage", "--run", "link", "--estimator", "rloo"]) == 0
    assert told(run)["advantage"] == {"estimator": "rloo"}
    target = run.root.parent / "settings.toml"
    run.settings_file.rename(target)
    run.settings_file.symlink_to(target)
    assert skyrl(["set", "link", "run.lag=1"]) == 0
    assert run.settings_file.is_symlink()
    assert told(run)["run"]["lag"] == 1


MOVED = {
    "data": (["--data", "qa.jsonl"], ["rollout"], "qa.jsonl", "text_math.data"),
    "a policy": (["--policy", "merged", "--engine", "hf"], ["rollout"], "merged", "run.policy"),
    "data of an environment of one's own": (
        ["--env", "kitchen:Oven", "--data", "qa.jsonl"], ["rollout"], "qa.jsonl", "kitchen:Oven.data",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVED)
def test_a_moved_run_says_what_it_looked_for_and_where_and_a_set_mends_it(name, tmp_path, monkeypatch, capsys):
    home = project(tmp_path, monkeypatch)
    words, command, file, setting = MOVED[name]
    assert skyrl(["rollout", *SCRIPTED, *words]) == 0
    moved = tmp_path / "moved"
    shutil.copytree(home / "runs" / "default", moved)
    shutil.rmtree(moved / "step-000000")
    shutil.rmtree(moved / "policies", ignore_errors=True)
    (home / file).rename(tmp_path / file)
    monkeypatch.chdir(moved)
    before = told(Run(moved))
    capsys.readouterr()
    assert skyrl([*command, "--run", str(moved)]) == 2
    says = capsys.readouterr().err
    assert f"`{home / file}`" in says
    assert f"`{setting}` in `{moved / 'run.toml'}`" in says
    assert f"skyrl set {moved} {setting}=" in says
    assert told(Run(moved)) == before
    assert skyrl(["set", str(moved), f"{setting}={tmp_path / file}"]) == 0
    assert skyrl([*command, "--run", str(moved)]) == 0


def test_a_module_that_is_gone_is_said_to_have_been_looked_for_in_its_folder(tmp_path, monkeypatch, capsys):
    home = project(tmp_path, monkeypatch)
    assert skyrl(["rollout", *SCRIPTED]) == 0
    assert skyrl(["score", "--reward", "rw:short"]) == 0
    (home / "rw.py").unlink()
    sys.modules.pop("rw")
    assert skyrl(["score", "--force"]) == 2
    says = capsys.readouterr().err
    assert "No module named 'rw'" in says
    assert f"`{home}`" in says
    assert "run.folders" in says


def test_a_relative_path_written_by_hand_counts_from_the_run_then_from_here(tmp_path, monkeypatch, capsys):
    home = project(tmp_path, monkeypatch)
    run = Run(tmp_path / "run")
    begin_run(run, {"text_math": {"data": "qa.jsonl"}})
    assert kept_settings(run)["text_math"]["data"] == str(home / "qa.jsonl")
    shutil.copy(home / "qa.jsonl", run.root)
    assert kept_settings(run)["text_math"]["data"] == str(run.root / "qa.jsonl")
    (run.root / "qa.jsonl").unlink()
    monkeypatch.chdir(tmp_path)
    assert skyrl(["rollout", *SCRIPTED, "--run", "run"]) == 2
    assert f"'qa.jsonl', looked for in `{os.path.relpath(run.root)}` and `{tmp_path}`" in capsys.readouterr().err


def test_a_loop_goes_on_that_an_older_version_began_with_relative_paths(tmp_path, monkeypatch):
    home = project(tmp_path, monkeypatch)
    run = Run(home / "run")
    given = {**SMALL, "run": {"policy": "./merged"}, "text_math": {"data": "qa.jsonl"}}
    given["rollout"] = {**SMALL["rollout"], "train_batch_size": 2, "max_generate_length": 8}
    loop(run, given | {"loop": {"steps": 1}})
    for file in (run.root / "resolved.json", run.settings_file):
        assert str(home) in file.read_text()
        file.write_text(file.read_text().replace(f"{home}/merged", "./merged").replace(f"{home}/", ""))
    assert json.loads((run.root / "resolved.json").read_text())["text_math"]["data"] == "qa.jsonl"
    assert skyrl(["loop", "--run", "run", "--steps", "2", "--policy", "./merged"]) == 0
    assert run.policies() == [0, 1, 2]
