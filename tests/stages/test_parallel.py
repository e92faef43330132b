"""Several processes on this machine: the numbers of one, whatever shares the work."""

import importlib.util
from pathlib import Path

import pytest
import torch
from running import SMALL, skyrl
from tolerances import GRADIENT, LOGITS, PASS, assert_close

from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.metrics import read_metrics
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.learning.process_group import launch
from nanoskyrl.stages.models.loading import load_model
from nanoskyrl.stages.running.session import Session

SCRIPT = Path(__file__).parent / "gradients.py"
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")


@pytest.fixture(scope="module")
def advantages(tmp_path_factory):
    """Advantages of one step on the starter policy, of rows that differ in length."""
    run = Run(tmp_path_factory.mktemp("runs") / "run")
    session = Session(run, merge(SMALL, {"advantage": {"old_logprobs": "recompute"}}), keep_up=True)
    for stage in ("rollout", "score", "advantage"):
        getattr(session, stage)()
    return run


def taken(run, out, *, processes, strategy="ddp", rank=0):
    """Return what the script found."""
    arguments = [str(SCRIPT), str(out), strategy, str(rank), str(run.stage(0, "advantage")), str(run.policy(0))]
    launch(arguments, processes)
    return torch.load(out)


@pytest.fixture(scope="module")
def alone(advantages, tmp_path_factory):
    place = tmp_path_factory.mktemp("alone")
    return {rank: taken(advantages, place / f"{rank}.pt", processes=1, rank=rank) | {"place": place / str(rank)}
            for rank in (0, 4)}  # fmt: skip


def compare(found, wanted, place):
    assert_close(found["loss"], wanted["loss"], PASS, scale=1.0)
    assert_close(found["gradient"], wanted["gradient"], GRADIENT)
    assert wanted["gradient"].abs().max() > 1e-3
    assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-3)  # the second is of weights that moved apart
    assert_close(found["ratio"], wanted["ratio"], PASS, scale=LOGITS)
    assert found["resumes"]
    weights, others = (
        load_model(where / "policy", dtype=torch.float32, device="cpu").state_dict()
        for where in (place, wanted["place"])
    )
    assert weights.keys() == others.keys()
    # Adam moves every weight by about lr, also where its gradient is all rounding and the sign may differ.
    apart = torch.cat([(value - others[name]).abs().flatten() for name, value in weights.items()])
    assert apart.max() <= 2.1 * found["steps"] * found["lr"]
    assert apart.mean() < 0.01 * found["lr"]


@pytest.mark.slow
def test_two_processes_have_the_loss_gradient_and_weights_of_one(advantages, alone, tmp_path):
    for rank in (0, 4):
        found = taken(advantages, tmp_path / f"{rank}.pt", processes=2, rank=rank)
        assert found["processes"] == 2
        compare(found, alone[rank], tmp_path / str(rank))


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("rank", [0, 4])
def test_deepspeed_has_the_loss_gradient_and_weights_of_one_process(
    advantages, alone, tmp_path, monkeypatch, strategy, rank
):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "compiled"))
    found = taken(advantages, tmp_path / "out.pt", processes=2, strategy=strategy, rank=rank)
    assert found["strategy"] == strategy
    compare(found, alone[rank], tmp_path / "out")
    assert not (tmp_path / "compiled").exists()  # a process killed while it compiles leaves a lock for ever


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"critic.backbone": "shared"}, marks=pytest.mark.slow),
        pytest.param({"train.lora_rank": 4}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_ppo_s_critic_learns_in_two_processes_as_in_one(tmp_path, settings):
    run = Run(tmp_path / "run")
    session = Session(run, merge(SMALL, {"train": {"algo": "ppo"}}))
    for stage in ("rollout", "score", "advantage"):
        getattr(session, stage)()
    told = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    for processes in (1, 2):
        words = ("--algo", "ppo", "--num-processes", processes, "--force", *told)
        done = skyrl("train", "--run", run.root, *words)
        assert done.returncode == 0, done.stderr
    one, two = [line for line in read_metrics(run.metrics) if line["stage"] == "train"]
    for name in ("train/loss", "train/grad_norm", "critic/grad_norm"):
        assert_close(one[name], two[name], GRADIENT)
