"""Steps that change nothing: the loop continues, says so, and records it."""

import pytest
import torch
from running import SMALL, as_flags, skyrl_here
from safetensors.torch import load_file, save_file

from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.manifest import read_manifest
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.models.policy import same_weights

LORA = {"train": {"lora_rank": 4}}


@pytest.mark.parametrize(
    ("changed", "moves"),
    [
        (merge(LORA, {"train": {"lr": 0.0}}), [False, False]),
        (merge(LORA, {"train": {"lr_warmup_steps": 1}}), [False, True]),
        # Greedy enough that all attempts of a group are equal, so that no advantage is left.
        (merge(LORA, {"rollout": {"temperature": 1e-3}}), [False, False]),
        pytest.param({"train": {"lr": 0.0}}, [False, False], marks=pytest.mark.slow),
    ],
    ids=["rate 0", "warm-up", "equal rewards", "whole model"],
)
def test_steps_that_change_nothing_go_on_and_say_so(tmp_path, changed, moves):
    done = skyrl_here("loop", "--run", tmp_path / "run", *as_flags(merge(SMALL, changed)))
    assert done.returncode == 0, done.stderr
    run = Run(tmp_path / "run")
    assert [read_manifest(run.stage(step, "sync")).facts["changed"] for step in range(2)] == moves
    assert done.stderr.count("note: the step changed nothing") == moves.count(False)


def test_an_adapter_counts_by_what_it_adds(tmp_path):
    done = skyrl_here("loop", "--run", tmp_path / "run", *as_flags(merge(SMALL, LORA, {"train": {"lr": 1e-3}})))
    assert done.returncode == 0, done.stderr
    run = Run(tmp_path / "run")
    base, first, second = (run.policy(version) for version in range(3))
    assert [same_weights(a, b) for a, b in ((base, first), (first, second), (first, first))] == [False, False, True]
    file = second / "adapter_model.safetensors"
    weights = load_file(file)
    nothing = {name: torch.zeros_like(weight) if "lora_B" in name else weight for name, weight in weights.items()}
    file.unlink()  # the published file is a link
    for dtype in (torch.float32, torch.bfloat16):
        save_file({name: weight.to(dtype) for name, weight in nothing.items()}, file)
        assert same_weights(base, second)
    save_file({**nothing, "base_model.model.lm_head.weight": torch.ones(2, 2)}, file)
    assert not same_weights(base, second)
