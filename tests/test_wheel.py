"""The wheel: built, installed outside of the checkout, and run from there."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from running import ROOT, SMALL, as_flags

FOLDERS = {
    "stages": "nanoskyrl/stages",
    "envs": "nanoskyrl/envs",
    "algos": "nanoskyrl/algos",
    "eval": "nanoskyrl/eval",
    "nanoskyrl_cli": "nanoskyrl_cli",
}
ONE_STEP = {**SMALL, "loop": {"steps": 1, "eval_every": 0}}
PROGRAM = """
import json, sys
from pathlib import Path
from nanoskyrl_cli.main import run
code = run(sys.argv[2:])
ours = [m.__file__ for name, m in sys.modules.items() if name.startswith("nanoskyrl") and getattr(m, "__file__", None)]
Path(sys.argv[1]).write_text(json.dumps(ours))
sys.exit(code)
"""


def pip(*arguments):
    words = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Return a wheel of the checkout, built from a copy: setuptools leaves folders behind where it builds."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    source.mkdir()
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    # One that is here and new enough needs no registry.
    here = int(version("setuptools").partition(".")[0]) >= 77
    pip("wheel", "--no-deps", *(["--no-build-isolation"] if here else []), "--wheel-dir", place, source)
    (found,) = place.glob("*.whl")
    return found


@pytest.mark.slow
def test_a_wheel_holds_every_file_of_the_packages(wheel):
    with zipfile.ZipFile(wheel) as opened:
        held = {name for name in opened.namelist() if ".dist-info/" not in name}
        (command,) = (opened.read(name) for name in opened.namelist() if name.endswith("entry_points.txt"))
    assert held == {
        f"{installed}/{path.relative_to(ROOT / folder)}"
        for folder, installed in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "skyrl = nanoskyrl_cli.main:main" in command.decode().splitlines()


@pytest.mark.slow
def test_an_installed_wheel_runs_the_loop_with_nothing_of_the_checkout(wheel, tmp_path):
    place = tmp_path / "installed"
    pip("install", "--no-deps", "--target", place, wheel)
    (tmp_path / "elsewhere").mkdir()
    words = ["loop", "--preset", "quickstart", "--run", tmp_path / "run", *as_flags(ONE_STEP)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "modules.json", *map(str, words)], cwd=tmp_path / "elsewhere",
        env={**os.environ, "PYTHONPATH": str(place)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "policies" / "00000001" / "policy.json").is_file()
    imported = json.loads((tmp_path / "modules.json").read_text())
    assert str(place / "nanoskyrl" / "stages" / "core" / "manifest.py") in imported
    assert [path for path in imported if not Path(path).is_relative_to(place)] == []
