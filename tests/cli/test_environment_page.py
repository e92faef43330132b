"""The commands of docs/environments.md that need nothing but this package, as a reader would type them."""

import re
import shlex

import pytest
from running import ROOT, skyrl, skyrl_here

from nanoskyrl_cli.main import run

PAGE = (ROOT / "docs" / "environments.md").read_text()


@pytest.mark.parametrize("env", ["text_math", "tool_use", "webshop_lite", "alfworld_lite"])
def test_the_scripted_rollout_of_the_page_solves_everything(tmp_path, env, capsys):
    command = re.search(rf"^\$ (skyrl rollout --env {env} .*)$", PAGE, re.MULTILINE)[1]
    arguments = shlex.split(command)[1:]
    done = skyrl_here(*arguments, "--train-batch-size", 64, "--n-samples-per-prompt", 1, "--run", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "ended by stop 64" in done.stderr
    assert run(["score", "--run", str(tmp_path / "run")]) == 0
    assert "success 1.000, reward 1.000" in capsys.readouterr().err
    assert run(["show", str(tmp_path / "run" / "step-000000" / "score"), "--row", "0"]) == 0
    shown = capsys.readouterr().out
    assert any(tag in shown for tag in ("<action>", "<answer>"))


def test_the_environment_in_thirty_lines_is_thirty_lines_and_runs(tmp_path):
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    (tmp_path / "hotter.py").write_text(code)
    commands = re.search(r"```console\n(\$ skyrl rollout --env hotter:Hotter.*?)```", PAGE, re.DOTALL)[1]
    said = []
    for command in commands.splitlines():
        done = skyrl(*shlex.split(command.removeprefix("$ "))[1:], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout + done.stderr)
    assert "success 1.000, reward 1.000" in said[1]
    assert "Guess my number." in said[2]
