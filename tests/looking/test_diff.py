"""`skyrl diff` names what differs, where it came about, and nothing that only follows."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from outputs import edit_part
from running import skyrl_here

from nanoskyrl.stages.core.shards import read_part, write_part
from nanoskyrl.stages.looking.diff import diff

PART = "part-00000.parquet"


def edit_json(path: Path, *keys: Any, to: Any) -> None:
    """Change one value of a JSON file."""
    whole = value = json.loads(path.read_text())
    for key in keys[:-1]:
        value = value[key]
    value[keys[-1]] = to
    path.write_text(json.dumps(whole))


def cell(column: str, row: int, to: Any, step: int = 0, stage: str = "rollout") -> Callable[[Path], None]:
    def change(run: Path) -> None:
        def put(values: list[Any]) -> None:
            values[row] = to(values[row]) if callable(to) else to

        edit_part(run / f"step-{step:06d}" / stage / PART, column, put)

    return change


def element(column: str, row: int, at: int, to: Any, step: int = 0, stage: str = "rollout") -> Callable[[Path], None]:
    def put(values: list[Any]) -> list[Any]:
        return [*values[:at], to, *values[at + 1 :]]

    return cell(column, row, put, step, stage)


def rows(change: Callable[[pa.Table], pa.Table], step: int = 0, stage: str = "rollout") -> Callable[[Path], None]:
    def put(run: Path) -> None:
        path = run / f"step-{step:06d}" / stage / PART
        write_part(path, change(read_part(path)))

    return put


def manifest(place: str, *keys: Any, to: Any) -> Callable[[Path], None]:
    return lambda run: edit_json(run / place / "_manifest.json", *keys, to=to)


def weight(run: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = run / "step-000001/train/policy/model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] += 0.5
    save_file(tensors, path, {"format": "pt"})


def turn(values: Any) -> Any:
    return [{**values[0], "observation": "something else"}, *values[1:]]


def set_lr(run: Path) -> None:
    path = run / "run.toml"
    path.write_text(path.read_text() + "\n[train]\nlr = 0.125\n")


SEEDED: dict[str, tuple[Callable[[Path], None], str, str]] = {
    # What is changed, and the place and the words that must be named.
    "token": (element("response_ids", 2, 1, 7), "step-000000/rollout", "response_ids: 1 of 16 rows; first ID2"),
    "prompt token": (element("prompt_ids", 0, 3, 9, 1), "step-000001/rollout", "token 3 of"),
    "shorter": (cell("response_ids", 1, lambda ids: ids[:-1]), "step-000000/rollout", "-> the end"),
    "mask": (element("loss_mask", 0, 0, 0), "step-000000/rollout", "token 0 of"),
    "log-prob": (element("rollout_logprobs", 3, 0, -9.5), "step-000000/rollout", "-> -9.5"),
    "null log-prob": (element("rollout_logprobs", 3, 0, None), "step-000000/rollout", "-> null"),
    "status": (cell("status", 4, "failed", 1), "step-000001/rollout", "(completed -> failed 1)"),
    "text": (cell("response", 5, lambda text: text + "\x1b[31m"), "step-000000/rollout", r"\x1b[31m"),
    "turn": (cell("turns", 0, turn), "step-000000/rollout", "entry 0: observation"),
    "metadata": (cell("metadata", 0, '{"ground_truth": 1}'), "step-000000/rollout", "metadata: 1 of 16 rows"),
    "reward": (cell("reward", 6, 0.625, 1, "score"), "step-000001/score", "-> 0.625"),
    "unscored": (cell("reward", 6, None, 1, "score"), "step-000001/score", "-> null"),
    "success": (cell("success", 6, lambda of: not of, 0, "score"), "step-000000/score", "success: 1 of 16 rows ("),
    "advantage": (element("advantages", 0, 0, 2.5, 0, "advantage"), "step-000000/advantage", "-> 2.5"),
    "diagnostics": (cell("kl", 0, 99.0, 0, "train"), "step-000000/train", "kl: 1 of 16 rows, by up to 99"),
    "row gone": (rows(lambda table: table.slice(1)), "step-000000/rollout", "rows: 1 in the first alone"),
    "order": (rows(lambda table: table.take([1, 0, *range(2, 8)])), "step-000000/rollout", "1 of 16 rows lie in"),
    "run.toml": (set_lr, "run.toml", "train.lr: null -> 0.125"),
    "setting": (
        manifest("step-000001/score", "settings", "score", "timeout_seconds", to=9.0), "step-000001/score",
        "settings score.timeout_seconds: 60.0 -> 9.0",
    ),
    "code": (
        manifest("step-000000/score", "code", "modules", "nanoskyrl.stages.score", to="0" * 12), "step-000000/score",
        "code: other nanoskyrl.stages.score",
    ),
    "package": (manifest("step-000000/train", "packages", "torch", to="1.0"), "step-000000/train", "-> 1.0"),
    "fact": (manifest("step-000001/train", "facts", "lr", to=0.5), "step-000001/train", "facts lr: "),
    "weight": (weight, "step-000001/train", "1 of 35 tensors, by up to 0.5 in `model.norm.weight`"),
    "summary": (
        lambda run: edit_json(run / "evals/00000002/tool_use/_summary.json", "tasks", to=3), "evals/00000002/tool_use",
        "_summary.json tasks: 4 -> 3",
    ),
    "evaluation gone": (lambda run: shutil.rmtree(run / "evals/00000000"), "evals/00000000/tool_use", "first alone"),
    "policy gone": (lambda run: shutil.rmtree(run / "policies/00000002"), "policies/00000002", "in the first alone"),
    "step gone": (lambda run: shutil.rmtree(run / "step-000001"), "step-000001", "in the first alone"),
    "tokenizer": (
        lambda run: edit_json(run / "policies/00000001/tokenizer_config.json", "eos_token", to="<x>"),
        "policies/00000001", "tokenizer_config.json eos_token: ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEDED)
def test_a_seeded_difference_is_named_where_it_is(finished_run, tmp_path, name):
    change, place, words = SEEDED[name]
    other = tmp_path / "other"
    shutil.copytree(finished_run, other)
    change(other)
    found = diff(finished_run, other).differences
    ids = read_part(finished_run / "step-000000/rollout" / PART).column("trajectory_id").to_pylist()
    assert (found[0].place, len(found)) == (place, 1), [one.line() for one in found]
    assert words.replace("ID2", ids[2][:12]) in found[0].line()


def test_a_run_is_equal_to_itself_and_ends_with_0(finished_run):
    shown = skyrl_here("diff", finished_run, finished_run)
    assert (shown.returncode, shown.stdout.split(": ")[-1]) == (0, "no difference\n")


def test_runs_with_other_rates_agree_up_to_the_first_training(finished_run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(finished_run / "policies/00000000", other / "policies/00000000")
    settings = (finished_run / "run.toml").read_text()
    (other / "run.toml").write_text(settings)
    shown = skyrl_here("loop", "--run", other, "--set", "train.lr=0.01", "--set", "loop.steps=1")
    assert shown.returncode == 0, shown.stderr
    shown = skyrl_here("diff", finished_run / "step-000000", other / "step-000000")
    assert shown.returncode == 1
    lines = shown.stdout.splitlines()
    assert [line for line in lines if line.startswith(("rollout", "score", "advantage"))] == []
    assert any(line.startswith("train: settings train.lr: ") for line in lines)
    assert any("tensors, by up to" in line for line in lines)
    assert not any(line.startswith("sync") for line in lines)  # it only follows


def test_the_tolerance_is_for_numbers_and_not_for_tokens(finished_run, tmp_path):
    for column, value in (("rollout_logprobs", 1e-4), ("response_ids", 1)):
        other = tmp_path / column
        shutil.copytree(finished_run / "step-000000/rollout", other)

        def add(values: list[Any], value: float = value) -> None:
            values[0] = [None if one is None else one + value for one in values[0]]

        edit_part(other / PART, column, add)
        found = diff(finished_run / "step-000000/rollout", other, tolerance=2e-4).differences
        assert len(found) == (column == "response_ids")


def test_parts_that_are_cut_elsewhere_hold_the_same_rows(finished_run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(finished_run / "step-000000/rollout", other)
    first, second = (read_part(other / f"part-0000{i}.parquet") for i in (0, 1))
    whole = pa.concat_tables([first, second])
    write_part(other / "part-00000.parquet", whole.slice(0, 5))
    write_part(other / "part-00001.parquet", whole.slice(5))
    found = diff(finished_run / "step-000000/rollout", other)
    assert [one.what for one in found.differences] == []
    assert found.rows == 16


def test_columns_of_equal_bytes_are_not_read(finished_run, tmp_path, monkeypatch):
    from nanoskyrl.stages.looking import diff_rows

    other = tmp_path / "other"
    shutil.copytree(finished_run / "step-000000/score", other)
    edit_part(other / PART, "reward", lambda values: values.__setitem__(0, 0.125))
    read = []
    monkeypatch.setattr(diff_rows, "read_part", lambda path, **wanted: read.append(wanted) or read_part(path, **wanted))
    assert len(diff(finished_run / "step-000000/score", other).differences) == 1
    assert {name for wanted in read for name in wanted["columns"]} <= {*diff_rows.KEYS, *diff_rows.NAMES, "reward"}


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (".", "step-000000/score", "is a run, and"),
        ("policies/00000000", "step-000000", "is a policy, and"),
        ("nothing", ".", "there is no directory"),
        ("evals", "evals", "has no _manifest.json"),
    ],
)
def test_what_cannot_be_compared_is_refused(finished_run, first, second, words):
    shown = skyrl_here("diff", finished_run / first, finished_run / second)
    assert shown.returncode == 2
    assert words in shown.stderr


def test_values_in_json_are_the_lines(finished_run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(finished_run / "step-000000/score", other)
    edit_part(other / PART, "reward", lambda values: values.__setitem__(0, None))
    shown = skyrl_here("diff", finished_run / "step-000000/score", other, "--json")
    found = json.loads(shown.stdout)
    assert shown.returncode == 1
    assert [one["what"] for one in found["differences"]] == ["reward"]
    assert found["rows"] == 16
