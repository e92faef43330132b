"""S6: code in a policy's folder runs only where the user's setting says so, and nothing asks."""

import contextlib
import json
import shutil
import subprocess
import sys
import warnings

import pytest
from running import skyrl

from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.models import loading
from nanoskyrl.stages.models.policy import STARTER_DIRECTORY, policy_files
from nanoskyrl.stages.models.remote_code import allow_code, trust

MODULE = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import Qwen3Config, Qwen3ForCausalLM, PreTrainedTokenizerFast

class OwnConfig(Qwen3Config): ...
class OwnModel(Qwen3ForCausalLM): ...
class OwnTokenizer(PreTrainedTokenizerFast): ...
"""
CONFIG, MODEL, TOKENIZER = "own.OwnConfig", "own.OwnModel", ["own.OwnTokenizer", "own.OwnTokenizer"]
WAYS = {
    "a config of an unknown kind": ({"auto_map": {"AutoConfig": CONFIG}, "model_type": "own_kind"}, {}),
    "a config of a known kind": ({"auto_map": {"AutoConfig": CONFIG}}, {}),
    "a model": ({"auto_map": {"AutoModelForCausalLM": MODEL}}, {}),
    "a model of an unknown kind": (
        {"auto_map": {"AutoConfig": CONFIG, "AutoModelForCausalLM": MODEL}, "model_type": "own_kind"}, {},
    ),
    "a tokenizer": ({}, {"auto_map": {"AutoTokenizer": TOKENIZER}, "tokenizer_class": "OwnTokenizer"}),
    "a tokenizer named in the config": ({"auto_map": {"AutoTokenizer": TOKENIZER}}, {"tokenizer_class": "OwnTokenizer"}),
    "the base class": ({"auto_map": {"AutoModel": MODEL, "AutoConfig": CONFIG}}, {"auto_map": {"AutoTokenizer": TOKENIZER}}),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """Return a maker of policies that bring code, and the file that it writes when it runs."""

    def make(way):
        policy, marker = tmp_path / "policy", tmp_path / "marker"
        policy.mkdir()
        for file in policy_files(STARTER_DIRECTORY):
            shutil.copyfile(file, policy / file.name)
        for name, changes in zip(("config.json", "tokenizer_config.json"), WAYS[way], strict=True):
            found = json.loads((policy / name).read_text())
            (policy / name).write_text(json.dumps({**found, **changes}))
        (policy / "own.py").write_text(MODULE.format(marker=str(marker)))
        return policy, marker

    yield make
    allow_code(False)


def load(policy):
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loading.load_tokenizer(policy)
        loading.load_model(policy, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("way", WAYS)
def test_no_code_of_a_policy_runs_and_nothing_asks(way, folder, monkeypatch):
    policy, marker = folder(way)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    with contextlib.suppress(InputError):  # what transformers knows itself does load
        load(policy)
    assert not marker.exists()


def test_the_setting_lets_it_run(folder):
    policy, marker = folder("a model")
    allow_code(True)
    assert trust() == {"trust_remote_code": True}
    load(policy)
    assert marker.exists()


@pytest.mark.slow
def test_yes_on_standard_input_runs_nothing(folder, tmp_path):
    policy, marker = folder("a config of an unknown kind")
    command = [
        sys.executable,
        "-m",
        "nanoskyrl_cli.main",
        "eval",
        "--policy",
        str(policy),
        "--run",
        str(tmp_path / "run"),
    ]
    ran = subprocess.run([*command, "--limit", "1"], input="y\n" * 99, capture_output=True, text=True, check=False)
    assert ran.returncode == 2, ran.stderr
    assert not marker.exists()


@pytest.mark.slow
def test_the_command_takes_the_setting(folder, tmp_path):
    policy, marker = folder("a model")
    done = skyrl(
        "rollout", "--run", tmp_path / "run", "--set", f"run.policy={policy}", "--set", "run.trust_remote_code=true",
        "--set", "rollout.train_batch_size=1", "--set", "rollout.n_samples_per_prompt=1",
        "--set", "rollout.max_generate_length=4",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert marker.exists()
