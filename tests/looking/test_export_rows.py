"""Trajectories to other programs, and back."""

import json
import shutil

import pytest
from running import skyrl_here

from nanoskyrl.stages.core.manifest import read_manifest
from nanoskyrl.stages.core.shards import read_part, read_parts
from nanoskyrl.stages.looking.ask import ask
from nanoskyrl.stages.looking.diff import diff


def exported(place, form, to):
    done = skyrl_here("export", place, "--trajectories", form, "--to", to)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in to.read_text().splitlines()] if to.is_file() else done.stderr


def test_what_was_exported_is_imported_as_the_same_rows(finished_run, tmp_path):
    score = finished_run / "step-000001/score"
    lines = exported(score, "jsonl", tmp_path / "rows.jsonl")
    assert len(lines) == 16
    done = skyrl_here("import", tmp_path / "rows.jsonl", "--run", tmp_path / "new")
    assert done.returncode == 0, done.stderr
    for stage in ("rollout", "score"):
        found = diff(finished_run / "step-000001" / stage, tmp_path / "new/step-000000" / stage)
        columns = set(read_part(score / "part-00000.parquet").column_names)
        assert [one.line() for one in found.differences if one.what in {*columns, "rows", "order"}] == []
        assert found.rows == 16
    assert skyrl_here("verify", tmp_path / "new").returncode == 0


def test_imported_rows_are_trained_on(finished_run, tmp_path):
    exported(finished_run / "step-000001/score", "jsonl", tmp_path / "rows.jsonl")
    run = tmp_path / "new"
    for command in (("import", tmp_path / "rows.jsonl"), ("advantage",), ("train",)):
        done = skyrl_here(*command, "--run", run)
        assert done.returncode == 0, done.stderr
    ours, theirs = (ask(place, "select sum(list_sum(advantages)) from advantage where step = $id::int", start=step).rows
                    for place, step in ((run, "0"), (finished_run, "1")))  # fmt: skip
    assert ours == theirs


def test_conversations_are_those_of_successes(finished_run, tmp_path):
    found = exported(finished_run, "chat", tmp_path / "sft.jsonl")
    wins = ask(finished_run, "select messages from trajectories where success and is_last_step").rows
    assert len(found) == len(wins) > 0
    for line in found:
        assert list(line) == ["messages"]
        assert line["messages"][-1]["role"] == "assistant"
    assert {json.dumps(line["messages"][0]) for line in found} == {json.dumps(json.loads(text)[0]) for (text,) in wins}


def test_a_data_set_folder_is_loaded_with_its_card(finished_run, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    exported(finished_run, "dataset", tmp_path / "data")
    found = datasets.load_dataset(str(tmp_path / "data"), cache_dir=str(tmp_path / "cache"))
    assert {name: len(rows) for name, rows in found.items()} == {"train": 32}
    row = found["train"][0]
    place = finished_run / "step-000000/advantage"
    table = next(read_parts(place, read_manifest(place)))
    assert row["step"] == 0
    assert row["response_ids"] == table.column("response_ids")[0].as_py()
    assert row["advantages"] == table.column("advantages")[0].as_py()
    card = (tmp_path / "data/README.md").read_text()
    assert all(f"| {name} |" in card for name in ("step", "response_ids", "advantages"))
    assert read_manifest(place).digest[:12] in card


def test_text_that_must_stay_is_not_exported(finished_run, tmp_path):
    shutil.copytree(finished_run / "step-000000/score", tmp_path / "score")
    path = tmp_path / "score/_manifest.json"
    manifest = json.loads(path.read_text())
    manifest["facts"]["text_stays_local"] = "its terms say so"
    path.write_text(json.dumps(manifest))
    for form in ("jsonl", "chat", "dataset"):
        done = skyrl_here("export", tmp_path / "score", "--trajectories", form, "--to", tmp_path / form)
        assert (done.returncode, "its terms say so" in done.stderr) == (2, True)
        assert not (tmp_path / form).exists()


def test_nothing_is_written_over(finished_run, tmp_path):
    (tmp_path / "there").write_text("mine")
    done = skyrl_here("export", finished_run, "--trajectories", "jsonl", "--to", tmp_path / "there")
    assert (done.returncode, (tmp_path / "there").read_text()) == (1, "mine")
    done = skyrl_here("export", finished_run, "--trajectories", "csv", "--to", tmp_path / "new")
    assert (done.returncode, (tmp_path / "new").exists()) == (2, False)


LEAST = {"prompt_ids": [1, 2], "response_ids": [4, 5, 6, 7], "loss_mask": [1, 0, 1, 1]}
LOGPROBS = {"rollout_logprobs": [-0.5, None, -0.25, -0.125]}


def import_lines(tmp_path, *lines):
    (tmp_path / "rows.jsonl").write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )
    return skyrl_here("import", tmp_path / "rows.jsonl", "--run", tmp_path / "run", "--env", "text_math")


def test_tokens_alone_make_a_rollout(tmp_path):
    done = import_lines(tmp_path, LEAST, LEAST | LOGPROBS | {"task_id": "other"}, "", LEAST)
    assert done.returncode == 0, done.stderr
    query = (
        "select sample, logprobs_mode, completion_tokens, len(turns), turns[1].token_count from rollout order by 1, 2"
    )
    assert ask(tmp_path / "run", query).rows == [
        (0, "processed", 3, 2, 1), (0, "recomputed", 3, 2, 1), (1, "recomputed", 3, 2, 1)
    ]  # fmt: skip
    assert not (tmp_path / "run/step-000000/score").exists()


def test_rewards_make_a_score_and_a_null_stays_null(tmp_path):
    rows = [LEAST | LOGPROBS | {"reward": 0.5}, LEAST | LOGPROBS | {"reward": None, "score_status": "verifier_timeout"}]
    done = import_lines(tmp_path, *rows)
    assert done.returncode == 0, done.stderr
    found = ask(tmp_path / "run", "select reward, score_status from score order by sample").rows
    assert found == [(0.5, "scored"), (None, "verifier_timeout")]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "holds no line"),
        (["{"], "line 1"),
        (["[1]"], "line 1"),
        ([LEAST, {"prompt": "2 + 2?", "response": "4"}], "line 2 of"),
        ([LEAST | {"rewards": 1}], "Did you mean `reward`?"),
        ([LEAST | {"loss_mask": [1]}], "loss_mask"),
        ([LEAST | {"loss_mask": [1, 0, 1, 7]}], "loss_mask"),
        ([LEAST | {"rollout_logprobs": [1, 2, 3, 4]}], "rollout_logprobs"),
        ([LEAST | {"response_ids": ["a", 1, 2, 3]}], "line 1"),
        ([LEAST | {"response_ids": [2**40, 1, 2, 3]}], "line 1"),
        ([LEAST | {"stop_reason": "tired"}], "tired"),
        ([LEAST | {"turns": [{"words": 1}]}], "line 1"),
        ([LEAST | {"reward": 1.0}, LEAST], "line 2 of"),
        ([LEAST | {"reward": "much"}], "reward"),
        ([LEAST | {"trajectory_id": "a"}, LEAST | {"trajectory_id": "a"}], "trajectory_id"),
    ],
)
def test_what_is_no_trajectory_is_refused_by_line_or_column(tmp_path, lines, words):
    done = import_lines(tmp_path, *lines)
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    assert done.stderr.startswith("error: ")
    assert not (tmp_path / "run/step-000000/score/_manifest.json").exists()
