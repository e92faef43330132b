"""Several scores of a step side by side: a second opinion changes nothing of the run."""

import json
import shutil

import pytest
from running import skyrl_here

from nanoskyrl.stages.core.manifest import read_manifest
from nanoskyrl.stages.looking.ask import ask

STRICT = """
def strict(trajectory):
    return 1.0 if len(trajectory.turns) == 1 and trajectory.status == "completed" else -1.0
"""


@pytest.fixture
def run(finished_run, tmp_path, monkeypatch):
    """Return a copy of the run, in a folder with a reward of the user's."""
    shutil.copytree(finished_run, tmp_path / "run")
    (tmp_path / "my_strict.py").write_text(STRICT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "run"


def bytes_of(run):
    return {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_second_score_and_its_advantages_leave_the_run_as_it_was(run):
    before = bytes_of(run)
    done = skyrl_here("score", "--run", run, "--name", "strict", "--reward", "my_strict:strict")
    assert done.returncode == 0, done.stderr
    assert "skyrl advantage --score strict" in done.stderr
    done = skyrl_here("advantage", "--run", run, "--score", "strict")
    assert done.returncode == 0, done.stderr
    after = bytes_of(run)
    assert {name: after[name] for name in before} == before  # metrics.jsonl and run.toml, too
    new = {str(name.parent) for name in after if name not in before}
    assert new == {"step-000001/score-strict", "step-000001/advantage-strict"}
    made = read_manifest(run / "step-000001/advantage-strict")
    assert made.inputs["score"] == read_manifest(run / "step-000001/score-strict").digest


def test_opinions_are_compared_and_asked_about(run):
    for step in (0, 1):
        place = run / f"step-00000{step}"
        done = skyrl_here("score", place / "rollout", "--run", run, "--name", "strict", "--reward", "my_strict:strict")
        assert done.returncode == 0, done.stderr
    shown = skyrl_here("diff", place / "score", place / "score-strict", "--json")
    assert shown.returncode == 1
    found = {one["what"] for one in json.loads(shown.stdout)["differences"]}
    assert {"reward", "reward_parts"} <= found
    assert not {"response_ids", "rollout_logprobs", "status", "turns"} & found
    query = 'select count(*), avg(b.reward) from score a join "score-strict" b using (step, trajectory_id)'
    rows = ask(
        run, "select avg(case when len(turns) = 1 and status = 'completed' then 1 else -1 end) from rollout"
    ).rows
    assert ask(run, query).rows == [(32, rows[0][0])]


def test_a_second_opinion_is_verified_and_the_loop_goes_its_way(run):
    assert skyrl_here("score", "--run", run, "--name", "strict", "--reward", "my_strict:strict").returncode == 0
    assert skyrl_here("advantage", "--run", run, "--score", "strict").returncode == 0
    shown = skyrl_here("verify", run)
    assert shown.returncode == 0, shown.stderr
    part = run / "step-000001/score-strict/part-00001.parquet"
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    assert "score-strict" in skyrl_here("verify", run).stderr
    shown = skyrl_here("loop", "--run", run)
    assert shown.returncode == 0, shown.stderr
    assert part.is_file()


def test_output_elsewhere_in_a_step_writes_no_numbers_of_the_step(run):
    numbers = (run / "metrics.jsonl").read_bytes()
    done = skyrl_here("score", "--run", run, "--out", run / "step-000001/mine", "--reward", "my_strict:strict")
    assert done.returncode == 0, done.stderr
    assert (run / "metrics.jsonl").read_bytes() == numbers


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("score", "--name", "../x"), "cannot be a name"),
        (("score", "--name", ""), "cannot be a name"),
        (("advantage", "--score", "lenient"), "skyrl score --name lenient"),
        (("advantage", "run/step-000000/score", "--score", "lenient"), "are two of one"),
    ],
)
def test_names_that_cannot_be_used_are_refused(run, command, words):
    shown = skyrl_here(*command, "--run", run)
    assert (shown.returncode, words in shown.stderr) == (2, True), shown.stderr
