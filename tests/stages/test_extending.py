"""What docs/extending.md says, done."""

import sys

import pytest
from running import ROOT

from nanoskyrl_cli.main import run as skyrl


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
    for name in ("guess_env", "my_rewards"):
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
    from nanoskyrl.stages.manifest import read_manifest

    assert read_manifest(here / "runs" / "default" / "step-000001" / "train").settings["train"]["algo"] == "sapo"


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
