"""A run in somebody else's hands: files readable by those who may read the folder, and a loop that continues there."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from running import SMALL

from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.looking.verify import verify
from nanoskyrl.stages.running.loop import loop

PPO = {"train": {"algo": "ppo"}}
OTHER = 65534
"""The user nobody, as whom the run continues."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one step with a critic."""
    root = tmp_path_factory.mktemp("handed") / "run"
    loop(Run(root), merge(SMALL, PPO, {"loop": {"steps": 1}}))
    return root


def test_files_and_folders_follow_the_umask(run):
    mask = os.umask(0)
    os.umask(mask)
    odd = [
        f"{stat.S_IMODE(path.stat().st_mode):o} {path.relative_to(run)}"
        for path in [run, *run.rglob("*")]
        if stat.S_IMODE(path.stat().st_mode) != (0o777 if path.is_dir() else 0o666) & ~mask
    ]
    assert not odd


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_copies_a_run_and_resumes_it(run):
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="nanoskyrl-handed-") as folder:
        place = Path(folder)
        shutil.copytree(run, place / "theirs")
        place.chmod(0o755)
        (place / "ours").mkdir()
        os.chown(place / "ours", OTHER, OTHER)

        def as_other(*command: str) -> subprocess.CompletedProcess:
            env = {"PATH": os.environ["PATH"], "HOME": str(place / "ours"), "PYTHONDONTWRITEBYTECODE": "1"}
            return subprocess.run(
                command, user=OTHER, group=OTHER, extra_groups=[], cwd=place / "ours", env=env, capture_output=True,
                text=True, check=False,
            )  # fmt: skip

        copied = as_other("cp", "-r", str(place / "theirs"), str(place / "ours" / "run"))
        assert copied.returncode == 0, copied.stderr
        loop_on = ("-m", "nanoskyrl_cli", "loop", "--run", str(place / "ours" / "run"), "--steps", "2")
        # Where Python lies in a folder of ours alone, we continue in what they copied.
        runs = as_other("test", "-x", os.path.realpath(sys.executable)).returncode == 0
        resumed = (
            as_other(sys.executable, *loop_on)
            if runs
            else subprocess.run([sys.executable, *loop_on], capture_output=True, text=True, check=False)
        )
        assert resumed.returncode == 0, resumed.stderr
        found = verify(place / "ours" / "run")
        assert (found.broken, found.unfinished) == ([], [])
        assert Run(place / "ours" / "run").policies() == [0, 1, 2]
