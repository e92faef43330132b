"""Finished runs for all tests that look at runs; no test may change them."""

from pathlib import Path

import pytest
from looked_at import hostile_run, small_run
from running import SMALL, as_flags, skyrl_here


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two steps of tool_use."""
    run = tmp_path_factory.mktemp("looking") / "run"
    settings = {**SMALL, "rollout": {**SMALL["rollout"], "env": "tool_use"}, "eval": {"limit": 4, "n_samples": 1}}
    done = skyrl_here("loop", "--run", run, *as_flags(settings), "--set", "loop.eval_every=2")
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two small steps of tool_use."""
    return small_run(tmp_path_factory.mktemp("looking") / "small")


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run whose policy wrote what does harm where it is obeyed."""
    return hostile_run(tmp_path_factory.mktemp("looking") / "hostile")
