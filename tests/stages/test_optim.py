"""What the optimizer steps, what is kept of it, and who is informed."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from running import SMALL, skyrl
from tiny_models import rows
from tolerances import LOGITS, PASS, assert_close
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, get_scheduler

from nanoskyrl.algos.off_policy import OffPolicyConfig
from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.errors import InputError, ProofError, SettingsError
from nanoskyrl.stages.core.manifest import read_manifest
from nanoskyrl.stages.core.registry import lookup
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.learning.learner import Learner
from nanoskyrl.stages.learning.objective import Objective
from nanoskyrl.stages.learning.optim import Masters, make_optimizer
from nanoskyrl.stages.learning.train_config import CriticConfig, OptimizerConfig, TrainConfig
from nanoskyrl.stages.learning.update import Update
from nanoskyrl.stages.models.policy import is_adapter, read_info, resolve_policy
from nanoskyrl.stages.running.loop import LoopConfig, loop
from nanoskyrl.stages.running.session import Session

STARTER = resolve_policy("starter")


def test_small_steps_of_bfloat16_weights_add_up():
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    masters = Masters([weight])
    optimizer, _ = make_optimizer(masters.stepped, 1e-4, OptimizerConfig(weight_decay=0.0))
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        masters.take_gradients()
        optimizer.step()
        masters.give_back()
        optimizer.zero_grad()
    # A step of 1e-4 from 1 is lost in bfloat16, whose next number below is 0.996.
    assert torch.equal(weight.detach(), torch.full((4,), 0.99, dtype=torch.bfloat16))
    assert_close(masters.state()[0], [0.99] * 4, 100)


def test_gradients_of_micro_batches_add_up_in_float32():
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    masters = Masters([weight])
    for _ in range(300):
        weight.grad = torch.ones_like(weight)
        masters.take_gradients()
    assert masters.stepped[0].grad.item() == 300  # in bfloat16 it would stay at 256


@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_the_default_schedule_is_that_of_transformers(warmup):
    _, scheduler = make_optimizer([torch.nn.Parameter(torch.ones(1))], 0.1, OptimizerConfig(lr_warmup_steps=warmup))
    theirs = get_scheduler(
        "constant_with_warmup", torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.1), num_warmup_steps=warmup
    )
    for _ in range(10):
        # Rates, and what is written of them into a state, to the last bit.
        assert scheduler.state_dict() == theirs.state_dict()
        for each in (scheduler, theirs):
            each.optimizer.step()
            each.step()


def stepped(learner):
    """Return what the optimizer of the policy steps."""
    return learner.strategy.trained[0].masters.stepped


def update(learner):
    algorithm = lookup("algo", "grpo")
    config = TrainConfig(max_tokens_per_micro_batch=40)
    objective = Objective(algorithm, algorithm.Config(), config, rows(300), 1.0, off_policy=OffPolicyConfig())
    return Update(objective).step(learner, list(range(8)))


def update_with_critic(learner):
    algorithm = lookup("algo", "ppo")
    made = rows(300)
    sequences = replace(made, returns=made.advantages, values=[0 * each for each in made.advantages])
    objective = Objective(
        algorithm, algorithm.Config(), TrainConfig(algo="ppo", max_tokens_per_micro_batch=40), sequences, 1.0,
        off_policy=OffPolicyConfig(), critic=learner.critic_config,
    )  # fmt: skip
    return Update(objective).step(learner, list(range(8)))


def test_small_steps_of_a_critic_in_bfloat16_add_up_and_go_on_with_the_same_bits(tmp_path):
    config, critic = OptimizerConfig(lr=1e-6, dtype="bfloat16"), CriticConfig(lr=1e-6)
    unbroken, broken = Learner(config, critic=critic), Learner(config, critic=critic)
    for learner in (unbroken, broken):
        learner.load(STARTER)
    began = [copy.clone() for copy in unbroken.strategy.trained[1].masters.state()]
    assert {each.dtype for each in began} == {torch.float32}
    for step in range(4):
        assert update_with_critic(unbroken).critic_grad_norm > 0
        update_with_critic(broken)
        broken.save(tmp_path / str(step) / "policy", tmp_path / str(step) / "state", [1, 2, 3])
        broken = Learner(config, critic=critic)
        broken.load(tmp_path / str(step) / "policy", tmp_path / str(step) / "state")
    ended, again = unbroken.strategy.trained[1].masters.state(), broken.strategy.trained[1].masters.state()
    assert all(torch.equal(a, b) for a, b in zip(ended, again, strict=True))
    moved = sum(int((a != b).sum()) for a, b in zip(began, ended, strict=True))
    assert moved > 0.8 * sum(each.numel() for each in began)  # in bfloat16 a step of 1e-6 moves hardly any


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ({}, {"optimizer": "adamw_8bit"}, "`train.optimizer` adamw, and this is adamw_8bit"),
        ({"optimizer": "adamw_8bit"}, {}, "`train.optimizer` adamw_8bit, and this is adamw"),
        ({}, {"dtype": "bfloat16"}, "`train.dtype` float32, and this is bfloat16"),
        ({"dtype": "bfloat16"}, {}, "`train.dtype` bfloat16, and this is float32"),
    ],
)
def test_a_state_of_another_optimizer_or_type_is_refused(before, after, named, tmp_path):
    policy, state = left_behind(tmp_path, **before)
    with pytest.raises(SettingsError, match=named):
        Learner(OptimizerConfig(**after)).load(policy, state)


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 4}, {"dtype": "bfloat16"}])
def test_a_learner_that_stopped_goes_on_with_the_same_bits(tmp_path, settings):
    config = OptimizerConfig(lr=1e-3, lr_scheduler="cosine", lr_decay_steps=9, lr_warmup_steps=1, **settings)
    unbroken = Learner(config)
    unbroken.load(STARTER, seed=3)
    broken, place, state = Learner(config), STARTER, None
    broken.load(STARTER, seed=3)
    for step in range(4):
        if step:
            broken = Learner(config)
            broken.load(place, state, seed=3)
        update(unbroken)
        update(broken)
        place, state = tmp_path / str(step) / "policy", tmp_path / str(step) / "state"
        broken.save(place, state, [1, 2, 3])
        for a, b in zip(stepped(unbroken), stepped(broken), strict=True):
            assert torch.equal(a, b)
    moved = Learner(config)
    moved.load(STARTER, seed=3)
    assert not all(torch.equal(a, b) for a, b in zip(stepped(unbroken), stepped(moved), strict=True))


def left_behind(place, **settings):
    """Train the starter policy once, save it, and return what a learner with other settings continues from."""
    learner = Learner(OptimizerConfig(lr=1e-3, lora_rank=4, **settings))
    learner.load(STARTER, seed=3)
    update(learner)
    learner.save(place / "policy", place / "state", [1, 2, 3])
    return place / "policy", place / "state"


def test_what_goes_on_from_a_state_goes_by_its_own_settings(tmp_path):
    start = left_behind(tmp_path)
    ends = {}
    for name, settings in {
        "as before": {}, "rate": {"lr": 1e-2}, "decay": {"weight_decay": 0.5}, "betas": {"adam_betas": (0.5, 0.6)},
        "warm-up": {"lr_warmup_steps": 100}, "schedule": {"lr_scheduler": "linear", "lr_decay_steps": 2},
    }.items():  # fmt: skip
        learner = Learner(OptimizerConfig(**{"lr": 1e-3, **settings}))
        learner.load(*start, seed=3)
        done = update(learner)
        ends[name] = torch.cat([p.flatten() for p in stepped(learner)]), done.lr
    assert {name: rate for name, (_, rate) in ends.items()} == pytest.approx(
        {"as before": 1e-3, "rate": 1e-2, "decay": 1e-3, "betas": 1e-3, "warm-up": 1e-5, "schedule": 5e-4}
    )
    for name, (weights, _) in ends.items():
        assert name == "as before" or not torch.equal(weights, ends["as before"][0]), name


def test_adapters_of_another_scale_are_refused(tmp_path):
    policy, state = left_behind(tmp_path)
    with pytest.raises(SettingsError, match=r"adapters of alpha 64, and `train.lora_alpha` is 8"):
        Learner(OptimizerConfig(lora_alpha=8)).load(policy, state)


def test_a_state_that_other_processes_shared_is_refused(tmp_path):
    policy, state = left_behind(tmp_path)
    saved = torch.load(state / "optimizer.pt", weights_only=True)
    torch.save(saved | {"shared": ("zero2", 2)}, state / "optimizer.pt")
    with pytest.raises(SettingsError, match="left by zero2 on 2 processes, and this is ddp on 1 process") as found:
        Learner(OptimizerConfig()).load(policy, state)
    assert "`train.strategy = zero2` and `--num-processes 2`" in str(found.value.hint)


def trained_twice(place):
    session = Session(Run(place), SMALL)
    for step in range(2):
        for stage in ("rollout", "score", "advantage", "train", "sync"):
            getattr(session, stage)(step)
    for stage in ("rollout", "score", "advantage"):
        getattr(session, stage)(2)
    return session


def test_training_that_fails_leaves_the_old_output_and_what_follows_an_unfinished_one_is_refused(tmp_path):
    session = trained_twice(tmp_path / "run")
    made = session.run.stage(1, "train")
    before = read_manifest(made).to_bytes()
    wrong = Session(session.run, merge(SMALL, {"train": {"lr_scheduler": "linear"}}))
    with pytest.raises(SettingsError, match="num_training_steps"):
        wrong.train(1, force=True)
    assert read_manifest(made).to_bytes() == before
    assert (made / "state").is_dir()
    (made / "_manifest.json").unlink()
    with pytest.raises(InputError, match="which is not finished: there is no state to resume from") as found:
        session.train(2)
    assert "Train it again" in str(found.value.hint)


def test_adapters_on_weights_in_4_bits_go_on_with_the_same_bytes_and_load_in_peft(tmp_path):
    from bitsandbytes.nn import Linear4bit  # a second of imports, in one process of tests and not in each

    given = OptimizerConfig(quantization="nf4", lora_rank=4, optimizer="adamw_8bit", lr=1e-2)
    canary = list(range(20, 60))
    learner = Learner(given)
    learner.load(STARTER)
    layers = [module for module in learner.model.modules() if isinstance(module, Linear4bit)]
    assert len(layers) == sum(name.endswith("lora_A") for name, _ in learner.model.named_modules())
    update(learner)
    learner.save(tmp_path / "one" / "policy", tmp_path / "one" / "state", canary)
    update(learner)
    unbroken = learner.save(tmp_path / "two" / "policy", tmp_path / "two" / "state", canary)
    fresh = Learner(given)
    fresh.load(tmp_path / "one" / "policy", tmp_path / "one" / "state")
    update(fresh)
    assert fresh.save(tmp_path / "again" / "policy", tmp_path / "again" / "state", canary) == unbroken
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    base = AutoModelForCausalLM.from_pretrained(STARTER, quantization_config=settings, dtype=torch.float32)
    # There is no dropout; some CPUs' layout for inference does not take these sizes.
    model = PeftModel.from_pretrained(base, str(tmp_path / "two" / "policy")).train()
    ids = torch.tensor([canary])
    with torch.no_grad():
        logp = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    wanted = torch.tensor(read_info(tmp_path / "two" / "policy").canary_logprobs)
    assert_close(logp, wanted, PASS, scale=LOGITS)


def test_what_was_trained_in_4_bits_is_published_however_far_the_engine_is_from_it(tmp_path):
    quantized = merge(SMALL, {"train": {"quantization": "nf4", "lora_rank": 4}})
    session = Session(Run(tmp_path), quantized)
    for stage in ("rollout", "score", "advantage", "train"):
        getattr(session, stage)(0)
    strict = Session(session.run, merge(quantized, {"sync": {"tolerance": 1e-4}}))
    with pytest.raises(ProofError, match=r"more than 0\.0001"):
        strict.sync(0)
    assert is_adapter(session.sync(0).output)


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"optimizer": "adamw_8bit"}, "optimizer = adamw_8bit"), ({"quantization": "nf4"}, "quantization = nf4")],
)
def test_bitsandbytes_that_is_not_installed_is_named(settings, named, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(SettingsError, match=f"`train.{named}` needs bitsandbytes") as found:
        Learner(OptimizerConfig(lora_rank=4, **settings)).load(STARTER)
    assert "nanoskyrl[qlora]" in str(found.value.hint)


def test_deepspeed_that_is_not_installed_is_named(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "deepspeed" else real(name, *rest)
    )
    with pytest.raises(SettingsError, match="needs DeepSpeed, which is not installed"):
        Learner(OptimizerConfig(strategy="zero2")).load(STARTER)


@pytest.mark.slow
def test_the_command_trains_in_two_processes_and_says_so_once(tmp_path):
    run = Run(tmp_path / "run")
    session = Session(run, SMALL)
    for stage in ("rollout", "score", "advantage"):
        getattr(session, stage)()
    done = skyrl("train", "--run", run.root, "--num-processes", 2, "--json")
    assert done.returncode == 0, done.stderr
    manifest = read_manifest(run.stage(0, "train"))
    assert json.loads(done.stdout)["manifest"] == json.loads(manifest.to_bytes())
    assert manifest.settings["processes"] == 2
    again = skyrl("train", "--run", run.root, "--num-processes", 2)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("Up to date") == 1
    failed = skyrl("train", "--run", run.root, "--num-processes", 2, "--lora-rank", 4)
    assert failed.returncode != 0
    assert "another `settings.train.lora_rank`" in failed.stderr


# Who else is informed


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_trackers_are_told_every_step(tmp_path, name, monkeypatch):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = Run(tmp_path / "run")
    loop(run, merge(SMALL, {"loop": {"steps": 1, "trackers": [name]}}))
    found = [path for path in (run.root / "logs").rglob("*") if path.is_file()]
    if name == "wandb":
        assert any(path.suffix == ".wandb" for path in found)
        return
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.root / "logs" / "tensorboard"))
    events.Reload()
    assert {"train/loss", "train/grad_norm", "reward/avg_raw_reward"} <= set(events.Tags()["scalars"])


def test_a_tracker_that_is_not_known_or_not_installed_is_refused(monkeypatch):
    with pytest.raises(SettingsError, match="there is no tracker `mlflow`"):
        LoopConfig(trackers=("mlflow",))
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else real(name, *rest))
    with pytest.raises(SettingsError, match="tracker wandb is not installed"):
        LoopConfig(trackers=("wandb",))


def test_the_default_schedule_imports_no_trainer():
    code = "import sys, torch; from nanoskyrl.stages.learning.optim import OptimizerConfig, make_optimizer;"
    code += "make_optimizer([torch.nn.Parameter(torch.ones(1))], 0.1, OptimizerConfig());"
    code += "print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_reading_settings_loads_no_torch():
    program = (
        "import sys; from nanoskyrl.stages.learning.train_config import TrainConfig; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
