"""`skyrl sql`: a run as tables that can only be read."""

import json
import shutil
from pathlib import Path

import pytest
from running import skyrl_here

from nanoskyrl.stages.core.rows import to_table
from nanoskyrl.stages.core.shards import read_part, write_part
from nanoskyrl.stages.core.trajectory import ToolCall, Turn
from nanoskyrl.stages.looking.ask import ask, questions, tables

ALL = "select * from trajectories"


def numbers(run, query):
    return ask(run, query).rows


def test_every_stage_of_every_step_is_a_table(finished_run):
    assert numbers(finished_run, "select step, count(*) from rollout group by step order by step") == [(0, 16), (1, 16)]
    found = tables(finished_run)
    assert {"rollout", "score", "advantage", "train", "trajectories", "turns", "tool_calls", "tokens"} <= set(found)
    assert {"evaluations", "outputs", "policies", "metrics"} <= set(found)


def test_the_tables_hold_what_the_shards_hold(finished_run):
    table = read_part(finished_run / "step-000001/score/part-00001.parquet")
    ids = ", ".join(f"'{name}'" for name in table.column("trajectory_id").to_pylist())
    query = f"select response, reward, rollout_logprobs from trajectories where trajectory_id in ({ids})"
    ours = sorted(map(repr, numbers(finished_run, query)))
    names = ("response", "reward", "rollout_logprobs")
    assert ours == sorted(repr(tuple(row[name] for name in names)) for row in table.to_pylist())
    tokens = numbers(finished_run, f"select count(*), sum(token_id) from tokens where trajectory_id in ({ids})")
    flat = table.column("response_ids").combine_chunks().flatten()
    assert tokens == [(len(flat), sum(flat.to_pylist()))]


def test_turns_and_calls_are_flat(finished_run):
    turns, calls = 0, []
    for step in (0, 1):
        for part in (0, 1):
            for row in read_part(finished_run / f"step-{step:06d}/rollout/part-{part:05d}.parquet").to_pylist():
                turns += len(row["turns"])
                calls += [call for turn in row["turns"] for call in json.loads(turn["tool_calls"])]
    assert numbers(finished_run, "select count(*) from turns") == [(turns,)]
    found = numbers(finished_run, "select count(*), count(*) filter (ok) from tool_calls")
    assert found == [(len(calls), sum(call["ok"] for call in calls))]


@pytest.mark.parametrize("name", questions())
def test_saved_questions_are_answered(finished_run, name):
    shown = skyrl_here("sql", finished_run, "--question", name, "--json")
    assert shown.returncode == 0, shown.stderr
    assert isinstance(json.loads(shown.stdout), list)


def test_signal_is_that_of_the_metrics(finished_run):
    shown = json.loads(skyrl_here("sql", finished_run, "--question", "signal", "--json").stdout)
    query = "select step, value from metrics where name = 'reward/groups_with_signal' order by step"
    assert [(row["step"], row["with_signal"]) for row in shown] == numbers(finished_run, query)
    shares = [row["with_signal"] + row["all_right"] + row["all_wrong"] for row in shown]
    assert shares == pytest.approx([1.0] * len(shares))


def test_who_made_a_trajectory(finished_run):
    (name, version), *_ = numbers(finished_run, "select trajectory_id, policy_version from trajectories where step = 1")
    shown = skyrl_here("sql", finished_run, "--question", "who-made", "--id", name[:10], "--json")
    (row,) = json.loads(shown.stdout)
    assert (row["trajectory_id"], row["policy"], row["trained_in_step"], row["by"]) == (name, version, 0, "grpo")


def test_a_run_that_has_only_begun_answers_too(finished_run, tmp_path):
    shutil.copytree(finished_run / "step-000000/rollout", tmp_path / "run/step-000000/rollout")
    assert numbers(tmp_path / "run", "select count(*), count(reward), count(kept) from trajectories") == [(16, 0, 0)]
    for name in questions():
        shown = skyrl_here("sql", tmp_path / "run", "--question", name)
        assert shown.returncode == 0, shown.stderr


def test_the_directory_of_a_stage_is_a_database(finished_run):
    for place, rows in (("step-000001/score", 16), ("evals/00000002/tool_use", 4)):
        assert numbers(finished_run / place, "select count(*) from trajectories") == [(rows,)]


HOSTILE = [
    "select * from read_csv('/etc/passwd')",
    "from read_text('/etc/passwd')",
    "select * from '/etc/passwd'",
    "select * from glob('/*')",
    "copy trajectories to 'out.csv'",
    "copy (select 1) to '/tmp/nanoskyrl-never.csv'",
    "create table mine as select 1",
    "drop view trajectories",
    "insert into metrics values (1, 'a', 0, 'a', 0, 'a')",
    "attach 'other.db'",
    "install httpfs",
    "load httpfs",
    "set enable_external_access = true",
    "pragma enable_profiling",
    "export database 'out'",
    "call duckdb_settings()",
    "explain analyze copy trajectories to 'out.csv'",
    "select 1; drop view trajectories",
    "with one as (select 1) select * from one; copy metrics to 'out.csv'",
    "select * from query('copy metrics to ''out.csv''')",
    "select * from os",
    "prepare p as select 1",
    "",
    "selec 1",
    "select nothing from trajectories",
    "select * from https('x')",
]


@pytest.mark.parametrize("query", HOSTILE)
def test_nothing_but_a_select_over_the_run_is_taken(finished_run, query, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in finished_run.rglob("*")}
    shown = skyrl_here("sql", finished_run, query)
    assert shown.returncode == 2
    assert shown.stderr.startswith("error: ")
    assert "Traceback" not in shown.stderr
    assert list(tmp_path.iterdir()) == []
    assert {path: path.stat().st_mtime_ns for path in finished_run.rglob("*")} == before


def test_a_part_of_the_run_cannot_be_overwritten_though_it_can_be_read(finished_run):
    part = finished_run / "step-000000/rollout/part-00000.parquet"
    assert skyrl_here("sql", finished_run, f"select count(*) from '{part}'").returncode in (0, 2)
    before = part.read_bytes()
    assert skyrl_here("sql", finished_run, f"copy (select 1) to '{part}'").returncode == 2
    assert part.read_bytes() == before


def test_what_a_model_wrote_is_shown_and_never_sent(finished_run, tmp_path, make_trajectory):
    place = tmp_path / "rollout"
    shutil.copytree(finished_run / "step-000000/rollout", place)
    call = ToolCall(tool="x\ud800", args={"a": "é\udc00"}, result="\x1b[2J", ok=False, error="malformed")
    turn = Turn(action="\x1b]0;title\x07", observation="", done=True, tool_calls=[call], first_token=0, token_count=2)
    rows = [make_trajectory(trajectory_id=f"t{i}", turns=[turn], response="\x1b[31m\u202e") for i in range(8)]
    write_part(place / "part-00000.parquet", to_table(rows))
    shown = skyrl_here("sql", place, "select * exclude (turns) from trajectories where env = 'text_math'")
    assert shown.returncode == 0, shown.stderr
    assert "\x1b" not in shown.stdout
    assert "\\x1b[31m" in shown.stdout
    shown = skyrl_here("sql", place, "select tool, args, result from tool_calls where env = 'text_math'")
    assert shown.stdout.count("\\x1b[2J") == 8


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"PAR1 no more")], ids=["gone", "torn"])
def test_a_part_that_cannot_be_read_is_named(finished_run, tmp_path, damage):
    shutil.copytree(finished_run, tmp_path / "run")
    damage(tmp_path / "run/step-000001/advantage/part-00001.parquet")
    shown = skyrl_here("sql", tmp_path / "run", "select sum(reward) from trajectories")
    assert shown.returncode == 2
    assert "part-00001.parquet" in shown.stderr


def test_a_path_with_quotes_and_a_step_in_its_name(finished_run, tmp_path):
    place = tmp_path / "it's step-000009" / "run"
    shutil.copytree(finished_run, place)
    assert numbers(place, "select distinct step from trajectories order by 1") == [(0,), (1,)]


def test_the_tables_are_listed_and_a_lone_word_is_a_place(finished_run, monkeypatch):
    shown = skyrl_here("sql", finished_run)
    assert shown.returncode == 0
    assert "trajectories: step INTEGER" in shown.stdout
    assert "never-solved" in shown.stderr
    assert "neither a run" in skyrl_here("sql", "nothing").stderr
    monkeypatch.setenv("SKYRL_RUN", str(finished_run))
    assert skyrl_here("sql", "select count(*) as rows from trajectories").stdout.split() == ["rows", "32"]


def test_more_rows_than_the_limit_are_told(finished_run):
    shown = skyrl_here("sql", finished_run, ALL, "--limit", 3)
    assert "the first 3 are shown" in shown.stdout
    assert len(json.loads(skyrl_here("sql", finished_run, ALL, "--json").stdout)) == 32


def test_an_unknown_question_gets_a_suggestion(finished_run):
    shown = skyrl_here("sql", finished_run, "--question", "signals")
    assert (shown.returncode, "Did you mean `signal`?" in shown.stderr) == (2, True)
