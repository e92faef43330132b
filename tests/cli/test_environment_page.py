"""The commands of docs/environments.md that need nothing but this package, as a reader would type them."""

import re
import shlex

import pytest
from running import ROOT, skyrl

PAGE = (ROOT / "docs" / "environments.md").read_text()


@pytest.mark.parametrize("env", ["webshop_lite", "alfworld_lite"])
def test_the_scripted_rollout_of_the_page_solves_everything(tmp_path, env):
    (command,) = re.findall(rf"^\$ (skyrl rollout --env {env} .*)$", PAGE, re.MULTILINE)
    arguments = shlex.split(command)[1:]
    done = skyrl(*arguments, "--train-batch-size", 64, "--n-samples-per-prompt", 1, "--run", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "ended by stop 64" in done.stderr
    scored = skyrl("score", "--run", tmp_path / "run")
    assert "success 1.000, reward 1.000" in scored.stderr
    shown = skyrl("show", tmp_path / "run" / "step-000000" / "score", "--row", 0)
    assert shown.returncode == 0
    assert "<action>" in shown.stdout
