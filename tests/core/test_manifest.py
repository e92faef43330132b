import dataclasses
import json
import subprocess
import sys

import pyarrow as pa
import pytest
from outputs import HEAD, PARTS, contents, crash, edit, table, work

from nanoskyrl.stages.core.code import OtherCode
from nanoskyrl.stages.core.digests import digest_bytes, digest_file
from nanoskyrl.stages.core.errors import ConflictError, InputError, OutputError
from nanoskyrl.stages.core.manifest import Manifest, Part, first_difference, is_finished, read_manifest
from nanoskyrl.stages.core.output import folder_digests, open_output
from nanoskyrl.stages.core.shards import part_name, read_part, read_parts, write_part
from nanoskyrl.stages.core.storage import as_path, make_directory
from nanoskyrl.stages.core.trajectory import SCHEMA_VERSION

OTHER_HEADS = {
    "settings.rollout.seed": dataclasses.replace(HEAD, settings={"rollout": {**HEAD.settings["rollout"], "seed": 1}}),
    "settings.rollout.top_p": dataclasses.replace(HEAD, settings={"rollout": {**HEAD.settings["rollout"], "top_p": 1}}),
    "settings.rollout.tasks": dataclasses.replace(
        HEAD, settings={"rollout": {**HEAD.settings["rollout"], "tasks": ("b", "a")}}
    ),
    "settings.text_math": dataclasses.replace(HEAD, settings={**HEAD.settings, "text_math": {"level": 1}}),
    "inputs.tasks": dataclasses.replace(HEAD, inputs={"tasks": "d1"}),
    "policy": dataclasses.replace(HEAD, policy="p1"),
    "stage": dataclasses.replace(HEAD, stage="score"),
}


def ages(directory):
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in directory.iterdir()}


def in_memory(tmp_path):
    return as_path(f"memory:/{tmp_path}") / "rollout"


def local(tmp_path):
    return tmp_path / "runs" / "rollout"


anywhere = pytest.mark.parametrize("place", [local, in_memory], ids=["local", "memory"])


# A stage that ends


@anywhere
def test_a_new_output_holds_its_parts_and_a_manifest_and_nothing_else(tmp_path, place):
    directory = place(tmp_path)
    assert work(directory) == [0, 1, 2]
    assert sorted(contents(directory)) == ["_manifest.json", *(part_name(index) for index in range(PARTS))]
    manifest = read_manifest(directory)
    assert [found.column("x").to_pylist() for found in read_parts(directory, manifest)] == [[0], [0, 1], [0, 1, 2]]


def test_the_manifest_says_what_went_in_and_came_out(tmp_path):
    work(tmp_path)
    manifest = read_manifest(tmp_path, stage="rollout")
    assert manifest.settings == {"rollout": {"seed": 0, "temperature": 1.0, "tasks": ["a", "b"]}}
    assert (manifest.inputs, manifest.policy, manifest.schema_version) == ({"tasks": "d0"}, "p0", SCHEMA_VERSION)
    assert (manifest.rows_in, manifest.rows_out, manifest.dropped) == (10, 6, {"failed": 3})
    assert manifest.facts == {"groups": 2}
    assert manifest.parts == tuple(
        Part(part_name(index), index + 1, digest_file(tmp_path / part_name(index))) for index in range(PARTS)
    )
    assert manifest.digest == digest_bytes((tmp_path / "_manifest.json").read_bytes())
    assert len(manifest.code["digest"]) == 64
    assert manifest.packages["pyarrow"] == pa.__version__


def test_equal_work_gives_equal_bytes(tmp_path):
    work(tmp_path / "a")
    work(tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    work(in_memory(tmp_path))
    assert contents(tmp_path / "a") == contents(in_memory(tmp_path))


def test_the_manifest_does_not_know_where_or_when_it_was_written(tmp_path):
    work(tmp_path / "a")
    text = (tmp_path / "a" / "_manifest.json").read_text()
    assert str(tmp_path) not in text
    assert set(json.loads(text)) == {
        "stage", "schema_version", "settings", "inputs", "policy", "code", "packages", "parts", "rows_in", "rows_out",
        "dropped", "files", "facts", "seal",
    }  # fmt: skip


def test_what_stands_beside_the_parts_is_digested(tmp_path):
    with open_output(tmp_path / "train", HEAD, keep_parts=False) as output:
        for folder in ("policy", "state"):
            (tmp_path / "train" / folder).mkdir()
            (tmp_path / "train" / folder / "weights").write_bytes(folder.encode())
        (tmp_path / "train" / "_summary.json").write_bytes(b"{}")
        manifest = output.finish(rows_in=0)
    assert manifest.files == {
        "policy/weights": digest_bytes(b"policy"),
        "state/weights": digest_bytes(b"state"),
        "_summary.json": digest_bytes(b"{}"),
    }
    assert folder_digests(tmp_path / "train") == manifest.files
    assert manifest.parts == ()


def test_rows_that_fell_short_are_failures_but_not_skips():
    def manifest(stage):
        return Manifest(
            stage=stage, schema_version=1, settings={}, inputs={}, policy=None, code={}, packages={}, parts=(),
            rows_in=9, rows_out=9, dropped={"failed": 2, "verifier_timeout": 3, "skipped": 2},
        )  # fmt: skip

    assert manifest("score").fell_short == 5
    assert manifest("advantage").fell_short == 0  # it leaves rows out on purpose


# A stage that is run again


@anywhere
def test_a_finished_output_is_up_to_date(tmp_path, place):
    directory = place(tmp_path)
    work(directory)
    before = contents(directory)
    assert work(directory) is None
    assert contents(directory) == before


def test_an_output_that_is_up_to_date_is_not_touched(tmp_path):
    work(tmp_path)
    before = ages(tmp_path)
    work(tmp_path)
    assert ages(tmp_path) == before
    with open_output(tmp_path, HEAD) as output:
        assert output.manifest == read_manifest(tmp_path)


@pytest.mark.parametrize("name", OTHER_HEADS)
def test_a_finished_output_of_other_work_is_refused_and_the_first_difference_named(tmp_path, name):
    work(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ConflictError, match=f"is finished with another `{name}`: ") as error:
        work(tmp_path, OTHER_HEADS[name])
    assert "--force" in error.value.hint
    assert error.value.exit_code == 2
    assert contents(tmp_path) == before


def test_both_values_of_a_difference_are_named(tmp_path):
    work(tmp_path)
    with pytest.raises(ConflictError, match=r"another `settings\.rollout\.seed`: 0, now 1$"):
        work(tmp_path, OTHER_HEADS["settings.rollout.seed"])


def test_other_packages_do_not_make_a_finished_output_stale(tmp_path):
    work(tmp_path)
    edit(tmp_path / "_manifest.json", packages={"numpy": "1.0"})
    assert work(tmp_path) is None


@anywhere
def test_force_replaces_a_finished_output_whole(tmp_path, place):
    directory = place(tmp_path)
    other = OTHER_HEADS["settings.rollout.seed"]
    work(directory, other)
    write_part(directory / part_name(PARTS), table(8))  # the earlier run had one part more
    make_directory(directory / "policy")
    (directory / "policy" / "weights").write_bytes(b"w")
    assert work(directory, force=True) == [0, 1, 2]
    work(local(tmp_path / "new"))
    assert contents(directory) == contents(local(tmp_path / "new"))


# A stage that was stopped


@anywhere
def test_a_crash_midway_leaves_nothing_readable(tmp_path, place):
    directory = place(tmp_path)
    crash(directory)
    assert not is_finished(directory)
    with pytest.raises(InputError, match="is unfinished: `rollout` did not end") as error:
        read_manifest(directory)
    assert error.value.hint == "Run `skyrl rollout` again to resume"


@anywhere
@pytest.mark.parametrize("before", range(PARTS))
def test_an_interrupted_run_ends_with_the_bytes_of_an_unbroken_one(tmp_path, place, before):
    directory = place(tmp_path)
    crash(directory, before=before)
    assert work(directory) == list(range(before, PARTS))
    work(local(tmp_path / "unbroken"))
    assert contents(directory) == contents(local(tmp_path / "unbroken"))


def test_parts_in_place_are_kept_as_they_are(tmp_path):
    crash(tmp_path, before=2)
    before = ages(tmp_path)
    assert work(tmp_path) == [2]
    assert {name: ages(tmp_path)[name] for name in map(part_name, range(2))} == {
        name: before[name] for name in map(part_name, range(2))
    }


def test_a_stage_that_is_all_or_nothing_keeps_no_parts(tmp_path):
    crash(tmp_path, keep_parts=False)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "half").write_bytes(b"h")
    assert work(tmp_path, keep_parts=False) == [0, 1, 2]
    assert not (tmp_path / "state").exists()


def test_half_a_file_is_removed_and_never_taken_for_a_part(tmp_path):
    crash(tmp_path, before=1)
    (tmp_path / f"{part_name(1)}.tmp").write_bytes(b"half a part")
    (tmp_path / f"{part_name(7)}.tmp").write_bytes(b"half a part")
    (tmp_path / "_manifest.json.tmp").write_bytes(b"{")
    assert not is_finished(tmp_path)
    assert work(tmp_path) == [1, 2]
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("name", OTHER_HEADS)
def test_parts_of_other_work_are_refused_and_the_first_difference_named(tmp_path, name):
    crash(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ConflictError, match=f"is begun with another `{name}`: ") as error:
        work(tmp_path, OTHER_HEADS[name])
    assert "--force" in error.value.hint
    assert contents(tmp_path) == before


def test_parts_written_with_other_packages_are_refused(tmp_path):
    crash(tmp_path)
    edit(tmp_path / "_started.json", packages={"pyarrow": "1.0"})
    with pytest.raises(ConflictError, match=r"is begun with another `packages\.\w+`: "):
        work(tmp_path)


def test_what_was_begun_before_any_part_was_in_place_is_no_conflict(tmp_path):
    crash(tmp_path, OTHER_HEADS["settings.rollout.seed"], before=0)
    assert work(tmp_path) == [0, 1, 2]


def test_force_begins_anew_what_was_stopped(tmp_path):
    crash(tmp_path, OTHER_HEADS["settings.rollout.seed"])
    assert work(tmp_path, force=True) == [0, 1, 2]
    assert read_manifest(tmp_path).settings["rollout"]["seed"] == 0


def test_a_corrupt_part_of_an_interrupted_run_is_not_closed_over(tmp_path):
    crash(tmp_path)
    (tmp_path / part_name(0)).write_bytes(b"PAR1 and then nothing")
    with pytest.raises(InputError, match=r"part-00000\.parquet` is not a readable Parquet file"):
        work(tmp_path)
    assert not is_finished(tmp_path)


# What is not a stage's own


@anywhere
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", ["notes.txt", "run.toml", "results.parquet"])
def test_a_directory_with_foreign_files_is_refused_and_left_alone(tmp_path, place, name, force):
    directory = place(tmp_path)
    make_directory(directory)
    (directory / name).write_bytes(b"mine")
    with pytest.raises(OutputError, match=f"holds `{name}`, which no stage wrote"):
        work(directory, force=force)
    assert contents(directory) == {name: b"mine"}


def test_force_refuses_a_finished_output_with_a_foreign_file_and_deletes_nothing(tmp_path):
    work(tmp_path)
    (tmp_path / "notes.txt").write_bytes(b"mine")
    before = contents(tmp_path)
    with pytest.raises(OutputError, match=r"holds `notes\.txt`"):
        work(tmp_path, OTHER_HEADS["policy"], force=True)
    assert contents(tmp_path) == before


def test_parts_without_a_beginning_are_refused_unless_forced(tmp_path):
    write_part(tmp_path / part_name(0), table(5))
    with pytest.raises(OutputError, match="holds parts of no stage"):
        work(tmp_path)
    assert read_part(tmp_path / part_name(0)).num_rows == 6
    assert work(tmp_path, force=True) == [0, 1, 2]


def test_a_file_in_place_of_the_directory_is_named(tmp_path):
    (tmp_path / "rollout").write_bytes(b"")
    with pytest.raises(OutputError, match=r"cannot create `.*/rollout`"):
        work(tmp_path / "rollout")


@pytest.mark.parametrize("name", ["part-time-job", "thesis.tmp"])
def test_a_folder_whose_name_only_looks_like_a_part_is_not_deleted(tmp_path, name):
    work(tmp_path)
    (tmp_path / name).mkdir()
    (tmp_path / name / "chapter").write_bytes(b"mine")
    with pytest.raises(OutputError, match=f"holds `{name}`"):
        work(tmp_path, OTHER_HEADS["policy"], force=True)
    assert (tmp_path / name / "chapter").read_bytes() == b"mine"


def test_a_part_after_a_gap_is_not_left_out_in_silence(tmp_path):
    with open_output(tmp_path, HEAD) as output:
        output.write_part(0, table(0))
        output.write_part(2, table(2))
        manifest = output.finish(rows_in=4)
    assert [part.name for part in manifest.parts] == [part_name(0), part_name(2)]


# Two at once

HOLD = """
import sys
from pathlib import Path
from nanoskyrl.stages.core.manifest import Head
from nanoskyrl.stages.core.output import open_output

with open_output(Path(sys.argv[1]), Head(stage="rollout", settings={})):
    print("open", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path):
    directory = tmp_path / "rollout"
    command = [sys.executable, "-c", HOLD, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "open\n"
        try:
            with pytest.raises(OutputError, match=r"another process is writing `.*/rollout`"):
                work(directory)
            with pytest.raises(OutputError, match="another process is writing"):
                work(directory, force=True)
            assert sorted(contents(directory)) == ["_started.json"]
            assert work(tmp_path / "another") == [0, 1, 2]
        finally:
            first.kill()
    assert work(directory) == [0, 1, 2]


def test_one_directory_by_two_names_is_locked_once(tmp_path):
    (tmp_path / "alias").symlink_to(tmp_path / "rollout")
    with open_output(tmp_path / "rollout", HEAD), pytest.raises(OutputError, match="another process is writing"):
        work(tmp_path / "alias")


def test_the_lock_is_let_go_after_a_crash_and_leaves_no_file(tmp_path):
    crash(tmp_path, before=0)
    assert sorted(contents(tmp_path)) == ["_started.json"]
    assert work(tmp_path) == [0, 1, 2]


# Reading what a stage wrote


@anywhere
def test_a_directory_that_is_not_there_is_named(tmp_path, place):
    with pytest.raises(InputError, match=r"there is no directory `.*rollout`") as error:
        read_manifest(place(tmp_path), stage="rollout")
    assert error.value.hint == "Name a directory of shards from `skyrl rollout`"


def test_a_directory_that_no_stage_wrote_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"has no _manifest\.json"):
        read_manifest(tmp_path)


def test_another_stage_than_the_one_asked_for_is_refused(tmp_path):
    work(tmp_path)
    with pytest.raises(InputError, match="was written by `rollout`, not by `score`") as error:
        read_manifest(tmp_path, stage="score")
    assert error.value.hint == "Run `skyrl score` first, and name its output"
    with pytest.raises(InputError, match="not by `score`"):
        read_manifest(tmp_path, stage=("score", "eval"))
    assert read_manifest(tmp_path, stage=("score", "rollout")).stage == "rollout"


def test_a_newer_schema_is_refused_and_both_versions_are_named(tmp_path):
    work(tmp_path)
    # A newer manifest may hold what this one does not know.
    edit(tmp_path / "_manifest.json", schema_version=SCHEMA_VERSION + 1, shape="round")
    message = f"has schema version {SCHEMA_VERSION + 1}; this nanoskyrl reads up to {SCHEMA_VERSION}"
    with pytest.raises(InputError, match=message) as error:
        read_manifest(tmp_path)
    assert error.value.hint == "Install a newer nanoskyrl"
    with pytest.raises(InputError, match=message):
        work(tmp_path)


@pytest.mark.parametrize("text", ["", "{", '{"stage": "rollout"', "\0", "\N{LATIN SMALL LETTER U WITH DIAERESIS}"])
def test_a_manifest_that_is_not_json_is_refused(tmp_path, text):
    (tmp_path / "_manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=r"manifest\.json` is not JSON"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("value", [{}, [], None, 1, {"parts": 5}, {"parts": [{}]}, {"stage": "rollout", "parts": []}])
def test_a_manifest_that_lacks_what_one_holds_is_refused(tmp_path, value):
    (tmp_path / "_manifest.json").write_text(json.dumps(value))
    with pytest.raises(InputError, match=r"manifest\.json` lacks what a manifest holds"):
        read_manifest(tmp_path)


def test_a_manifest_is_read_as_it_was_written(tmp_path):
    work(tmp_path)
    manifest = read_manifest(tmp_path)
    assert manifest.to_bytes() == (tmp_path / "_manifest.json").read_bytes()
    assert hash(manifest.parts) == hash(read_manifest(tmp_path).parts)


@pytest.mark.parametrize("version", ["1", None, -1, 0, True])
def test_a_schema_version_that_is_no_number_from_1_is_an_input_error(tmp_path, version):
    work(tmp_path)
    edit(tmp_path / "_manifest.json", schema_version=version)
    with pytest.raises(InputError):
        read_manifest(tmp_path)


@pytest.mark.parametrize("table", [None, "text_math", [], {"\ud800": 1}, {"env": "\udfff"}])
def test_settings_that_are_no_tables_or_cannot_be_written_are_an_input_error(tmp_path, table):
    work(tmp_path)
    edit(tmp_path / "_manifest.json", settings={"rollout": table})
    with pytest.raises(InputError, match=r"manifest\.json` lacks what a manifest holds"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "name", ["part-0000\0.parquet", "part-0000\N{ARABIC-INDIC DIGIT TWO}.parquet", "../part-00000.parquet"]
)
def test_a_part_with_a_name_that_no_stage_gives_is_an_input_error(tmp_path, name):
    work(tmp_path)
    part = json.loads((tmp_path / "_manifest.json").read_bytes())["parts"][0]
    edit(tmp_path / "_manifest.json", parts=[{**part, "name": name}])
    with pytest.raises(InputError, match="lists its parts wrongly"):
        read_manifest(tmp_path)


def test_a_beginning_that_is_no_object_is_an_input_error(tmp_path):
    (tmp_path / "_started.json").write_text("[]")
    with pytest.raises(InputError):
        read_manifest(tmp_path)


# The first difference


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ({"a": 1}, {"a": 1}, None),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, None),
        ({"a": (1, 2)}, {"a": [1, 2]}, None),
        ({"b": 1, "a": 2}, {"b": 2, "a": 1}, ("a", 2, 1)),
        ({"a": {"b": {"c": 1, "d": 2}}}, {"a": {"b": {"c": 1, "d": 3}}}, ("a.b.d", 2, 3)),
        ({"a": 1}, {"a": "1"}, ("a", 1, "1")),
        ({"a": 1}, {"a": True}, ("a", 1, True)),
        ({"a": {"b": 1}}, {"a": 1}, ("a", {"b": 1}, 1)),
        ({"a": 1}, {}, ("a", 1, None)),
        ({}, {"a": 1}, ("a", None, 1)),
        ({"a": [1, 2]}, {"a": [2, 1]}, ("a", [1, 2], [2, 1])),
    ],
)
def test_the_first_difference_by_hand(ours, theirs, expected):
    assert first_difference(ours, theirs) == expected


def as_schema_1(directory):
    """Name and mark a directory's files as schema 1 did."""
    for name in ("_manifest.json", "_started.json"):
        if (directory / name).is_file():
            edit(directory / name, schema_version=1, code={"version": "0.1.0", "digest": "0" * 64})
            (directory / name).rename(directory / name.removeprefix("_"))


@pytest.mark.filterwarnings("ignore::nanoskyrl.stages.core.code.OtherCode")
def test_a_finished_directory_of_schema_1_is_up_to_date_and_stays_as_it_is(tmp_path):
    work(tmp_path)
    as_schema_1(tmp_path)
    before = contents(tmp_path)
    assert is_finished(tmp_path)
    assert read_manifest(tmp_path).schema_version == 1
    assert work(tmp_path) is None
    assert contents(tmp_path) == before
    with pytest.raises(ConflictError, match="is finished with another `policy`"):
        work(tmp_path, OTHER_HEADS["policy"])
    assert work(tmp_path, force=True) == list(range(PARTS))
    assert "manifest.json" not in contents(tmp_path)


@pytest.mark.parametrize("head", [HEAD, OTHER_HEADS["policy"]], ids=["same", "other"])
def test_what_was_unfinished_under_schema_1_is_begun_again(tmp_path, head):
    crash(tmp_path)
    as_schema_1(tmp_path)
    with pytest.raises(InputError, match="is unfinished: `rollout` did not end"):
        read_manifest(tmp_path)
    with pytest.warns(OtherCode, match="it is begun again"):
        assert work(tmp_path, head) == list(range(PARTS))
    assert sorted(contents(tmp_path)) == ["_manifest.json", *(part_name(index) for index in range(PARTS))]
