"""The page of the Python interface says what happens: its code is run, in order, as a reader would."""

import re
import subprocess
import sys

import pandas as pd
import pytest
from running import ROOT, skyrl_here

from nanoskyrl.stages.core.errors import InputError, Notice, SettingsError
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.running.interface import open_run
from nanoskyrl.stages.running.run_settings import begin_run

PAGE = (ROOT / "docs" / "python.md").read_text()


def test_the_code_of_the_page_runs_and_the_commands_find_its_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found: dict = {}
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)):
        exec(compile(code, f"block {number}", "exec"), found)
    printed = capsys.readouterr().out.splitlines()
    assert "runs/mine/step-000000/score 16 False" in printed
    assert "rloo" in printed
    assert isinstance(found["scores"], pd.DataFrame)
    assert len(found["scores"]) == 16
    assert "1 [0, 1, 2]" in printed  # the first step was made by its stages
    assert printed[-1].startswith("`train.lora_dropout` must be at least 0 and below 1, not 1.0")
    assert "estimator" not in (tmp_path / "runs/mine/run.toml").read_text()
    assert skyrl_here("score", "--run", "runs/mine").stderr.startswith("Up to date")


def test_the_lines_of_the_front_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    found: dict = {}
    exec(compile(code, "README.md", "exec"), found)
    assert [one.manifest.stage for one in found["made"]] == ["rollout", "score", "advantage", "train", "sync"]
    assert found["run"].run.policies() == [0, 1]
    assert capsys.readouterr().out.splitlines()[0] == "group_id"


def test_importing_the_interface_loads_no_torch():
    program = "import sys, nanoskyrl.stages.running.interface; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "set()"


def test_another_value_than_the_runs_is_told(tmp_path):
    begin_run(Run(tmp_path / "run"), {"train": {"lr": 0.1}})
    with pytest.warns(Notice, match=r"for this command alone: train\.lr = 0\.2 \(the run has 0\.1\)"):
        assert open_run(tmp_path / "run", {"train": {"lr": 0.2}}).settings["train"]["lr"] == 0.2


def test_what_cannot_be_read_or_set_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(InputError, match="has no finished `score`"):
        open_run(tmp_path / "run").frame("score")
    with pytest.raises(SettingsError, match=r"`run\.lag` must be at least 0"):
        open_run(tmp_path / "run", {"run": {"lag": -1}})
    assert not (tmp_path / "run").exists()


def test_every_package_says_that_it_is_typed():
    assert [name for name in ("algos", "envs", "eval", "stages") if not (ROOT / name / "py.typed").is_file()] == []
