"""Adapters: which weights of which families learn, how a run begins from one, and what others make of one."""

import json
import re

import pytest
import torch
from families import EXPERTS, write_family
from safetensors.torch import load_file
from tiny_models import rows, update
from tolerances import LOGITS, PASS, assert_close

from nanoskyrl.algos.off_policy import OffPolicyConfig
from nanoskyrl.stages.core.errors import OutputError, SettingsError
from nanoskyrl.stages.core.registry import lookup
from nanoskyrl.stages.core.runs import Run, RunConfig
from nanoskyrl.stages.engines.base import HfConfig
from nanoskyrl.stages.engines.hf import HfEngine
from nanoskyrl.stages.learning.learner import Learner
from nanoskyrl.stages.learning.objective import Objective
from nanoskyrl.stages.learning.train_config import OptimizerConfig, TrainConfig
from nanoskyrl.stages.learning.update import Update
from nanoskyrl.stages.models.loading import load_model
from nanoskyrl.stages.models.policy import count_parameters, is_adapter, policy_digest, read_info, resolve_policy
from nanoskyrl.stages.running.places import Places
from nanoskyrl.stages.sync import deliver

FAST = ("granitemoe", "qwen2_moe")


def learnt(model):
    """Return the names of what learns, as they are in the model without adapters, but for numbers of layers."""
    found = set()
    for name, module in model.get_base_model().named_modules():
        if hasattr(module, "lora_A"):
            assert all(p.requires_grad for p in module.lora_A.parameters())
            plain = re.sub(r"\.\d+\.", ".N.", name.replace(".base_layer", ""))
            found.add(f"{plain}.{module.parameter_name}" if hasattr(module, "parameter_name") else plain)
    return found


@pytest.mark.parametrize(
    "kind", [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in EXPERTS]
)
def test_experts_learn_and_routers_do_not_and_the_engine_holds_what_was_trained(kind, tmp_path):
    write_family(kind, tmp_path / "base")
    learner = Learner(OptimizerConfig(lora_rank=2, lr=1e-2))
    learner.load(tmp_path / "base", seed=1)
    names = learnt(learner.model)
    assert [end for end in EXPERTS[kind] if not any(name.endswith(end) for name in names)] == []
    assert [
        name for name in names if re.search(r"(router|mlp\.gate|block_sparse_moe\.gate|shared_expert_gate)\b", name)
    ] == []
    assert [name for name in names if "lm_head" in name] == []
    config = learner.model.peft_config["default"]
    assert (config.rank_pattern, config.alpha_pattern) == ({}, {})  # peft's own guess at experts doubles their rank
    frozen = {name: p.clone() for name, p in learner.model.named_parameters() if not p.requires_grad}
    update(learner)
    assert all(torch.equal(p, frozen[name]) for name, p in learner.model.named_parameters() if name in frozen)
    learner.save(tmp_path / "policy", tmp_path / "state", [7, 20, 33, 46, 59])
    engine = HfEngine(HfConfig(device="cpu", dtype="float32"))
    engine.load(tmp_path / "base")
    before = engine.logprobs([7, 20, 33, 46, 59])
    assert deliver(tmp_path / "policy", engine, None, parent=tmp_path / "base").largest < 1e-4
    assert max(abs(a - b) for a, b in zip(engine.logprobs([7, 20, 33, 46, 59]), before, strict=True)) > 1e-3


def test_layers_are_chosen_and_left_out_by_their_names(tmp_path):
    write_family("qwen2_moe", tmp_path)

    def of(**settings):
        learner = Learner(OptimizerConfig(lora_rank=1, **settings))
        learner.load(tmp_path)
        return {name.removeprefix("model.layers.N.") for name in learnt(learner.model)}

    assert of(lora_targets=("q_proj", "v_proj")) == {"self_attn.q_proj", "self_attn.v_proj"}
    assert of(lora_targets=("experts.down_proj",)) == {"mlp.experts.down_proj"}
    assert of(lora_targets=("shared_expert_gate",)) == {"mlp.shared_expert_gate"}  # a router, but named
    everything = of()
    assert of(lora_exclude=("gate_up_proj", "self_attn.k_proj")) == everything - {
        "mlp.experts.gate_up_proj", "self_attn.k_proj",
    }  # fmt: skip
    with pytest.raises(SettingsError, match=r"`train.lora_targets` names `qproj`, which is no layer of a Qwen2Moe"):
        of(lora_targets=("qproj",))
    with pytest.raises(SettingsError, match="no layer is left for adapters"):
        of(lora_targets=("q_proj",), lora_exclude=("q_proj",))
    with pytest.raises(SettingsError, match="adapters of experts have none"):
        of(lora_dropout=0.1)


def test_layers_that_peft_takes_for_experts_are_left_out_openly(tmp_path):
    write_family("ernie4_5_moe", tmp_path)
    with pytest.raises(SettingsError, match=r"peft puts no adapters on `.*_proj` of an Ernie4_5_MoeForCausalLM"):
        Learner(OptimizerConfig(lora_rank=2, lora_targets=("shared_experts.down_proj", "experts.down_proj"))).load(
            tmp_path
        )
    learner = Learner(OptimizerConfig(lora_rank=2))
    learner.load(tmp_path)
    names = {name.removeprefix("model.layers.N.") for name in learnt(learner.model)}
    assert names == {
        "mlp.experts.down_proj", "mlp.experts.gate_up_proj",
        *(f"self_attn.{each}_proj" for each in "qkvo"),
    }  # fmt: skip


@pytest.mark.slow
def test_experts_that_a_family_reads_past_their_adapters_are_not_trained_in_silence(tmp_path):
    write_family("dbrx", tmp_path)
    with pytest.raises(SettingsError, match=r"does not compute through adapters on `transformer.blocks.0.*experts"):
        Learner(OptimizerConfig(lora_rank=2)).load(tmp_path)
    learner = Learner(OptimizerConfig(lora_rank=2, lora_exclude=("mlp.w1", "mlp.v1", "mlp.w2")))
    learner.load(tmp_path)
    assert not any("experts" in name or "router" in name for name in learnt(learner.model))


def trained(place, **settings):
    learner = Learner(OptimizerConfig(lora_rank=4, lr=1e-2, **settings))
    learner.load(resolve_policy("starter"), seed=1)
    update(learner)
    learner.save(place / "policy", place / "state", [1, 2, 3, 4])
    return learner


def test_adapters_of_other_kinds_are_refused_when_training_goes_on(tmp_path):
    trained(tmp_path, lora_rslora=True, lora_targets=("q_proj",))
    for settings, says in (
        ({"lora_dropout": 0.5}, r"adapters of dropout 0.0, and `train.lora_dropout` is 0.5"),
        ({"lora_targets": ("v_proj",)}, "adapters on other layers than"),
        ({"lora_exclude": ("v_proj",)}, "adapters on other layers than"),
    ):
        with pytest.raises(SettingsError, match=says):
            Learner(OptimizerConfig(**settings)).load(tmp_path / "policy")
    Learner(OptimizerConfig(lora_rslora=True, lora_targets=("q_proj",))).load(tmp_path / "policy")


def test_rslora_scales_by_the_root_of_the_rank(tmp_path):
    plain, stable = (trained(tmp_path / str(on), lora_rslora=on).model for on in (False, True))
    scales = [next(m for m in model.modules() if hasattr(m, "lora_A")).scaling["default"] for model in (plain, stable)]
    assert scales == [64 / 4, 64 / 2]


def test_dropout_draws_in_training_alone_and_draws_again_what_it_drew(tmp_path):
    gradients = []
    for dropout, seed in ((0.0, 0), (0.5, 0), (0.5, 0), (0.5, 1)):
        learner = Learner(OptimizerConfig(lora_rank=4, lora_dropout=dropout))
        learner.load(resolve_policy("starter"), seed=1)
        for name, parameter in learner.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.constant_(parameter, 1e-2)
        before = learner.logprobs(rows(200), 1.0, 1000)
        torch.manual_seed(seed)
        algorithm = lookup("algo", "grpo")
        objective = Objective(
            algorithm, algorithm.Config(), TrainConfig(), rows(200), 1.0, off_policy=OffPolicyConfig()
        )
        gradients.append(Update(objective).gradient(learner, list(range(8))))
        after = learner.logprobs(rows(200), 1.0, 1000)
        assert all((a == b).all() for a, b in zip(before, after, strict=True))
    assert torch.equal(gradients[1], gradients[2])
    assert not torch.equal(gradients[1], gradients[3])
    assert not torch.equal(gradients[0], gradients[1])


def test_peft_finds_the_base_by_what_the_adapter_says_wherever_it_stands(tmp_path, monkeypatch):
    from peft import AutoPeftModelForCausalLM

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trained(tmp_path)
    monkeypatch.chdir(tmp_path)
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "policy").eval()
    info = read_info(tmp_path / "policy")
    ids = torch.tensor([info.canary_ids])
    with torch.no_grad():
        found = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    assert_close(found, info.canary_logprobs, PASS, scale=LOGITS)
    named = json.loads((tmp_path / "policy" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(resolve_policy("starter"))


def outside(place):
    """Write an adapter as peft does, without a tokenizer and without our own files."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = load_model(resolve_policy("starter"), dtype=torch.float32, device="cpu")
    base.name_or_path = str(resolve_policy("starter"))
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    model.save_pretrained(place, save_embedding_layers=False)
    return place


def test_a_run_that_begins_from_an_adapter_begins_from_it_merged_into_its_base(tmp_path):
    adapter = outside(tmp_path / "adapter")
    places = [Places(Run(tmp_path / name), RunConfig(policy=str(adapter))) for name in ("a", "b")]
    first, again = (each.first_policy() for each in places)
    assert policy_digest(first) == policy_digest(again)
    assert places[0].first_policy() == first  # which is there
    assert read_info(first).merged == policy_digest(adapter)
    assert not is_adapter(first)
    nats = []
    for policy in (first, adapter):
        engine = HfEngine(HfConfig(device="cpu"))
        engine.load(policy)
        nats.append(engine.logprobs([7, 20, 33, 46, 59]))
    assert_close(nats[0], nats[1], PASS, scale=LOGITS)
    with pytest.raises(OutputError, match="began with the policy"):
        Places(Run(tmp_path / "a"), RunConfig(policy="starter")).first_policy()
    learner = Learner(OptimizerConfig(lora_rank=4))
    learner.load(first)
    assert learner.model.peft_config["default"].base_model_name_or_path == str(first.resolve())


def test_weights_in_a_pickle_are_counted(tmp_path):
    starter = resolve_policy("starter")
    torch.save(load_file(starter / "model.safetensors"), tmp_path / "pytorch_model.bin")
    assert count_parameters(tmp_path) == count_parameters(starter) > 100_000
