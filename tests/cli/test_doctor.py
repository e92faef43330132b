"""`skyrl doctor --engine` and `--gap` on the engine that is always there; real servers are in test_vllm.py."""

import json

import pytest
from running import as_flags, skyrl_here

FEW = as_flags({"rollout": {"train_batch_size": 4, "n_samples_per_prompt": 2, "max_generate_length": 16}})


def test_an_engine_is_tried_and_every_check_holds():
    done = skyrl_here("doctor", "--engine", "hf", "--json")
    assert done.returncode == 0, done.stderr
    checks = json.loads(done.stdout)
    assert [check["name"] for check in checks] == [
        "engine starts", "log-probs are transformers'", "seeds repeat themselves", "a small step arrives",
    ]  # fmt: skip
    assert all(check["ok"] for check in checks)


def test_an_engine_that_keeps_old_weights_is_told(monkeypatch):
    from nanoskyrl.stages.engines.hf import HfEngine

    load = HfEngine.load
    monkeypatch.setattr(HfEngine, "load", lambda self, policy: self.policy_digest or load(self, policy))
    done = skyrl_here("doctor", "--engine", "hf")
    assert done.returncode == 1
    assert "no   a small step arrives         log-probs stayed what they were" in done.stdout


@pytest.mark.parametrize(("dtype", "largest"), [("float32", 1e-6), ("bfloat16", 0.015)])
def test_the_gap_of_engine_and_trainer_is_rounding(dtype, largest):
    done = skyrl_here("doctor", "--gap", "starter", "--set", f"hf.dtype={dtype}", *FEW, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["engine"] == "hf"
    assert found["tokens"] > 0
    assert 0 <= found["kl/mean"] < largest
    assert found["abs_diff/mean"] <= found["abs_diff/p99"] <= found["abs_diff/max"]
