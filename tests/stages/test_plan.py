"""What would run where, and what cannot."""

import json

import pytest

from nanoskyrl.stages import plan as plan_module
from nanoskyrl.stages.errors import SettingsError
from nanoskyrl.stages.plan import generation_memory, plan, training_memory
from nanoskyrl.stages.runs import Run
from nanoskyrl.stages.train_config import TrainConfig

GIB = 1 << 30
QWEN = {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768,
}  # fmt: skip
PARAMETERS = 1_543_714_304


@pytest.fixture
def gpus(monkeypatch):
    """Say that there are two H100."""
    monkeypatch.setattr(plan_module, "_gpus", lambda: [("NVIDIA H100", 80 * GIB)] * 2)


def test_a_plan_on_a_cpu_says_what_runs_where(tmp_path):
    found = plan(Run(tmp_path), {})
    assert found["placement"] == "generation and training in turns, in one process"
    assert found["train"] == "grpo, full fine-tuning, one process"


def test_gpus_that_are_not_there_are_refused(tmp_path, gpus):
    with pytest.raises(SettingsError, match="GPU 3 is asked for, and this machine has 2"):
        plan(Run(tmp_path), {"loop": {"gpus_generate": "0", "gpus_train": "1-3"}})


def test_a_placement_is_told_in_words(tmp_path, gpus):
    split = {"loop": {"gpus_generate": "0", "gpus_train": "1"}, "run": {"lag": 1}}
    told = "generation on GPU 0, training on GPU 1, at once, rollouts up to 1 steps ahead"
    assert plan(Run(tmp_path), split)["placement"] == told
    shared = {"loop": {"gpus_generate": "0", "gpus_train": "0"}}
    assert "in turns: each is stopped for the other" in plan(Run(tmp_path), shared)["placement"]


def test_what_cannot_fit_is_refused_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_module, "_gpus", lambda: [("small", 1 << 20)] * 2)
    with pytest.raises(SettingsError, match=r"training would take about .*, and there are 1\.0 MiB") as found:
        plan(Run(tmp_path), {"loop": {"gpus_generate": "0", "gpus_train": "1"}})
    assert "max_tokens_per_micro_batch" in str(found.value.hint)


def test_memory_of_training_is_weights_states_and_activations():
    def of(processes=1, rank=0, **settings):
        config = TrainConfig(max_tokens_per_micro_batch=7168, **settings)
        return training_memory(config, QWEN, PARAMETERS, rank, on_gpu=True, processes=processes).parts

    full = of()
    assert full["weights"] == pytest.approx(2 * PARAMETERS)
    assert full["gradients"] == pytest.approx(4 * PARAMETERS)
    assert full["optimizer"] == pytest.approx(12 * PARAMETERS)
    assert of(optimizer="adamw_8bit")["optimizer"] == pytest.approx(6 * PARAMETERS)
    lora = of(rank=32)
    assert lora["weights"] == full["weights"]
    assert lora["gradients"] < 0.04 * full["gradients"]
    assert of(rank=32, quantization="nf4")["weights"] < 0.3 * lora["weights"]
    zero = of(processes=4)
    assert [zero[name] / full[name] for name in ("weights", "gradients", "optimizer")] == [0.25] * 3
    assert of(gradient_checkpointing=0.0)["activations, at most"] > 5 * full["activations, at most"]


def test_memory_of_generation_is_weights_and_keys_and_values():
    found = generation_memory(QWEN, PARAMETERS, 1024, on_gpu=True).parts
    assert found["weights"] == 2 * PARAMETERS
    assert found["keys and values of 16 sequences"] == 16 * 1024 * 2 * 28 * 2 * 128 * 2


def test_the_command_prints_json(tmp_path, capsys):
    from nanoskyrl_cli.main import run

    assert run(["plan", "--run", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["next step"] == 0
