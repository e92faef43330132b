"""The commands of docs/tutorial.md, as a reader would type them, and what they print."""

import re
import shlex
import sys

import pytest
from running import ROOT, skyrl_here

TEXT = (ROOT / "docs" / "tutorial.md").read_text()


@pytest.mark.slow
def test_the_commands_of_the_tutorial_do_what_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "rewards.py").write_text(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0])
    said = ""
    for command in re.findall(r"^\$ skyrl (.*)$", TEXT, re.MULTILINE):
        done = skyrl_here(*shlex.split(command))
        assert done.returncode == 0, (command, done.stderr)
        said += done.stdout + done.stderr
    words = " ".join(said.split())
    for line in (
        "64 rows of tool_use",
        "64 of 64 rows scored",
        "enough groups differ to learn from",
        "policy 1 published and proved",
        "tokens by advantage",
        "cosines between gradients",
        "bad_arguments",
    ):
        assert line in words
