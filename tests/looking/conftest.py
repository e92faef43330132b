"""One finished run for all tests that look at runs."""

from pathlib import Path

import pytest
from running import SMALL, as_flags, skyrl_here


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two steps of tool_use, which no test may change."""
    run = tmp_path_factory.mktemp("looking") / "run"
    settings = {**SMALL, "rollout": {**SMALL["rollout"], "env": "tool_use"}, "eval": {"limit": 4, "n_samples": 1}}
    done = skyrl_here("loop", "--run", run, *as_flags(settings), "--set", "loop.eval_every=2")
    assert done.returncode == 0, done.stderr
    return run
