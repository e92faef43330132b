"""Plug-ins, data and terminals at their worst: one error or one failed row each, and never a traceback."""

import json
import sys

import pytest

from nanoskyrl.stages.core.storage import as_path
from nanoskyrl_cli.main import run as skyrl

PLUGINS = """
from nanoskyrl.envs.base import Observation, Score, Step, Task
from nanoskyrl.envs.worlds.text_math.environment import TextMath, TextMathEpisode

class Base(TextMath):
    kind = None
    def start(self):
        return Episode(self.kind)

class Episode(TextMathEpisode):
    def __init__(self, kind): self.kind = kind
    def reset(self, task, seed):
        if self.kind == "reset_none": return None
        if self.kind == "prints": print("reset")
        if self.kind == "reset_exit": raise SystemExit(0)
        if self.kind == "no_content": return Observation(messages=[{"role": "user"}])
        if self.kind == "metadata": return Observation(messages=[{"role": "user", "content": "x"}], metadata={"a": object()})
        return super().reset(task, seed)
    def step(self, action):
        if self.kind == "step_none": return None
        if self.kind == "reward_text": return Step(done=True, reward="much")
        if self.kind == "odd_role": return Step(done=False, messages=[{"role": "[/red]", "content": "[bold]\\ud800"}])
        return super().step(action)

def make(kind):
    return type(kind, (Base,), {"kind": kind})

for kind in ("reset_none", "reset_exit", "no_content", "metadata", "step_none", "reward_text", "odd_role", "prints"):
    globals()[kind] = make(kind)

class tasks_none(Base):
    def tasks(self, split): return None
class tasks_raise(Base):
    def tasks(self, split): raise RuntimeError("no tasks today")
class tasks_numbers(Base):
    def tasks(self, split): return [1, 2, 3]
class init_raise(Base):
    def __init__(self, config): raise RuntimeError("no")
number = 5

def text(t): return "much"
def nan(t): return float("nan")
def printing(t):
    print("judging")
    return 1.0
def large(t): return 1e308
def leave(t): raise SystemExit(0)
def odd_success(t): return Score(reward=1.0, success="yes")
def odd_parts(t): return Score(reward=1.0, parts={"a": object()})
def numpy_values(t):
    import numpy as np
    return Score(reward=np.float32(1), success=np.bool_(True), parts={"a": np.float32(0.5)})
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "odd_plugins.py").write_text(PLUGINS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("odd_plugins", None)


def rollout(env="text_math", *flags):
    return skyrl(
        [
            "rollout",
            "--env",
            env,
            "--engine",
            "scripted",
            "--train-batch-size",
            "1",
            "--n-samples-per-prompt",
            "2",
            *flags,
        ]
    )


@pytest.mark.parametrize("kind", ["reset_none", "reset_exit", "no_content", "metadata", "step_none", "reward_text"])
def test_an_episode_that_returns_nonsense_fails_its_rows(here, kind, capsys):
    assert rollout(f"odd_plugins:{kind}") == 3
    assert skyrl(["score"]) == 0
    assert "0 of 2 rows scored (skipped 2)" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["tasks_none", "tasks_raise", "tasks_numbers", "init_raise", "number"])
def test_an_environment_that_cannot_begin_is_one_error_and_leaves_no_run(here, kind, capsys):
    assert rollout(f"odd_plugins:{kind}") == 2
    assert capsys.readouterr().err.startswith(f"error: environment `odd_plugins:{kind}` failed: ")
    assert not (here / "runs").exists()


@pytest.mark.parametrize("name", ["text", "nan", "large", "leave", "odd_success", "odd_parts"])
def test_a_reward_that_is_none_leaves_its_rows_unjudged(here, name, capsys):
    assert rollout() == 0
    assert skyrl(["score", "--reward", f"odd_plugins:{name}"]) == 3
    assert "0 of 2 rows scored (verifier_error 2)" in capsys.readouterr().err


def test_numpy_numbers_are_numbers(here, capsys):
    assert rollout() == 0
    assert skyrl(["score", "--reward", "odd_plugins:numpy_values"]) == 0
    assert "success 1.000, reward 1.000" in capsys.readouterr().err


def test_what_looks_like_markup_is_shown_as_it_is(here, capsys):
    assert rollout("odd_plugins:odd_role", "--max-turns", "2") == 0
    assert skyrl(["show", "runs/default/step-000000/rollout", "--row", "0"]) == 0
    out = capsys.readouterr().out
    assert "[/red]" in out
    assert "[bold]" in out


def test_a_data_set_that_changed_is_another_input(here, capsys):
    path = here / "tasks.jsonl"
    path.write_text(json.dumps({"prompt": "a?", "ground_truth": "b"}))
    assert rollout("text_math", "--data", str(path), "--out", "out") == 0
    path.write_text(json.dumps({"prompt": "a?", "ground_truth": "c"}))
    assert rollout("text_math", "--data", str(path), "--out", "out") == 2
    assert "another `inputs.data`" in capsys.readouterr().err


@pytest.mark.parametrize(
    "row", ['{"id": "a\\ud800", "prompt": "a\\ud800", "answer": "b"}', '{"prompt": "\\u0000", "answer": 1e999}']
)
def test_odd_rows_of_a_data_set_are_attempted(here, row):
    (here / "tasks.jsonl").write_text(row)
    assert rollout("text_math", "--data", "tasks.jsonl") == 0


@pytest.mark.parametrize("contents", ['{"a": ' * 100_000, "[]", '{"schema_version": 1, "parts": 3}'])
def test_a_manifest_that_is_nonsense_is_one_error(here, contents, capsys):
    assert rollout() == 0
    (here / "runs/default/step-000000/rollout/_manifest.json").write_text(contents)
    for command in (["score"], ["show", "runs/default/step-000000/rollout"]):
        assert skyrl(command) == 2
    assert skyrl(["verify"]) == 1
    capsys.readouterr()


def test_a_run_may_lie_behind_a_url_and_a_file_url_is_local(here):
    assert rollout("text_math", "--run", "memory://attacked") == 0
    assert as_path("memory://attacked/step-000000/rollout/_manifest.json").is_file()
    assert rollout("text_math", "--out", f"file://{here}/out") == 0
    assert (here / "out" / "_manifest.json").is_file()


def test_a_forced_loop_settles_on_its_new_settings(here):
    small = [
        "--set",
        "rollout.train_batch_size=2",
        "--set",
        "rollout.n_samples_per_prompt=2",
        "--set",
        "rollout.max_generate_length=8",
    ]
    assert skyrl(["loop", "--steps", "1", *small]) == 0
    assert skyrl(["rollout"]) == 0
    assert skyrl(["loop", "--steps", "2", "--set", "rollout.temperature=0.9"]) == 2
    assert skyrl(["loop", "--steps", "2", "--set", "rollout.temperature=0.9", "--force"]) == 0
    assert skyrl(["loop", "--steps", "2"]) == 0


def test_what_a_plug_in_prints_does_not_mix_with_the_data(here, capfd):
    (here / "loud_plugin.py").write_text("from odd_plugins import prints\nprint('imported')\n")
    assert rollout("loud_plugin:prints", "--json") == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["manifest"]["stage"] == "rollout"
    assert "imported" in err
    assert "reset" in err
    assert skyrl(["score", "--reward", "odd_plugins:printing", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["manifest"]["stage"] == "score"
    assert "judging" in err
