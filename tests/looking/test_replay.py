"""`skyrl replay`: recorded actions meet the same environment, or it is said what they meet."""

import json
import shutil

import pytest
from outputs import edit_part
from running import skyrl_here

from nanoskyrl.envs.worlds.tool_use import calculator
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.looking.ask import ask
from nanoskyrl.stages.looking.replay import replay


def some_id(run, where):
    return ask(run, f"select trajectory_id from trajectories where {where} order by trajectory_id limit 1").rows[0][0]


def test_every_recorded_attempt_plays_again_as_it_was(finished_run):
    ids = [name for (name,) in ask(finished_run, "select trajectory_id from trajectories").rows]
    for name in ids:
        found = replay(Run(finished_run), name)
        assert found.differences == []
        assert found.turns > 0


def test_a_changed_tool_is_named_by_turn(finished_run, monkeypatch):
    name = ask(finished_run, "select trajectory_id from tool_calls where ok and tool = 'calculator' limit 1").rows[0][0]

    def zero(expression: str) -> str:
        """Return nothing but 0."""
        return "0"

    monkeypatch.setattr(calculator, "calculator", zero)
    shown = skyrl_here("replay", name[:12], "--run", finished_run)
    assert shown.returncode == 1
    assert "turn 0 calls.0.result: " in shown.stdout
    assert "-> 0" in shown.stdout


def test_another_record_is_named(finished_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    part = run / "step-000001/advantage/part-00000.parquet"

    def put(values):
        values[0][0]["observation"] = "something else"

    edit_part(part, "turns", put)
    edit_part(part, "reward", lambda values: values.__setitem__(0, 0.375))
    manifest = json.loads((run / "step-000001/advantage/_manifest.json").read_text())
    from nanoskyrl.stages.core.digests import digest_file
    from nanoskyrl.stages.core.shards import read_part

    manifest["parts"][0]["digest"] = digest_file(part)
    (run / "step-000001/advantage/_manifest.json").write_text(json.dumps(manifest))
    name = read_part(part).column("trajectory_id")[0].as_py()
    shown = skyrl_here("replay", name[:10], "--run", run)
    assert shown.returncode == 1
    assert "turn 0 observation: something else -> " in shown.stdout
    assert "score reward: 0.375 -> " in shown.stdout


def test_settings_of_then_are_used_and_not_those_of_now(finished_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    assert skyrl_here("set", run, "tool_use.level=3").returncode == 0
    assert replay(Run(run), some_id(run, "step = 0")).differences == []


@pytest.mark.parametrize(("start", "words"), [("", "begins 32 ids"), ("zzz", "has an id that begins with")])
def test_an_id_that_is_none_or_several_is_refused(finished_run, start, words):
    shown = skyrl_here("replay", start, "--run", finished_run)
    assert (shown.returncode, words in shown.stderr) == (2, True)
