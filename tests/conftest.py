"""Fixtures that several test modules share, and what makes a run of them the same on any machine."""

import os

# Before torch is imported. Models as small as those of tests are computed no sooner by more threads; where a command
# starts more, idle ones wait without burning the other core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.pop("PYTHONUNBUFFERED", None)  # most shells do not set it, and a lost print would not be missed

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from nanoskyrl.stages.core.trajectory import Trajectory, Turn

# How long an example takes is the machine's business. `--hypothesis-profile anew` draws others every time.
settings.register_profile("anew", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("everywhere", settings.get_profile("anew"), derandomize=True)
settings.load_profile("everywhere")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that have the most time: one that begins late ends alone, beside idle processors."""

    def seconds(item: pytest.Item) -> float:
        mark = item.get_closest_marker("timeout")
        return float(mark.args[0]) if mark else 0.0

    items.sort(key=seconds, reverse=True)


@pytest.fixture
def make_trajectory() -> Callable[..., Trajectory]:
    """Return a maker of rows: three prompt tokens, two sampled ones, then what is changed."""

    def make(**changes: Any) -> Trajectory:
        row = Trajectory(
            trajectory_id="t0",
            group_id="g0",
            sample=0,
            env="text_math",
            task_id="addition-1-000000",
            split="train",
            seed=1,
            policy_version=0,
            policy_digest="d" * 64,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            logprobs_mode="processed",
            prompt_ids=np.array([1, 2, 3], np.int32),
            response_ids=np.array([4, 5], np.int32),
            loss_mask=np.array([1, 1], np.int8),
            rollout_logprobs=np.array([-0.5, -0.25], np.float32),
            prompt="What is 1 + 1?",
            response="<answer>2</answer>",
            messages=[
                {"role": "user", "content": "What is 1 + 1?"},
                {"role": "assistant", "content": "<answer>2</answer>"},
            ],
            turns=[Turn(action="<answer>2</answer>", observation="", done=True, first_token=0, token_count=2)],
            status="completed",
            stop_reason="stop",
            trainable=True,
            prompt_tokens=3,
            completion_tokens=2,
            metadata={"ground_truth": "2"},
        )
        return replace(row, **changes)

    return make


@pytest.fixture
def group(make_trajectory: Callable[..., Trajectory]) -> Callable[..., list[Trajectory]]:
    """Return a maker of one group's scored rows from their rewards; None is an unscored row."""

    def make(rewards: list[float | None], name: str = "g0", **changes: Any) -> list[Trajectory]:
        return [
            make_trajectory(
                trajectory_id=f"{name}-{i}", group_id=name, sample=i, reward=reward,
                success=None if reward is None else reward > 0.5,
                score_status="scored" if reward is not None else "verifier_error", **changes,
            )
            for i, reward in enumerate(rewards)
        ]  # fmt: skip

    return make


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give programs that are graded two minutes: what is right needs no more, however busy the machine is."""
    from nanoskyrl.envs.graders import grade_code
    from nanoskyrl.eval.benchmarks import humaneval, livecodebench

    for module in (grade_code, humaneval, livecodebench):
        monkeypatch.setattr(module, "LIMITS", replace(module.LIMITS, seconds=120.0))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run folders of tests in three processes, since tests wait a third of their time; files and servers in one."""
    folders = all(Path(argument).is_dir() for argument in config.args)
    default = config.option.markexpr in config.getini("addopts")
    return 3 if folders and (default or config.option.markexpr in ("slow", "long")) else 0


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what was skipped, each reason once."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        terminalreporter.section(f"{reasons.total()} skipped", sep="-")
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count:4} {reason}")
