"""What scripts rely on: JSON with output and numbers, quoted lines, completion, names that are nearly right."""

import json
import shutil
import subprocess
import sys

import pytest
from running import ROOT, SMALL, as_flags, skyrl_here

from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.errors import did_you_mean
from nanoskyrl.stages.looking.verify import verify
from nanoskyrl_cli.main import COMMANDS, loaded

TINY = merge(
    SMALL, {"rollout": {"n_samples_per_prompt": 2}, "loop": {"steps": 1, "eval_every": 0}, "eval": {"limit": 4}}
)


@pytest.mark.slow  # seventeen processes, most of which load torch
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("jq") is None, reason="no jq here")
def test_the_script_runs_with_the_environment_of_cron_from_another_folder(tmp_path):
    run = tmp_path / "a run"
    done = subprocess.run(
        ["env", "-i", "PATH=/usr/bin:/bin", ROOT / "examples" / "cron.sh", sys.executable, run, *as_flags(TINY)],
        cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.rpartition("/")[2] for line in lines[:3]] == ["00000001", "00000002", "00000003"]
    assert lines[3].startswith("success ")
    assert (tmp_path / "a run" / "policies" / "00000003-exported" / "model.safetensors").is_file()
    assert f"Next: skyrl score --run '{run}'" in done.stderr
    found = verify(run)
    assert (found.broken, found.notes, found.unfinished) == ([], [], [])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one step, made with the flags of the stages."""
    place = tmp_path_factory.mktemp("scripts") / "run"
    done = skyrl_here(
        "loop", "--run", place, "--steps", 1, "--train-batch-size", 4, "--n-samples-per-prompt", 4, "--lr", 1e-3,
        "--max-generate-length", 32, "--temperature", 0.9, "--engine", "hf", "--reward", "env=2", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (place / "told.json").write_text(done.stdout)
    return place


def test_loop_takes_the_main_flags_of_its_stages_and_tells_its_numbers(run):
    told = json.loads((run / "told.json").read_text())
    assert told["output"] == str(run)
    assert told["numbers"]["steps"]["0"]["train"]["train/lr"] == 1e-3
    settings = {one["name"]: one["value"] for one in json.loads(skyrl_here("settings", run, "--json").stdout)}
    assert settings["rollout.temperature"] == 0.9
    assert settings["score.rewards"] == {"env": 2.0}


def test_commands_that_are_no_stages_tell_output_and_numbers(run, tmp_path):
    def told(*arguments):
        done = skyrl_here(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert told("init", "--run", tmp_path / "new")["output"] == str(tmp_path / "new" / "run.toml")
    assert told("export", run, "--to", tmp_path / "out") == {"output": str(tmp_path / "out"), "numbers": {"policy": 1}}
    assert set(told("compare", "--run", run, "--algos", "grpo,sapo")["numbers"]) == {"grpo", "sapo"}
    row = told("show", run / "step-000000" / "advantage", "--row", -1)
    assert len(row["advantages"]) == len(row["response_ids"]) or row["advantages"] is None
    assert skyrl_here("show", run / "step-000000" / "score", "--row", 99, "--json").returncode == 2


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("lo", "loop"), ("loop --max-ge", "--max-generate-length"), ("verify --re", "--rerun"), ("rollout --tem", "--temperature")],
)  # fmt: skip
def test_the_shell_completes_commands_and_options(typed, offered):
    words = f"skyrl {typed}"
    env = {"_SKYRL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run([sys.executable, "-m", "nanoskyrl_cli"], env=env, capture_output=True, text=True, check=False)
    assert offered in done.stdout.split()


@pytest.mark.parametrize("how", [["-m", "nanoskyrl_cli", "-V"], ["-m", "nanoskyrl_cli", "--version"]])
def test_the_version_is_told(how):
    from importlib.metadata import version

    done = subprocess.run([sys.executable, *how], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == version("nanoskyrl")


@pytest.mark.parametrize(
    ("written", "meant"),
    [("gpro", "grpo"), ("saop", "sapo"), ("rlo", "rloo"), ("disco", None), ("GRPO", "grpo"), ("dpao", "dapo")],
)
def test_exchanged_letters_are_one_mistake(written, meant):
    known = ("ppo", "grpo", "sapo", "gspo", "dapo", "rloo")
    assert did_you_mean(written, known) == (meant and f"Did you mean `{meant}`?")


def test_a_file_in_place_of_a_module_is_explained(tmp_path):
    done = skyrl_here("score", "--run", tmp_path, "--reward", "here/my_rewards.py:short=0.5")
    assert done.returncode == 2
    assert "Write `my_rewards:short`" in done.stderr


@pytest.mark.parametrize("name", [name for name, *_ in COMMANDS])
def test_a_narrow_terminal_shows_every_option_whole(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    shown = skyrl_here(name, "--help").stdout
    assert all(option in shown for param in loaded(name).params for option in param.opts if option.startswith("-"))
    assert max(map(len, shown.splitlines())) <= 62


def test_help_tells_the_defaults_of_settings(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = skyrl_here("rollout", "--help").stdout
    assert "Prompts in the step. Default 16." in shown
    assert "Default 1.0." in next(line for line in shown.splitlines() if "--temperature" in line)
