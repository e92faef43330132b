"""Weights in shards that are written at the same time, and states beside the next step."""

import errno

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_model

from nanoskyrl.stages.core.digests import digest_file
from nanoskyrl.stages.core.errors import OutputError
from nanoskyrl.stages.engines.hf import HfConfig, HfEngine
from nanoskyrl.stages.learning import state_files
from nanoskyrl.stages.learning.learner import Learner
from nanoskyrl.stages.learning.train_config import COMPILED_FROM, OptimizerConfig
from nanoskyrl.stages.looking import engine_checks
from nanoskyrl.stages.models import write_policy
from nanoskyrl.stages.models.policy import STARTER_DIRECTORY, resolve_policy


def test_shards_hold_what_one_file_holds(tmp_path, monkeypatch):
    model = tiny_model("qwen2")
    for name, size in (("one", 1 << 28), ("many", 1 << 13)):
        monkeypatch.setattr(write_policy, "SHARD_BYTES", size)
        write_policy.write_policy(model, tmp_path / name / "policy", start=STARTER_DIRECTORY, adapter=False)
    (one,), many = (sorted((tmp_path / name / "policy").glob("*.safetensors")) for name in ("one", "many"))
    assert len(many) > 1
    assert (tmp_path / "many" / "policy" / "model.safetensors.index.json").is_file()
    whole = load_file(one)
    parts = {name: tensor for file in many for name, tensor in load_file(file).items()}
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())


def test_an_engine_that_is_up_takes_a_policy_in_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(write_policy, "SHARD_BYTES", 1 << 20)
    engine, learner = HfEngine(HfConfig()), Learner(OptimizerConfig())
    learner.load(resolve_policy("starter"))
    for step in range(2):
        for weights in learner.model.parameters():
            weights.data += 0.01
        learner.save(tmp_path / str(step) / "policy", tmp_path / str(step) / "state", [1, 2, 3])
    first, second = (tmp_path / str(step) / "policy" for step in range(2))
    assert len(list(second.glob("*.safetensors"))) > 1
    assert engine_checks._a_layer(second).endswith("layers.0.")
    engine.load(first)
    held = engine._model
    engine.load(second)
    assert engine._model is held
    fresh = HfEngine(HfConfig())
    fresh.load(second)
    assert engine.logprobs([5, 6, 7, 8]) == fresh.logprobs([5, 6, 7, 8])


def test_a_shard_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    real, calls = write_policy.modeling_utils.safe_save_file, []

    def full(tensors, file, **more):
        calls.append(file)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, file, **more)

    monkeypatch.setattr(write_policy.modeling_utils, "safe_save_file", full)
    monkeypatch.setattr(write_policy, "SHARD_BYTES", 1 << 13)
    with pytest.raises(OutputError, match="No space left"):
        write_policy.write_policy(tiny_model("qwen2"), tmp_path / "policy", start=STARTER_DIRECTORY, adapter=False)
    assert write_policy.modeling_utils.safe_save_file is full


def test_a_state_beside_the_next_step_has_the_bytes_of_one_that_is_waited_for(tmp_path):
    learner = Learner(OptimizerConfig())
    learner.load(resolve_policy("starter"))
    waited = learner.save_state(tmp_path / "waited" / "state")
    beside = learner.save_state(tmp_path / "beside" / "state", beside=True)
    for weights in learner.model.parameters():
        weights.data.zero_()  # as the next step might: what is on its way is a copy
    learner.settle()
    assert waited == beside
    assert {file.name: digest_file(file) for file in (tmp_path / "beside" / "state").iterdir()} == beside


def test_a_state_that_cannot_be_written_is_told_when_it_is_waited_for(tmp_path, monkeypatch):
    learner = Learner(OptimizerConfig())
    learner.load(resolve_policy("starter"))
    monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    learner.save_state(tmp_path / "state", beside=True)
    with pytest.raises(OutputError, match=r"state/optimizer\.pt"):
        learner.settle()
    assert not (tmp_path / "state").exists()
    assert not list(tmp_path.rglob("optimizer.pt*"))  # the disk gets its room back


def test_a_state_that_another_process_puts_in_place_first_is_there(tmp_path, monkeypatch):
    learner = Learner(OptimizerConfig())
    learner.load(resolve_policy("starter"))
    real = state_files.sync_directory

    def overtaken(folder):
        if folder.name == "state.tmp":
            folder.rename(tmp_path / "state")
        real(folder)

    monkeypatch.setattr(state_files, "sync_directory", overtaken)
    assert set(learner.save_state(tmp_path / "state")) == {file.name for file in (tmp_path / "state").iterdir()}


@pytest.mark.parametrize("at_once", [1, 10_000, 1 << 30])
def test_a_state_is_hashed_in_pieces_as_its_files_would_be(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(state_files, "HASHED_AT_ONCE", at_once)
    learner = Learner(OptimizerConfig())
    learner.load(resolve_policy("starter"))
    digests = learner.save_state(tmp_path / "state")
    assert digests == {file.name: digest_file(file) for file in (tmp_path / "state").iterdir()}


def test_ctrl_c_while_a_state_is_taken_is_ctrl_c(tmp_path, monkeypatch):
    learner = Learner(OptimizerConfig())
    learner.load(resolve_policy("starter"))
    left = [10]
    real = state_files._Pieces.write

    def write(pieces, data):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return real(pieces, data)

    monkeypatch.setattr(state_files._Pieces, "write", write)
    with pytest.raises(KeyboardInterrupt):
        learner.save_state(tmp_path / "state")


def test_compiling_is_chosen_where_a_gpu_trains_for_long():
    learner = Learner(OptimizerConfig())
    learner.load(resolve_policy("starter"))
    learner.loop_steps = COMPILED_FROM
    assert not learner._compiles()
    learner.device = "cuda"
    assert learner._compiles()
    learner.loop_steps -= 1
    assert not learner._compiles()
