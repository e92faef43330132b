"""The commands of docs/tutorial.md, as a reader would type them, and what they print; the pages in Chinese; the site."""

import re
import shlex
import subprocess
import sys

import pytest
from running import ROOT, skyrl_here

TEXT = (ROOT / "docs" / "tutorial.md").read_text()


@pytest.mark.parametrize("page", ["README", "docs/tutorial"])
def test_commands_and_outputs_are_the_same_in_chinese(page):
    english, chinese = ((ROOT / f"{page}{end}").read_text(encoding="utf-8") for end in (".md", ".zh.md"))
    blocks = re.findall(r"^```\w+\n.*?^```$", english, re.DOTALL | re.MULTILINE)
    assert blocks
    assert re.findall(r"^```\w+\n.*?^```$", chinese, re.DOTALL | re.MULTILINE) == blocks
    links = re.compile(r"\]\(([^)#]+\.md)\)")
    assert set(links.findall(english)) - set(links.findall(chinese)) <= {
        "README.zh.md",
        "tutorial.zh.md",
        "docs/tutorial.md",
    }
    assert all(((ROOT / page).parent / link).is_file() for link in links.findall(chinese))


@pytest.mark.slow
def test_the_pages_become_a_site_without_a_broken_link(tmp_path):
    pytest.importorskip("mkdocs", reason="no mkdocs: pip install 'nanoskyrl[site]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "docs/mkdocs.yml", "-d", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "docs" / "tutorial.zh.html").is_file()


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
