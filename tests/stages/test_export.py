"""An exported policy: what others load gives the run's own log-probs."""

import stat

import pytest
import torch
from running import SMALL, skyrl_here
from safetensors.torch import load_file
from tolerances import LOGITS, PASS, assert_close

from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.models.policy import policy_digest, read_info
from nanoskyrl.stages.running.loop import loop


@pytest.fixture(scope="module", params=[0, 4], ids=["whole", "adapter"])
def run(request, tmp_path_factory):
    """A run of two steps, of the whole model and of adapters."""
    root = tmp_path_factory.mktemp("runs") / "mine"
    changes = {"loop": {"steps": 2}, "train": {"lora_rank": request.param, "lr": 1e-2}}
    loop(Run(root), merge(SMALL, changes))
    return Run(root)


def own(run):
    info = read_info(run.policy(2))
    return info.canary_ids, info.canary_logprobs


def logprobs(model, ids):
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([ids])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]


def is_lora(run):
    return (run.policy(2) / "adapter_config.json").is_file()


def load(place):
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    kind = AutoPeftModelForCausalLM if (place / "adapter_config.json").is_file() else AutoModelForCausalLM
    return kind.from_pretrained(place, dtype=torch.float32)


@pytest.mark.parametrize("flags", [(), ("--merge",), ("--merge", "--dtype", "float32")], ids=str)
def test_what_transformers_and_peft_load_gives_the_runs_own_logprobs(run, flags, tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = skyrl_here("export", f"{run.root}@2", "--to", tmp_path / "out", *flags)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    ids, nats = own(run)
    assert_close(logprobs(load(tmp_path / "out"), ids), nats, PASS, scale=LOGITS)
    assert (tmp_path / "out" / "adapter_config.json").exists() is (is_lora(run) and not flags)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def test_other_users_may_read_it(run, tmp_path):
    assert skyrl_here("export", run.root, "--to", tmp_path / "out").returncode == 0
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o755
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out").iterdir()} == {0o644}


def test_weights_are_of_the_type_that_is_asked_for(run, tmp_path):
    assert skyrl_here("export", run.root, "--to", tmp_path / "out", "--dtype", "bfloat16").returncode == 0
    weights = next((tmp_path / "out").glob("*.safetensors"))
    assert {value.dtype for value in load_file(weights).values()} == {torch.bfloat16}
    ids, nats = own(run)
    assert (logprobs(load(tmp_path / "out"), ids) - torch.tensor(nats)).abs().mean() < 0.1


def test_the_card_names_run_data_algorithm_and_evaluation(run, tmp_path):
    assert skyrl_here("eval", "--run", run.root, "--limit", 4).returncode in (0, 2)
    assert skyrl_here("export", run.root, "--to", tmp_path / "out").returncode == 0
    text = (tmp_path / "out" / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: " + ("peft" if is_lora(run) else "transformers"))
    for part in (
        "`mine`, policy 2",
        policy_digest(run.policy(2)),
        "`text_math`",
        "`grpo`",
        "2 optimizer steps",
        "Success",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("RUN@7",), "has no policy 7"),
        (("RUN@x",), "names no policy"),
        (("nowhere",), "is no run with a published policy"),
        (("RUN", "--dtype", "int8"), "`export.dtype`"),
    ],
)
def test_what_cannot_be_exported_is_refused(run, arguments, says, tmp_path):
    name, *flags = (str(part).replace("RUN", str(run.root)) for part in arguments)
    done = skyrl_here("export", name, "--to", tmp_path / "out", *flags)
    assert done.returncode == 2
    assert says in done.stderr
    assert not (tmp_path / "out").exists()


def test_what_is_there_stays(run, tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    done = skyrl_here("export", run.root, "--to", tmp_path)
    assert done.returncode == 1
    assert "is there already" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["note.txt"]
