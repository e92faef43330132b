"""`skyrl init --env`: what it writes runs, and its test passes."""

import subprocess
import sys

from running import skyrl_here as skyrl


def test_a_scaffold_s_own_test_passes_and_it_is_found_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = skyrl("init", "--env", "city_sizes.py")
    assert done.returncode == 0, done.stderr
    assert "skyrl rollout --env city_sizes:CitySizes --engine scripted" in done.stderr
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "test_city_sizes.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert tested.returncode == 0, tested.stdout
    assert "2 passed" in tested.stdout
    again = skyrl("init", "--env", "city_sizes.py")
    assert again.returncode == 2
    assert "is there already" in again.stderr
    assert skyrl("init", "--env", "no-module.txt").returncode == 2
