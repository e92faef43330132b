"""What `show` reads of an output in many parts, and what it prints of them."""

import io

import pytest

from nanoskyrl.stages.core.errors import InputError, SettingsError
from nanoskyrl.stages.core.manifest import Head
from nanoskyrl.stages.core.output import open_output
from nanoskyrl.stages.core.rows import to_table
from nanoskyrl.stages.looking import show as module
from nanoskyrl.stages.looking.show import show


@pytest.fixture
def parts(tmp_path, make_trajectory):
    """Three parts of four rows, named a to l in their order."""
    names = iter("abcdefghijkl")
    with open_output(tmp_path / "rollout", Head(stage="rollout", settings={})) as out:
        for index in range(3):
            rows = [
                make_trajectory(trajectory_id=f"row-{name}", task_id=f"task-{name}") for name in map(next, [names] * 4)
            ]
            out.write_part(index, to_table(rows))
        out.finish(rows_in=12)
    return tmp_path / "rollout"


def shown(place, **options):
    file = io.StringIO()
    show(place, file=file, **options)
    return file.getvalue()


@pytest.mark.parametrize(("row", "name"), [(0, "a"), (3, "d"), (4, "e"), (11, "l"), (-1, "l"), (-12, "a"), (-5, "h")])
def test_one_row_is_counted_over_all_parts_and_one_part_is_read(parts, monkeypatch, row, name):
    read = []
    monkeypatch.setattr(module, "read_part", lambda path, *of: read.append(path.name) or read_part(path, *of))
    assert f"row-{name}" in shown(parts, row=row)
    assert len(read) == 1


read_part = module.read_part


@pytest.mark.parametrize("row", [12, -13])
def test_a_row_that_is_in_no_part_is_refused(parts, row):
    with pytest.raises(SettingsError, match=f"no row {row}"):
        shown(parts, row=row)


@pytest.mark.parametrize(("limit", "more"), [(1, 11), (4, 8), (5, 7), (12, 0), (10**30, 0)])
def test_the_first_rows_go_over_parts_and_the_rest_is_counted(parts, limit, more):
    text = shown(parts, limit=limit)
    assert [name for name in "abcdefghijkl" if f"task-{name}" in text] == list("abcdefghijkl"[: 12 - more])
    assert (f"{more} more" in text) == bool(more)


def test_a_part_that_holds_the_row_must_be_what_was_written(parts):
    (parts / "part-00002.parquet").write_bytes(b"nothing")
    with pytest.raises(InputError, match="corrupt"):
        shown(parts, row=9)
    assert "row-a" in shown(parts, row=0)
