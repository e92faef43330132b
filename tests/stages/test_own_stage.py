"""A stage and an engine of somebody's own, installed as another package: in a loop, beside its trainer, looked at."""

import json
import re
import shutil
import sys

import pyarrow.parquet as pq
import pytest
from running import ROOT, SMALL, same_bytes

from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.errors import InputError, SettingsError
from nanoskyrl.stages.core.manifest import read_manifest
from nanoskyrl.stages.core.own_stage import run_own
from nanoskyrl.stages.core.pipeline import STAGES, Stage, pipeline, training_half
from nanoskyrl.stages.core.rows import from_table
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.engines.base import FACES, face_of
from nanoskyrl.stages.filter import FilterConfig
from nanoskyrl.stages.looking.verify import verify
from nanoskyrl.stages.running.loop import loop
from nanoskyrl.stages.running.outdated_outputs import outdated
from nanoskyrl.stages.running.session import Session
from nanoskyrl_cli.main import run as skyrl

OWN = merge(
    SMALL,
    {
        "run": {"lag": 1, "stages": ["short"]},
        "short": {"most_tokens": 12},
        "rollout": {"engine": "mine", "train_batch_size": 2, "rows_per_part": 4, "max_generate_length": 16},
        "eval": {"limit": 2},
        "loop": {"steps": 2, "eval_every": 2},
    },
)
DIST = {
    "METADATA": "Metadata-Version: 2.1\nName: lab\nVersion: 1\n",
    "entry_points.txt": "[nanoskyrl.engines]\nmine = my_engine:Mine\n\n[nanoskyrl.stages]\nshort = my_stage:SHORT\n",
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A folder with the stage and the engine of docs/extending.md, as pip would have installed them there."""
    place = tmp_path_factory.mktemp("lab")
    page = (ROOT / "docs" / "extending.md").read_text()
    for code in re.findall(r"```python\n(# my_(?:stage|engine)\.py\n.*?)```", page, re.DOTALL):
        (place / code.split("\n")[0][2:]).write_text(code)
    (place / "lab-1.dist-info").mkdir()
    for name, text in DIST.items():
        (place / "lab-1.dist-info" / name).write_text(text)
    patch = pytest.MonkeyPatch()
    patch.chdir(place)  # where the trainer of a loop finds them, too
    patch.syspath_prepend(place)
    yield place
    patch.undo()
    for name in ("my_stage", "my_engine"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def made(lab):
    """Two steps of the loop with both."""
    run = Run(lab / "runs" / "made")
    assert loop(run, OWN) == 2
    return run


def test_a_loop_runs_a_stage_and_an_engine_from_outside_the_package(made):
    for step in (0, 1):
        short, advantage = (read_manifest(made.stage(step, name)) for name in ("short", "advantage"))
        assert short.inputs == {"score": read_manifest(made.stage(step, "score")).digest}
        assert advantage.inputs["short"] == short.digest
        assert 0 < short.dropped["too_long"] == short.rows_in - short.rows_out < short.rows_in
        assert advantage.rows_in == short.rows_out
        assert short.fell_short == 0
        assert read_manifest(made.stage(step, "sync")).settings["sync"]["engine"] == "mine"
    (evaluated,) = (made.root / "evals" / "00000002").iterdir()
    assert read_manifest(evaluated).settings["rollout"]["engine"] == "mine"
    assert verify(made.root).holds


def test_beside_its_trainer_the_loop_leaves_the_same_bytes(lab, made):
    apart = Run(lab / "runs" / "apart")
    loop(apart, merge(OWN, {"loop": {"gpus_generate": "cpu", "gpus_train": "cpu"}}))
    assert same_bytes(made.root, apart.root) == []


def test_it_is_shown_and_its_command_finds_it_up_to_date(made, capsys):
    assert skyrl(["short", "--run", str(made.root)]) == 0
    said = capsys.readouterr().err
    assert "Up to date: " in said
    assert re.search(r"\d+ of 8 rows of score passed on by short \(dropped: too_long \d+\)", said)
    assert f"Next: skyrl advantage --run {made.root}" in said
    assert skyrl(["show", str(made.stage(0, "short"))]) == 0
    assert skyrl(["show", str(made.root), "--timing"]) == 0
    assert re.search(r"^short +\d", capsys.readouterr().out, re.MULTILINE)
    assert skyrl(["short", "--help"]) == 0
    assert "Drop attempts that wrote too much." in capsys.readouterr().out
    assert skyrl(["score", "--run", str(made.root)]) == 0
    assert f"Next: skyrl short --run {made.root}" in capsys.readouterr().err


def test_a_step_is_shown_up_to_the_stage_that_nothing_was_made_of_yet(made, tmp_path, capsys):
    shutil.copytree(made.root, tmp_path / "run")
    for name, shown in (("sync", "to train"), ("train", "to advantage"), ("advantage", "to short")):
        shutil.rmtree(Run(tmp_path / "run").stage(1, name))
        assert skyrl(["show", str(tmp_path / "run")]) == 0
        assert re.search(rf"^ +1 +{shown}", capsys.readouterr().out, re.MULTILINE)


def test_verify_finds_an_output_that_was_made_from_another_than_its_own(made, tmp_path):
    shutil.copytree(made.root, tmp_path / "run")
    shutil.copyfile(
        made.stage(0, "short") / "_manifest.json", Run(tmp_path / "run").stage(1, "short") / "_manifest.json"
    )
    broken = verify(tmp_path / "run").broken
    assert any("short: its parent `score` is another" in line for line in broken)
    assert any("advantage: its parent `short` is another" in line for line in broken)


@pytest.mark.parametrize(
    ("changed", "first"),
    [({}, None), ({"short": {"most_tokens": 11}}, "short"), ({"train": {"lr": 1e-3}}, "train")],
)
def test_what_is_current_is_told_without_running_anything(changed, first, made, tmp_path, monkeypatch):
    for name in ("rollout", "score", "advantage", "train", "sync"):
        monkeypatch.setattr(Session, name, lambda *_, **__: pytest.fail("a stage ran"))
    wanted = [*pipeline(("short",))]
    wanted = wanted[wanted.index(first) :] if first else []
    found = outdated(Session(made, merge(OWN, changed)), 1, 1)
    assert [path.name for path in found] == wanted


def test_a_stage_taken_out_of_the_settings_is_outdated_with_what_followed(made):
    found = outdated(Session(made, merge(OWN, {"run": {"stages": []}})), 1, 1)
    assert [path.name for path in found] == ["advantage", "train", "sync", "short"]


def test_a_run_has_the_stages_that_it_names(lab, capsys):
    other = ["--run", str(lab / "runs" / "made"), "--set", "filter.drop={a = 'reward == 0'}"]
    assert skyrl(["filter", *other]) == 2
    assert "the run's stages are short, and not `filter`" in capsys.readouterr().err
    assert skyrl(["no_such_command"]) == 2
    assert skyrl(["nowhere:STAGE"]) == 2
    assert "cannot import `nowhere:STAGE`" in capsys.readouterr().err


def test_the_order_of_stages_and_its_halves():
    assert list(pipeline()) == list(STAGES)
    assert list(pipeline(("filter",))) == ["rollout", "score", "filter", "advantage", "train", "sync"]
    assert pipeline(("filter",))["advantage"].input == "filter"
    assert training_half(pipeline(("filter",))) == ["advantage", "train"]
    with pytest.raises(SettingsError, match="two stages `filter`"):
        pipeline(("filter", "filter"))


def test_the_faces_of_engines_say_what_their_classes_say():
    from nanoskyrl.stages.core.registry import lookup

    for name, face in FACES.items():
        of = lookup("engine", name)
        assert issubclass(of, face)
        assert (of.holds_policy, of.is_served) == (face.holds_policy, face.is_served)
    assert [face_of(name).holds_policy for name in ("openai", "scripted")] == [False, False]


# What a stage of somebody's own must keep


@pytest.mark.parametrize(
    ("work", "told"),
    [
        (lambda table, config: (table.slice(1), {}), "dropped 1 rows, and gives reasons for 0"),
        (lambda table, config: (table.slice(0, 0), {"all": 1}), "gives reasons for 1"),
        (lambda table, config: table, r"stage `mine` failed: ValueError"),
        (lambda table, config: 1 / 0, "stage `mine` failed: ZeroDivisionError"),
    ],
)
def test_a_stage_that_does_not_account_for_its_rows_is_refused(work, told, made, tmp_path):
    stage = Stage(name="mine", input="score", columns="score", run=work, called="filter")
    with pytest.raises(SettingsError, match=told):
        run_own(stage, made.stage(0, "score"), tmp_path / "out", None)
    assert not (tmp_path / "out" / "_manifest.json").exists()


def test_a_trajectory_is_kept_or_dropped_as_a_whole(made, tmp_path, make_trajectory):
    from nanoskyrl.stages.core.own_stage import _check_account
    from nanoskyrl.stages.core.rows import to_table

    rows = [make_trajectory(step_index=step, is_last_step=step == 1) for step in (0, 1)]
    table = to_table(rows)
    stage = Stage(name="mine", input="rollout", run=lambda table, config: (table, {}))
    _check_account(stage, table, table.slice(0, 0), {"both": 2})
    with pytest.raises(SettingsError, match="left 1 of 2 rows of trajectory"):
        _check_account(stage, table, table.slice(1), {"one": 1})


def test_a_killed_stage_counts_the_rows_of_the_parts_that_were_in_place(made, tmp_path):
    stage = pipeline(("short",))["short"]
    config = stage.config(most_tokens=12)
    whole = run_own(stage, made.stage(0, "score"), tmp_path / "whole", config)
    calls = []

    def dies(table, config):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return stage.run(table, config)

    from dataclasses import replace

    with pytest.raises(KeyboardInterrupt):
        run_own(replace(stage, run=dies), made.stage(0, "score"), tmp_path / "killed", config)
    assert run_own(stage, made.stage(0, "score"), tmp_path / "killed", config) == whole
    assert len(calls) == 2


# filter


def filtered(made, tmp_path, **drop):
    stage = pipeline(("filter",))["filter"]
    config = FilterConfig(drop=drop)
    manifest = run_own(stage, made.stage(0, "score"), tmp_path / "out", config)
    rows = [row for table in read_parts(tmp_path / "out", manifest) for row in from_table(table)]
    return manifest, rows


def test_filter_drops_by_the_first_expression_that_is_true(made, tmp_path):
    manifest, rows = filtered(made, tmp_path, long="completion_tokens > 12", zero="reward == 0 and not success")
    scored = made.stage(0, "score")
    before = [row for table in read_parts(scored, read_manifest(scored)) for row in from_table(table)]
    long = [row for row in before if row.completion_tokens > 12]
    zero = [row for row in before if row not in long and row.reward == 0]
    assert manifest.dropped == {k: len(v) for k, v in (("long", long), ("zero", zero)) if v}
    assert [row.trajectory_id for row in rows] == [row.trajectory_id for row in before if row not in [*long, *zero]]
    names = pq.read_table(next((tmp_path / "out").glob("*.parquet"))).column_names
    assert names == pq.read_table(next(scored.glob("*.parquet"))).column_names


@pytest.mark.parametrize(
    ("expression", "drops"),
    [
        ("reward < 1", False), ("not reward < 1", False), ("reward == None", True), ("reward is None", True),
        ("reward is not None", False), ("reward < 1 or completion_tokens > 0", True), ("reward + 1 > 0", False),
        ("reward < 1 and completion_tokens > 0", False), ("not (reward < 1 and completion_tokens < 0)", True),
        ("metadata['level'] > 2", True), ("metadata['nothing'] > 2", False), ("len(turns) >= 0", True),
        ("env in ('text_math', 'other')", True), ("0 < metadata['level'] <= 3", True), ("abs(-3) == max(1, 3)", True),
        ("len(metadata['nothing']) > 2", False), ("success", False), ("metadata['words'][0] == 'a'", True),
    ],
)  # fmt: skip
def test_a_null_leaves_open_what_it_stands_in(expression, drops, make_trajectory):
    from nanoskyrl.stages.core.rows import to_table
    from nanoskyrl.stages.filter import drop_rows

    row = make_trajectory(
        env="text_math", metadata={"level": 3, "words": ["a"]}, reward=None, success=None, score_status="skipped"
    )
    left, dropped = drop_rows(to_table([row], "score"), FilterConfig(drop={"why": expression}))
    assert (left.num_rows, sum(dropped.values())) == ((0, 1) if drops else (1, 0))


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("reward <", "is no expression"), ("rewards < 1", "uses `rewards`"), ("response_ids", "uses"),
        ("task_id > 3", "cannot be worked out"), ("completion_tokens", "no yes or no"), ("task_id.upper()", "cannot"),
        ("__import__('os')", "uses"), ("[x for x in turns]", "uses"), ("completion_tokens ** 2", "cannot"),
        ("lambda: 1", "cannot"), ("1 / 0 > 1", "division by zero"),
    ],
)  # fmt: skip
def test_what_is_no_condition_is_refused_with_its_name(expression, told, make_trajectory):
    from nanoskyrl.stages.core.rows import to_table
    from nanoskyrl.stages.filter import drop_rows

    row = make_trajectory(reward=1.0, score_status="scored")
    with pytest.raises(SettingsError, match=rf"`filter\.drop\.why`.*{re.escape(told)}|{re.escape(told)}"):
        drop_rows(to_table([row], "score"), FilterConfig(drop={"why": expression}))


def test_a_step_of_which_nothing_is_left_is_refused_where_it_would_be_trained_on(tmp_path):
    nothing = {"run": {"stages": ["filter"]}, "filter": {"drop": {"all": "completion_tokens >= 0"}}}
    run = Run(tmp_path / "run")
    with pytest.raises(InputError, match=r"no row of .* is kept \(it is empty\)"):
        loop(run, merge(SMALL, nothing, {"loop": {"steps": 1}}))
    assert read_manifest(run.stage(0, "filter")).rows_out == 0
    assert verify(run.root).holds
    resolved = json.loads((run.root / "resolved.json").read_text())
    assert resolved["filter"] == nothing["filter"]
