"""Environments and rewards that wait do so at the same time, on every engine, and the bytes do not tell."""

import sys

import pytest
from running import same_bytes

from nanoskyrl_cli.main import run as skyrl

MODULE = """
import threading
import time

from nanoskyrl.envs.worlds.text_math.environment import TextMath, TextMathEpisode

lock = threading.Lock()
now = most = 0


def wait():
    global now, most
    with lock:
        now += 1
        most = max(most, now)
    time.sleep(0.01)
    with lock:
        now -= 1


class Slow(TextMath):
    def start(self):
        return SlowEpisode()

    def score(self, trajectory):
        wait()
        return super().score(trajectory)


class SlowEpisode(TextMathEpisode):
    def step(self, action):
        wait()
        return super().step(action)


class Alone(Slow):
    serial = True
"""
SMALL = (
    "--set", "rollout.train_batch_size=4", "--set", "rollout.n_samples_per_prompt=3", "--set",
    "rollout.max_generate_length=8", "--set", "rollout.rows_per_part=12",
)  # fmt: skip


@pytest.fixture
def most_of(tmp_path, monkeypatch):
    """Run a stage and return how many of its calls were under way at once."""
    (tmp_path / "slow_env.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    sys.modules.pop("slow_env", None)

    def most_of(stage, run, name, concurrency, *more):
        import slow_env

        slow_env.most = 0
        told = [stage, "--run", run, "--set", f"{stage}.concurrency={concurrency}", *more]
        assert skyrl(told) == 0
        return slow_env.most

    yield most_of
    sys.modules.pop("slow_env", None)


@pytest.mark.parametrize("engine", ["scripted", "hf"])
def test_as_many_wait_together_as_the_settings_say(most_of, tmp_path, engine):
    for run, name, concurrency in (("many", "Slow", 4), ("one", "Slow", 1), ("serial", "Alone", 4)):
        flags = ("--env", f"slow_env:{name}", "--engine", engine, "--set", "hf.device=cpu", *SMALL)
        seen = [most_of("rollout", run, name, concurrency, *flags), most_of("score", run, name, concurrency)]
        assert all(1 < at_once <= 4 for at_once in seen) if run == "many" else seen == [1, 1], (run, seen)
    for stage in ("rollout", "score"):
        places = [tmp_path / run / "step-000000" / stage for run in ("many", "one")]
        assert same_bytes(*places) == []
