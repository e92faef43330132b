"""What goes wrong while a policy is trained: gradients that are not finite, memory that is not there, processes that die."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from running import GUARD_SECONDS, SMALL, same_bytes, skyrl_here

from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.errors import EngineError
from nanoskyrl.stages.core.manifest import is_finished
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.learning.stepping import PlainStrategy
from nanoskyrl.stages.running.loop import loop
from nanoskyrl.stages.running.session import Session

TWO_STEPS = {"train": {"policy_mini_batch_size": 2}}
"""Of the optimizer, in one of the loop."""


@pytest.fixture(scope="module")
def advantages(tmp_path_factory):
    """A run with advantages of one step."""
    run = Run(tmp_path_factory.mktemp("runs") / "run")
    session = Session(run, SMALL)
    for stage in ("rollout", "score", "advantage"):
        getattr(session, stage)()
    return run


def spoils(monkeypatch, value, steps):
    """Put a value into one place of the gradient, in some of the optimizer's steps."""
    real, seen = PlainStrategy.step, []

    def step(self):
        seen.append(None)
        if len(seen) in steps:
            self.trained[0].masters.stepped[-1].grad.view(-1)[0] = value
        return real(self)

    monkeypatch.setattr(PlainStrategy, "step", step)
    return seen


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_steps_no_weight_and_is_counted(value, advantages, tmp_path, monkeypatch):
    import torch
    from safetensors.torch import load_file

    seen = spoils(monkeypatch, value, {1})
    session = Session(advantages, merge(SMALL, TWO_STEPS))
    manifest = session.train(0, output=tmp_path / "train").manifest
    assert len(seen) == 2
    assert manifest.facts["optimizer_steps"] == 1
    weights = [load_file(path) for path in (tmp_path / "train" / "policy").glob("*.safetensors")]
    assert weights
    assert all(torch.isfinite(tensor).all() for each in weights for tensor in each.values())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loop_whose_gradient_was_never_finite_goes_on_once_it_is(value, tmp_path, monkeypatch):
    run = Run(tmp_path / "run")
    with monkeypatch.context() as patch:
        spoils(patch, value, {1})
        with pytest.raises(EngineError, match="not finite in any of 1 optimizer steps"):
            loop(run, merge(SMALL, {"loop": {"steps": 1}}))
    assert not is_finished(run.stage(0, "train"))
    loop(run, merge(SMALL, {"loop": {"steps": 1}}))
    assert is_finished(run.stage(0, "sync"))


GREEDY = """
from dataclasses import dataclass
import numpy as np, torch
from nanoskyrl.algos.base import Algorithm

@dataclass(frozen=True)
class Config:
    pass

def algorithm(surrogate):
    made = {"estimator": "grpo", "loss_reduction": "token_mean", "source": "here"}
    return Algorithm(name="greedy", surrogate=surrogate, Config=Config, **made)

TORCH = algorithm(lambda inputs, config: torch.empty(1 << 50))
NUMPY = algorithm(lambda inputs, config: np.empty(1 << 50))
GPU = algorithm(lambda inputs, config: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")))
"""


@pytest.mark.parametrize("greedy", ["TORCH", "NUMPY", "GPU"])
def test_memory_that_is_not_there_is_one_error_and_nothing_is_trained(greedy, advantages, tmp_path, monkeypatch):
    (tmp_path / "greedy_algorithms.py").write_text(GREEDY)
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "train"
    done = skyrl_here("train", "--run", advantages.root, "--out", out, "--algo", f"greedy_algorithms:{greedy}")
    sys.modules.pop("greedy_algorithms")
    assert done.returncode == 1
    assert done.stderr.startswith("error: out of memory: ")
    assert "`train.max_tokens_per_micro_batch`" in done.stderr
    assert "Traceback" not in done.stderr
    assert not is_finished(out)


@pytest.mark.parametrize("rank", [pytest.param("0", marks=pytest.mark.long), pytest.param("1", marks=pytest.mark.slow)])
def test_where_a_process_that_trains_dies_the_command_says_so_and_the_same_one_makes_it(rank, advantages, tmp_path):
    command = [
        sys.executable,
        "-m",
        "nanoskyrl_cli.main",
        "train",
        "--run",
        str(advantages.root),
        "--num-processes",
        "2",
    ]
    whole, out = [*command, "--out", str(tmp_path / "whole")], [*command, "--out", str(tmp_path / "out")]
    subprocess.run(whole, check=True, capture_output=True)
    with subprocess.Popen(out, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        victim = None
        while victim is None and launcher.poll() is None:
            for child in psutil.Process(launcher.pid).children():
                with contextlib.suppress(psutil.Error):
                    # Once it has something to lose: the output was begun.
                    if child.environ().get("RANK") == rank and (tmp_path / "out").is_dir():
                        victim = child
            time.sleep(0.01)
        assert victim is not None
        os.kill(victim.pid, signal.SIGKILL)
        _, said = launcher.communicate(timeout=GUARD_SECONDS)
    assert launcher.returncode == 1
    assert f"process {rank} of 2 was killed by signal 9" in said
    assert not is_finished(tmp_path / "out")
    subprocess.run(out, check=True, capture_output=True)
    assert same_bytes(tmp_path / "whole", tmp_path / "out") == []
