"""A share of the campaign of kills, and what it found: each by itself."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults.killed_runs import killed_run, reference
from running import GUARD_SECONDS, SMALL, same_bytes
from vllm_servers import missing

from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.leftovers import RECORD, remove_leftovers, scratch_beside
from nanoskyrl.stages.core.manifest import STARTED, is_finished
from nanoskyrl.stages.core.metrics import latest, read_metrics
from nanoskyrl.stages.core.output import tidy
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.storage import lock_of, locked
from nanoskyrl.stages.running.loop import loop


@pytest.mark.parametrize(
    ("kind", "gap"),
    [
        ("scripted", 150),
        pytest.param("hf", 60, marks=pytest.mark.slow),
        pytest.param("overlapped", 60, marks=pytest.mark.slow),
        pytest.param("vllm", 150, marks=[pytest.mark.vllm, pytest.mark.slow]),
    ],
)
def test_a_run_killed_at_drawn_file_events_ends_as_if_it_had_not_been(kind, gap, tmp_path):
    if kind == "vllm" and (reason := missing()):
        pytest.skip(reason)
    found = killed_run(kind, tmp_path / "killed", reference(kind, tmp_path / "whole"), 1000, gap=gap)
    assert found.kills > 0
    assert found.problems == []


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A loop of one step that evaluates the last policy."""
    run = Run(tmp_path_factory.mktemp("runs") / "run")
    loop(run, SETTINGS)
    return run


SETTINGS = merge(
    SMALL, {"eval": {"limit": 4, "max_generate_length": 8}, "rollout": {"max_generate_length": 8}},
    {"loop": {"steps": 1, "eval_every": 1}},
)  # fmt: skip


@pytest.fixture
def copy(finished, tmp_path):
    """Return a copy of the finished loop, in which policies may still share files."""
    subprocess.run(["cp", "-a", finished.root, tmp_path / "run"], check=True)
    return Run(tmp_path / "run")


@pytest.mark.parametrize("lost", ["all of it", "its manifest", "its summary and manifest", "a part"])
def test_what_a_finished_loop_owes_is_made(finished, copy, lost):
    place = copy.root / "evals" / f"{1:08d}" / "text_math"
    assert is_finished(place)
    if lost == "all of it":
        subprocess.run(["rm", "-r", place.parent], check=True)
    else:
        manifest = json.loads((place / "_manifest.json").read_bytes())
        (place / "_manifest.json").unlink()
        later = ("parts", "rows_in", "rows_out", "dropped", "files", "facts", "schema_version")
        started = {key: value for key, value in manifest.items() if key not in later}
        (place / STARTED).write_text(json.dumps(started))
        if lost == "its summary and manifest":
            (place / "_summary.json").unlink()
        if lost == "a part":
            sorted(place.glob("part-*.parquet"))[-1].unlink()
    assert loop(copy, SETTINGS) == 0
    assert is_finished(place)
    assert same_bytes(finished.root, copy.root) == []


def test_the_lost_line_of_a_step_is_written_by_the_next_loop(copy):
    lines = [line for line in read_metrics(copy.metrics) if line.get("stage") != "loop"]
    copy.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    loop(copy, SETTINGS)
    found = latest(read_metrics(copy.metrics), "loop")
    assert found[0]["timing/total"] > 0


def test_what_lies_beside_a_manifest_goes_with_the_next_loop(copy):
    place = copy.stage(0, "sync")
    (place / STARTED).write_text("{}")
    lock_of(place).touch()
    loop(copy, SETTINGS)
    assert not (place / STARTED).exists()
    assert not lock_of(place).exists()


def test_what_another_process_holds_is_let_be(copy):
    place = copy.stage(0, "sync")
    (place / STARTED).write_text("{}")
    with locked(place):
        tidy(place)
        assert (place / STARTED).exists()
    tidy(place)
    assert not (place / STARTED).exists()


LEAVES = """
import os, signal, sys
from pathlib import Path
from nanoskyrl.stages.core.leftovers import scratch_beside
with scratch_beside(Path(sys.argv[1])) as scratch:
    (scratch / "weights").write_text("x")
    print(scratch.name, flush=True)
    sys.stdin.read() if len(sys.argv) > 2 else os.kill(os.getpid(), signal.SIGKILL)
"""


def left(folder, *more, **options):
    return subprocess.Popen(
        [sys.executable, "-c", LEAVES, str(folder / "00000001"), *more], stdout=subprocess.PIPE, stdin=subprocess.PIPE,
        text=True, **options,
    )  # fmt: skip


def test_only_what_a_dead_process_recorded_is_removed(tmp_path):
    dead = left(tmp_path)
    name = dead.communicate(timeout=GUARD_SECONDS)[0].strip()
    alive = left(tmp_path, "waits")
    others = alive.stdout.readline().strip()
    # By name alone they look like ours; nobody recorded them.
    (tmp_path / ".00000001-0123abcd").mkdir()
    (tmp_path / ".00000002-x").mkdir()
    copied = tmp_path / ".00000003-feedbeef"
    copied.mkdir()
    record = json.loads((tmp_path / f"{name}{RECORD}").read_text())
    (tmp_path / f"{copied.name}{RECORD}").write_text(json.dumps(record))  # of another directory
    elsewhere = tmp_path / ".00000004-feedbeef"
    elsewhere.mkdir()
    (tmp_path / f"{elsewhere.name}{RECORD}").write_text(
        json.dumps({**record, "scratch": elsewhere.name, "host": "another"})
    )
    reused = tmp_path / ".00000005-feedbeef"
    reused.mkdir()  # a process of this number runs, and is another one
    (tmp_path / f"{reused.name}{RECORD}").write_text(json.dumps({**record, "scratch": reused.name, "pid": os.getpid()}))
    torn = tmp_path / ".00000006-feedbeef"
    torn.mkdir()
    (tmp_path / f"{torn.name}{RECORD}").write_text('{"scratch": ')
    assert {path.name for path in remove_leftovers(tmp_path)} == {name, reused.name}
    for kept in (others, ".00000001-0123abcd", ".00000002-x", copied.name, elsewhere.name, torn.name):
        assert (tmp_path / kept).is_dir(), kept
    alive.communicate("", timeout=GUARD_SECONDS)
    assert not (tmp_path / others).exists()
    assert not (tmp_path / f"{others}{RECORD}").exists()


def test_a_link_in_place_of_a_scratch_directory_is_not_followed(tmp_path):
    name = left(tmp_path).communicate(timeout=GUARD_SECONDS)[0].strip()
    home = tmp_path / "home"
    (tmp_path / name).rename(home)
    (tmp_path / name).symlink_to(home)
    remove_leftovers(tmp_path)
    assert (home / "weights").exists()


def test_a_directory_that_was_renamed_is_left_alone(tmp_path):
    with scratch_beside(tmp_path / "00000001") as scratch:
        (scratch / "weights").write_text("x")
        scratch.rename(tmp_path / "00000001")
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]
    assert (tmp_path / "00000001" / "weights").exists()


HOLDS = """
import sys, time
from pathlib import Path
from nanoskyrl.stages.core.errors import OutputError
from nanoskyrl.stages.core.storage import locked
place, count = Path(sys.argv[1]), Path(sys.argv[2])
done = 0
while done < 40:
    try:
        with locked(place):
            before = int(count.read_text())
            time.sleep(0.001)
            count.write_text(str(before + 1))
            done += 1
    except OutputError:
        pass
"""


def test_one_holder_at_a_time_though_lock_files_go(tmp_path):
    (tmp_path / "count").write_text("0")
    command = [sys.executable, "-c", HOLDS, str(tmp_path / "place"), str(tmp_path / "count")]
    each = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait(GUARD_SECONDS) for process in each] == [0, 0, 0]
    assert (tmp_path / "count").read_text() == "120"
    assert not lock_of(tmp_path / "place").exists()


def test_temporary_folders_go_with_a_caller_that_is_killed_at_once(tmp_path):
    program = (
        "import os, signal\nfrom nanoskyrl.stages.core.children import kept_directory\n"
        "kept_directory('nanoskyrl-')\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False)
    end = time.monotonic() + GUARD_SECONDS
    while list(Path(tmp_path).iterdir()):
        assert time.monotonic() < end
        time.sleep(0.05)
