"""What would run where, and what cannot."""

import json
import shlex

import pytest
import torch.distributed.run
from accelerate.commands.launch import launch_command_parser

from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.storage import as_path
from nanoskyrl.stages.engines.vllm import memory as vllm_memory
from nanoskyrl.stages.learning.train_config import TrainConfig
from nanoskyrl.stages.looking import plan as plan_module
from nanoskyrl.stages.looking.footprint import Bytes, generation_memory, training_memory
from nanoskyrl.stages.looking.hosts import host_commands
from nanoskyrl.stages.looking.plan import plan
from nanoskyrl.stages.models.policy import STARTER_DIRECTORY, count_parameters

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
    monkeypatch.setattr(plan_module, "_gpus", lambda: [("H100", 80 * GIB)] * 2)
    monkeypatch.setattr(vllm_memory, "driver_lines", lambda: [f"NVIDIA H100, 580, {80 << 10} MiB"] * 2)
    settings = {"rollout": {"engine": "vllm"}, "vllm": {"servers_per_gpu": 2, "kv_cache_gib": 50.0}}
    with pytest.raises(SettingsError, match=r"generation would take about 105\.00 GiB") as found:
        plan(Run(tmp_path), settings | {"loop": {"gpus_generate": "0", "gpus_train": "1"}})
    assert "kv_cache_gib" in str(found.value.hint)
    halves = {"gpus_generate": "0", "gpus_train": "cpu"}
    with pytest.raises(SettingsError, match=r"generation would take .*, and there are 80\.00 GiB"):
        plan(Run(tmp_path), settings | {"loop": halves})
    with pytest.raises(SettingsError, match="generation and training would take") as found:
        plan(Run(tmp_path), settings)
    assert "kv_cache_gib" in str(found.value.hint)


def test_memory_of_training_is_weights_states_and_activations():
    def of(processes=1, rank=0, **settings):
        config = TrainConfig(max_tokens_per_micro_batch=7168, **settings)
        return training_memory(config, QWEN, PARAMETERS, rank, on_gpu=True, processes=processes).parts

    full = of()
    assert full["weights"] == pytest.approx(2 * PARAMETERS)
    embedding = 2 * 151936 * 1536
    assert full["gradients"] == pytest.approx(4 * PARAMETERS + embedding)
    assert full["optimizer"] == pytest.approx(12 * PARAMETERS)
    assert full["gathered and exchanged"] == 0
    assert of(optimizer="adamw_8bit")["optimizer"] == pytest.approx(6 * PARAMETERS)
    lora = of(rank=32)
    assert full["weights"] < lora["weights"] < 1.05 * full["weights"]
    assert lora["gradients"] < 0.04 * full["gradients"]
    assert of(rank=32, quantization="nf4")["weights"] < 0.3 * lora["weights"]
    zero = of(processes=4)
    assert zero["weights"] == full["weights"] / 4
    assert zero["optimizer"] == full["optimizer"] / 4
    assert zero["gradients"] == PARAMETERS + embedding
    assert zero["gathered and exchanged"] > 2 * 10**9  # ZeRO-3 holds so many weights whole
    kept = "kept for the backward pass"
    critic = training_memory(TrainConfig(), QWEN, PARAMETERS, 0, on_gpu=True, processes=1, critic=True).parts["critic"]
    assert critic > 15 * PARAMETERS  # weights, gradients, moments, copies, as the policy has; no head
    assert of(gradient_checkpointing=0.0)[kept] > 5 * full[kept]


def test_memory_of_an_engine_in_this_process_is_weights_and_keys_and_values():
    found = generation_memory(QWEN, PARAMETERS, 1024, on_gpu=True).parts
    assert found["weights"] == 2 * PARAMETERS
    assert found["keys and values of 16 sequences"] == 16 * 1024 * 2 * 28 * 2 * 128 * 2


def test_memory_of_servers_is_their_share_of_the_gpu(tmp_path, gpus, monkeypatch):
    monkeypatch.setattr(vllm_memory, "driver_lines", lambda: [f"NVIDIA H100, 580, {80 << 10} MiB"] * 2)

    def of(**settings):
        split = {"gpus_generate": "0", "gpus_train": "1"}
        found = plan(Run(tmp_path), {"rollout": {"engine": "vllm"}, "loop": split, "vllm": settings})
        return {name.removeprefix("generation: "): value for name, value in found.items() if "generation:" in name}

    one = of(servers_per_gpu=1)
    assert one["in all"] == pytest.approx(
        69.5 * GIB, rel=1e-4
    )  # 72, less half of what is spared for what nobody counts
    assert one["keys and values"] > 60 * GIB
    named = of(servers_per_gpu=3, kv_cache_gib=4.0)
    assert named["keys and values"] == 12 * GIB
    assert named["weights, 3 x"] == 3 * 2 * count_parameters(STARTER_DIRECTORY)
    assert of()["in all"] < one["in all"]  # several servers leave a reserve each


def test_memory_prints_as_people_read_it_and_is_a_number():
    assert str(Bytes(3 * GIB)) == "3.00 GiB"
    assert str(Bytes(5 << 20)) == "5.0 MiB"
    assert json.dumps(Bytes(7)) == "7"


def test_the_command_prints_json(tmp_path, capsys):
    from nanoskyrl_cli.main import run

    assert run(["plan", "--run", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["next step"] == 0
    assert isinstance(found["training: in all"], int)
    assert run(["plan", "--run", str(tmp_path)]) == 0
    assert " GiB" in capsys.readouterr().out


def test_on_ray_the_plan_names_the_workers_and_counts_the_gpus_of_all_hosts(tmp_path, gpus):
    shown = plan(Run(tmp_path), {"run": {"executor": "ray"}, "ray": {"rollout_workers": 3}})
    assert (shown["RolloutWorkers"], shown["EnvWorkers"], shown["Learner"]) == ("3, CPU", "6, CPU", "1 process, CPU")
    placed = {"run": {"executor": "ray"}, "loop": {"gpus_generate": "0-15", "gpus_train": "16-31"}}
    shown = plan(Run(tmp_path), placed)
    assert (shown["RolloutWorkers"], shown["Learner"]) == ("16, 1 GPU each", "16 processes, a GPU each")


def test_each_host_has_its_command(tmp_path):
    eight = {"loop": {"gpus_generate": "cpu", "gpus_train": "0-7"}}
    found = host_commands(Run(as_path("memory://run")), eight, ["a", "b"])
    assert found["hosts see the run at"] == "memory://run, a URL"
    for rank, host in enumerate("ab"):
        place, *words = shlex.split(found[f"train on {host}"])
        assert (place, *words[:2]) == ("SKYRL_RUN=memory://run", "accelerate", "launch")
        read = launch_command_parser().parse_args(words[2:])
        assert (read.num_processes, read.num_machines, read.machine_rank, read.main_process_ip) == (16, 2, rank, "a")
        assert (read.module, read.training_script) == (True, "nanoskyrl_cli.main")
        assert read.training_script_args == ["train", "--follow"]
    _, launcher, *words = shlex.split(host_commands(Run(tmp_path), {}, ["a", "b"])["train on b"])
    read = torch.distributed.run.parse_args(words)
    assert (launcher, read.nnodes, read.node_rank, read.training_script) == ("torchrun", "2", 1, "nanoskyrl_cli.main")
    assert read.training_script_args == ["train", "--follow"]
    assert found["Ray on b"] == "ray start --address a:6379"
    for wrong in ([], ["a", "a"], ["a", ""]):
        with pytest.raises(SettingsError, match="each host once"):
            host_commands(Run(tmp_path), {}, wrong)
