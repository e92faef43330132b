import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nanoskyrl.stages.core import claims
from nanoskyrl.stages.core.children import owner
from nanoskyrl.stages.core.errors import OutputError, SettingsError
from nanoskyrl.stages.core.storage import (
    as_path,
    at_hand,
    create_whole,
    is_local,
    link_or_copy,
    locked,
    make_directory,
    remove_tree,
    sync_directory,
    sync_tree,
    whole_file,
    write_whole,
)


def in_memory(tmp_path):
    """Return a place of this test's own behind a URL."""
    return as_path(f"memory:/{tmp_path}")


def crash_midway(path):
    with whole_file(path) as file:
        file.write(b"half of it")
        raise RuntimeError("killed")


def test_a_name_without_a_scheme_is_a_local_path():
    assert as_path("runs/a") == Path("runs/a")
    assert is_local(as_path("runs/a"))


def test_a_tilde_is_the_home_directory():
    assert as_path("~/runs") == Path.home() / "runs"


def test_a_path_stays_what_it_is():
    path = Path("~not expanded")
    assert as_path(path) is path


def test_a_url_is_a_path_behind_fsspec(tmp_path):
    place = in_memory(tmp_path)
    assert not is_local(place)
    assert (place / "a" / "b").name == "b"
    assert as_path(place) == place


@pytest.mark.parametrize("scheme", ["file", "local"])
def test_a_url_of_this_machine_is_a_plain_path(scheme, tmp_path):
    assert as_path(f"{scheme}://{tmp_path}") == tmp_path


def test_an_unknown_scheme_is_a_settings_error():
    with pytest.raises(SettingsError, match="nosuch://bucket/run") as error:
        as_path("nosuch://bucket/run")
    assert "fsspec" in error.value.hint


@pytest.mark.parametrize("place", [lambda tmp_path: tmp_path, in_memory], ids=["local", "memory"])
def test_what_is_written_whole_is_read_back(tmp_path, place):
    path = place(tmp_path) / "new" / "folder" / "file.bin"
    make_directory(path.parent)
    write_whole(path, b"\0\xff" * 1000)
    assert path.read_bytes() == b"\0\xff" * 1000
    write_whole(path, b"shorter")
    assert path.read_bytes() == b"shorter"
    assert [found.name for found in path.parent.iterdir()] == ["file.bin"]


def test_a_file_is_not_there_before_it_is_complete(tmp_path):
    path = tmp_path / "file"
    with whole_file(path) as file:
        file.write(b"first")
        assert not path.exists()
    assert path.read_bytes() == b"first"


def test_a_crash_midway_leaves_the_old_file_as_it_was(tmp_path):
    path = tmp_path / "file"
    write_whole(path, b"old")
    with pytest.raises(RuntimeError, match="killed"):
        crash_midway(path)
    assert path.read_bytes() == b"old"
    write_whole(path, b"new")  # what the crash left behind is in nobody's way
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_a_crash_midway_leaves_only_a_temporary_name(tmp_path):
    with pytest.raises(RuntimeError, match="killed"):
        crash_midway(tmp_path / "file")
    assert [found.suffix for found in tmp_path.iterdir()] == [".tmp"]


def test_a_crash_midway_leaves_nothing_behind_a_url(tmp_path):
    path = in_memory(tmp_path) / "file"
    make_directory(path.parent)
    with pytest.raises(RuntimeError, match="killed"):
        crash_midway(path)
    assert not path.exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match=r"cannot write `.*/file/below`"):
        write_whole(tmp_path / "file" / "below", b"data")
    with pytest.raises(OutputError, match=r"cannot create `.*/file/below`"):
        make_directory(tmp_path / "file" / "below")


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path):
    def fill():
        with whole_file(tmp_path / "file"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OutputError, match=r"cannot write `.*/file`: No space left on device"):
        fill()
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("place", [lambda tmp_path: tmp_path / "run", in_memory], ids=["local", "memory"])
def test_a_tree_is_removed_whole_and_may_be_gone_already(tmp_path, place):
    directory = place(tmp_path)
    make_directory(directory / "policy")
    write_whole(directory / "policy" / "weights", b"w")
    remove_tree(directory)
    assert not directory.exists()
    remove_tree(directory)


def test_a_second_name_takes_no_space(tmp_path):
    write_whole(tmp_path / "a", b"weights")
    link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").samefile(tmp_path / "b")


def test_a_file_system_without_hard_links_gets_a_copy(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    write_whole(tmp_path / "a", b"weights")
    link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"weights"
    assert not (tmp_path / "a").samefile(tmp_path / "b")


def test_a_file_behind_a_url_is_copied(tmp_path):
    place = in_memory(tmp_path)
    make_directory(place)
    write_whole(place / "a", b"weights")
    link_or_copy(place / "a", place / "b")
    assert (place / "b").read_bytes() == b"weights"


def test_syncing_changes_nothing_and_passes_over_what_is_not_local(tmp_path):
    write_whole(tmp_path / "a", b"weights")
    sync_tree(tmp_path)
    sync_directory(in_memory(tmp_path))
    assert (tmp_path / "a").read_bytes() == b"weights"


def test_a_file_that_another_process_put_in_place_meanwhile_is_said_to_be(tmp_path):
    with pytest.raises(OutputError, match="another process is writing"), whole_file(tmp_path / "file"):
        (tmp_path / "file.tmp").rename(tmp_path / "file")


PLACES = pytest.mark.parametrize("place", [lambda tmp_path: tmp_path, in_memory], ids=["local", "memory"])


@PLACES
def test_of_many_who_put_a_file_in_one_place_one_wins(tmp_path, place):
    path = place(tmp_path) / "part"
    with ThreadPoolExecutor(8) as pool:
        put = list(pool.map(lambda n: create_whole(path, bytes([n]) * 100), range(8)))
    assert put.count(True) == 1
    assert path.read_bytes() == bytes([put.index(True)]) * 100
    assert [found.name for found in path.parent.iterdir()] == ["part"]


def test_without_hard_links_a_file_is_put_in_place_all_the_same(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert create_whole(tmp_path / "part", b"data")
    assert (tmp_path / "part").read_bytes() == b"data"


@PLACES
def test_a_place_is_held_by_one(tmp_path, place):
    directory = place(tmp_path) / "output"
    make_directory(directory)
    with locked(directory), pytest.raises(OutputError, match="another process is writing"), locked(directory):
        pass
    with locked(directory):  # which the one before has let go
        pass
    assert [path.name for path in directory.parent.iterdir() if path.name != "output"] == []


def claim_of(directory, **changes):
    """Write another process's claim."""
    claim = directory.parent / f".{directory.name}{claims.MARK}0"
    claim.write_text(json.dumps({**owner(), "beat": 0, **changes}))
    return claim


def test_a_claim_of_a_process_that_is_gone_is_taken_away(tmp_path):
    directory = in_memory(tmp_path) / "output"
    claim = claim_of(directory, start="0")
    with locked(directory):
        assert not claim.exists()


def test_a_claim_of_another_machine_counts_while_it_is_heard_of(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(claims, "LEASE_SECONDS", 0.5)
    directory = in_memory(tmp_path) / "output"
    claim = claim_of(directory, host="elsewhere")
    with locked(directory):  # it stood still
        assert not claim.exists()

    count = iter(range(1000))
    monkeypatch.setattr(claims, "_claims", lambda of: [claim_of(of, host="elsewhere", beat=next(count))])
    with pytest.raises(OutputError, match="another process is writing"), locked(directory):
        pass


def hold_and_lose(directory):
    with locked(directory):
        for claim in directory.parent.glob(f".*{claims.MARK}*"):
            claim.unlink()


def test_who_was_not_heard_of_is_told_that_the_place_was_taken_over(tmp_path):
    with pytest.raises(OutputError, match="took over"):
        hold_and_lose(in_memory(tmp_path) / "output")


def test_what_lies_behind_a_url_is_copied_once_and_again_when_it_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOSKYRL_CACHE", str(tmp_path / "mirror"))
    folder = in_memory(tmp_path) / "run" / "policies" / "00000001"
    make_directory(folder / "critic")
    (folder / "weights").write_bytes(b"1")
    (folder / "critic" / "head").write_bytes(b"2")
    copy = at_hand(folder)
    assert copy.parts[-3:] == folder.parts[-3:]
    assert {p.relative_to(copy).as_posix(): p.read_bytes() for p in copy.rglob("*") if p.is_file()} == {
        "weights": b"1", "critic/head": b"2"
    }  # fmt: skip
    before = (copy / "weights").stat().st_mtime_ns
    at_hand(folder)
    assert (copy / "weights").stat().st_mtime_ns == before
    (folder / "weights").write_bytes(b"3")
    (folder / "critic" / "head").unlink()
    at_hand(folder)
    assert [p.read_bytes() for p in copy.rglob("*") if p.is_file()] == [b"3"]
