import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanoskyrl.stages.core.digests import digest_bytes, digest_file
from nanoskyrl.stages.core.errors import InputError, OutputError
from nanoskyrl.stages.core.manifest import Manifest, Part
from nanoskyrl.stages.core.rows import list_column
from nanoskyrl.stages.core.shards import part_name, read_part, read_parts, write_part
from nanoskyrl.stages.core.storage import as_path, make_directory
from nanoskyrl.stages.core.trajectory import SCHEMA_KEY, SCHEMA_VERSION

TURN = pa.struct([("action", pa.string()), ("reward", pa.float64()), ("first_token", pa.int32())])
TURNS = pa.list_(pa.field("element", TURN))


def part(rows=3, version=SCHEMA_VERSION):
    """Return a table with every kind of column that a shard has: words, numbers, lists of both, structs."""
    rng = np.random.default_rng(rows)
    ids = [rng.integers(0, 1000, 5) for _ in range(rows)]
    logprobs = [-rng.exponential(1, 5) for _ in range(rows)]
    sampled = [np.array([True, True, False, True, True])] * rows
    table = pa.table(
        {
            "env": pa.array(["text_math"] * rows),
            "reward": pa.array([None, *[0.1] * (rows - 1)], pa.float64()),
            "response_ids": list_column([*ids[:-1], None], pa.int32()),
            "rollout_logprobs": list_column([*logprobs[:-1], None], pa.float32(), [*sampled[:-1], None]),
            "turns": pa.array([[{"action": "a", "reward": 0.5, "first_token": 0}, None]] * rows, TURNS),
        }
    )
    return table.replace_schema_metadata({SCHEMA_KEY: str(version).encode()})


def in_memory(tmp_path):
    """Return a directory of this test's own behind a URL."""
    directory = as_path(f"memory:/{tmp_path}")
    make_directory(directory)
    return directory


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


def chunks_of(path):
    """Return what the file says of each leaf column, by name."""
    group = pq.ParquetFile(path).metadata.row_group(0)
    return {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}


def test_parts_are_numbered_so_that_names_sort():
    names = [part_name(index) for index in (0, 1, 10, 99999)]
    assert names == ["part-00000.parquet", "part-00001.parquet", "part-00010.parquet", "part-99999.parquet"]
    assert sorted(names) == names


@pytest.mark.parametrize("place", [lambda tmp_path: tmp_path, in_memory], ids=["local", "memory"])
def test_a_part_is_read_as_it_was_written(tmp_path, place):
    path = place(tmp_path) / part_name(0)
    write_part(path, part())
    found = read_part(path, digest_file(path))
    assert found.equals(part(), check_metadata=True)
    assert [found.name for found in path.parent.iterdir()] == [part_name(0)]


def test_a_part_without_rows_is_a_part(tmp_path):
    write_part(tmp_path / "p", part().slice(0, 0))
    assert read_part(tmp_path / "p").equals(part().slice(0, 0), check_metadata=True)


def test_equal_tables_give_equal_bytes(tmp_path):
    chunked = pa.concat_tables([part(4).slice(0, 1), part(4).slice(1)])
    for name, table in (("a", part(4)), ("b", part(4)), ("c", chunked)):
        write_part(tmp_path / name, table)
    assert digest_file(tmp_path / "a") == digest_file(tmp_path / "b")
    assert read_part(tmp_path / "c").equals(part(4))


def test_a_reader_may_take_some_columns_only(tmp_path):
    write_part(tmp_path / "p", part())
    found = read_part(tmp_path / "p", columns=["rollout_logprobs", "env"])
    assert found.equals(part().select(["rollout_logprobs", "env"]))


def test_any_parquet_reader_can_read_a_part(tmp_path):
    write_part(tmp_path / "p", part())
    assert pq.read_table(tmp_path / "p").equals(part())


def test_every_column_is_compressed_with_zstd(tmp_path):
    write_part(tmp_path / "p", part())
    assert {chunk.compression for chunk in chunks_of(tmp_path / "p").values()} == {"ZSTD"}


def test_floats_are_split_by_byte_and_words_have_a_dictionary(tmp_path):
    write_part(tmp_path / "p", part())
    chunks = chunks_of(tmp_path / "p")
    for name in ("reward", "rollout_logprobs.list.element", "turns.list.element.reward"):
        assert "BYTE_STREAM_SPLIT" in chunks[name].encodings, name
        assert not chunks[name].has_dictionary_page, name
    for name in ("env", "turns.list.element.action"):
        assert chunks[name].has_dictionary_page, name


def test_float_noise_takes_less_than_with_the_defaults(tmp_path):
    rng = np.random.default_rng(0)
    table = pa.table({"rollout_logprobs": list_column([-rng.exponential(1, 200) for _ in range(500)], pa.float32())})
    write_part(tmp_path / "ours", table)
    pq.write_table(table, tmp_path / "defaults")
    assert (tmp_path / "ours").stat().st_size < 0.9 * (tmp_path / "defaults").stat().st_size


# What is refused


def test_a_missing_part_is_named(tmp_path):
    for path in (tmp_path / part_name(7), in_memory(tmp_path) / part_name(7)):
        with pytest.raises(InputError, match=r"part-00007\.parquet` is missing") as error:
            read_part(path)
        assert "--force" in error.value.hint


def test_one_flipped_bit_anywhere_is_corrupt(tmp_path):
    path = tmp_path / "p"
    write_part(path, part())
    digest = digest_file(path)
    for position in range(0, path.stat().st_size, 97):
        flip(path, position)
        with pytest.raises(InputError, match="is corrupt: its digest is not the one in the manifest"):
            read_part(path, digest)
        flip(path, position)
    assert read_part(path, digest).equals(part())


def test_a_truncated_part_is_refused_with_and_without_a_digest(tmp_path):
    path = tmp_path / "p"
    write_part(path, part())
    digest, data = digest_file(path), path.read_bytes()
    for length in (0, 3, 4, len(data) // 2, len(data) - 8, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(InputError, match="is corrupt"):
            read_part(path, digest)
        with pytest.raises(InputError, match="is not a readable Parquet file"):
            read_part(path)


@pytest.mark.parametrize("data", [b"", b"{}", b"PAR1PAR1", json.dumps([1] * 100).encode()])
def test_what_is_not_parquet_is_refused(tmp_path, data):
    (tmp_path / "p").write_bytes(data)
    with pytest.raises(InputError, match=r"`.*/p` is not a readable Parquet file"):
        read_part(tmp_path / "p", digest_bytes(data))


def test_a_newer_schema_is_refused_and_both_versions_are_named(tmp_path):
    write_part(tmp_path / "p", part(version=SCHEMA_VERSION + 1))
    message = f"has schema version {SCHEMA_VERSION + 1}; this nanoskyrl reads up to {SCHEMA_VERSION}"
    for columns in (None, ["env"]):
        with pytest.raises(InputError, match=message) as error:
            read_part(tmp_path / "p", columns=columns)
        assert error.value.hint == "Install a newer nanoskyrl"


def test_an_older_schema_is_read(tmp_path):
    write_part(tmp_path / "p", part(version=SCHEMA_VERSION - 1))
    assert read_part(tmp_path / "p").num_rows == 3


# Whole or not at all


def test_a_crash_midway_leaves_the_old_part_as_it_was(tmp_path):
    path = tmp_path / part_name(0)
    write_part(path, part())
    # Parquet has no such type, which the writer notices after it has begun.
    unwritable = part().append_column("when", pa.nulls(3, pa.month_day_nano_interval()))
    with pytest.raises(pa.ArrowNotImplementedError):
        write_part(path, unwritable)
    assert read_part(path).equals(part(), check_metadata=True)
    with pytest.raises(pa.ArrowNotImplementedError):
        write_part(tmp_path / part_name(1), unwritable)
    assert not (tmp_path / part_name(1)).exists()


def test_a_part_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match=r"cannot write `.*part-00000\.parquet`"):
        write_part(tmp_path / "file" / part_name(0), part())


# The parts of a directory


def written(directory, rows=(2, 3, 4)):
    """Write parts of so many rows and return their manifest."""
    for index, count in enumerate(rows):
        write_part(directory / part_name(index), part(count))
    parts = [Part(part_name(i), count, digest_file(directory / part_name(i))) for i, count in enumerate(rows)]
    return Manifest(
        stage="rollout", schema_version=SCHEMA_VERSION, settings={}, inputs={}, policy=None, code={}, packages={},
        parts=tuple(parts), rows_in=sum(rows), rows_out=sum(rows), dropped={},
    )  # fmt: skip


def test_parts_are_read_in_order(tmp_path):
    manifest = written(tmp_path)
    assert [table.num_rows for table in read_parts(tmp_path, manifest)] == [2, 3, 4]
    assert [table.column_names for table in read_parts(tmp_path, manifest, ["env"])] == [["env"]] * 3


def test_what_the_manifest_does_not_name_is_not_read(tmp_path):
    manifest = written(tmp_path)
    write_part(tmp_path / part_name(3), part(9))
    (tmp_path / f"{part_name(0)}.tmp").write_bytes(b"half a part")
    assert [table.num_rows for table in read_parts(tmp_path, manifest)] == [2, 3, 4]


def test_each_part_is_checked_when_it_is_reached(tmp_path):
    manifest = written(tmp_path)
    flip(tmp_path / part_name(1), 100)
    tables = read_parts(tmp_path, manifest)
    assert next(tables).num_rows == 2
    with pytest.raises(InputError, match=r"part-00001\.parquet` is corrupt"):
        next(tables)


def test_two_parts_that_changed_places_are_noticed(tmp_path):
    manifest = written(tmp_path, rows=(2, 3))
    first, second = tmp_path / part_name(0), tmp_path / part_name(1)
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    with pytest.raises(InputError, match=r"part-00000\.parquet` is corrupt"):
        list(read_parts(tmp_path, manifest))


def test_a_version_that_is_no_number_is_an_input_error(tmp_path):
    write_part(tmp_path / "p", part(version="one"))
    with pytest.raises(InputError):
        read_part(tmp_path / "p")


@pytest.mark.parametrize("name", ["directory", "file/part-00000.parquet"])
def test_a_place_where_no_file_can_be_is_an_input_error(tmp_path, name):
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError):
        read_part(tmp_path / name)


def test_a_column_that_is_not_there_is_an_input_error_and_others_come_in_the_order_asked_for(tmp_path):
    path = tmp_path / "part.parquet"
    write_part(path, pa.table({"a": [1], "b": [2]}))
    assert read_part(path, columns=["b", "a"]).column_names == ["b", "a"]
    with pytest.raises(InputError, match="has no column `c`"):
        read_part(path, columns=["a", "c"])


def test_reading_and_writing_start_no_thread(tmp_path):
    # A pool's thread that is alive when the process exits can abort it.
    code = (
        "import psutil, sys; from pathlib import Path; import pyarrow as pa\n"
        "from nanoskyrl.stages.core.shards import read_part, write_part\n"
        "path, count = Path(sys.argv[1]), psutil.Process().num_threads\n"
        "before = count()\n"
        "write_part(path, pa.table({'a': list(range(1000))})); read_part(path, columns=['a'])\n"
        "print(before, count())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "part.parquet")]
    before, after = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert before == after


@pytest.mark.parametrize("columns", [None, ["env", "rollout_logprobs"]])
def test_a_part_of_schema_1_is_read_under_the_names_of_now(tmp_path, columns):
    new = part()
    old = new.rename_columns(["logprobs" if name == "rollout_logprobs" else name for name in new.column_names])
    write_part(tmp_path / "p", old.replace_schema_metadata({SCHEMA_KEY: b"1"}))
    found = read_part(tmp_path / "p", columns=columns)
    assert found.equals(new if columns is None else new.select(columns))
    assert found.schema.metadata[SCHEMA_KEY] == str(SCHEMA_VERSION).encode()
