"""Disks that fill up or are read-only, files that go or are exchanged, clocks that jump, and others at work in a run."""

import contextlib
import io
import multiprocessing
import os
import shutil
import subprocess
import threading
import time
import warnings

import pytest
from faults.killed_runs import EVALUATED, KINDS, problems, work
from running import SMALL, same_bytes, skyrl_here

from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.errors import NanoskyrlError, OutputError
from nanoskyrl.stages.core.manifest import is_finished, read_manifest
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.storage import lock_of, locked
from nanoskyrl.stages.looking.show import show
from nanoskyrl.stages.looking.verify import verify
from nanoskyrl.stages.running.loop import loop
from nanoskyrl.stages.running.session import Session

SETTINGS = merge(SMALL, EVALUATED, {"rollout": {"max_generate_length": 8}, "loop": {"eval_every": 1}})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A loop of two steps to which nothing happened."""
    root = tmp_path_factory.mktemp("runs") / "whole"
    loop(Run(root), SETTINGS)
    return root


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """Rollouts, scores and advantages of two steps, and an evaluation."""
    root = tmp_path_factory.mktemp("runs") / "scripted"
    work("scripted", str(root), KINDS["scripted"])
    return root


@pytest.fixture
def small_disk(tmp_path):
    """Return a folder in memory whose size can be set; nothing else is near it."""
    place = tmp_path / "disk"
    place.mkdir()

    def resize(options: str) -> bool:
        return subprocess.run(["mount", *options.split(), str(place)], capture_output=True, check=False).returncode == 0

    if os.geteuid() or not resize("-t tmpfs -o size=64k none"):
        pytest.skip("no file system of one's own can be mounted here")
    yield place, resize
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize(
    "kilobytes", [4, 36, *(pytest.param(size, marks=pytest.mark.slow) for size in (8, 12, 20, 28, 48, 64, 80))]
)
def test_a_disk_that_fills_up_is_one_error_and_what_comes_later_is_the_same(kilobytes, small_disk, scripted, tmp_path):
    place, resize = small_disk
    assert resize(f"-o remount,size={kilobytes}k")
    with pytest.raises((OutputError, OSError), match=r"space|cannot"):
        work("scripted", str(place / "run"), KINDS["scripted"])
    assert resize("-o remount,size=64m")
    work("scripted", str(place / "run"), KINDS["scripted"])
    assert same_bytes(scripted, place / "run") == []
    assert problems("scripted", place / "run", tmp_path / "none", scripted) == []


def test_a_disk_that_becomes_read_only_is_one_error(small_disk, scripted):
    place, resize = small_disk
    assert resize("-o remount,size=64m")
    Session(Run(place / "run"), KINDS["scripted"]).rollout(0)
    assert resize("-o remount,ro")
    done = skyrl_here("score", "--run", place / "run")
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot")
    assert resize("-o remount,rw")
    work("scripted", str(place / "run"), KINDS["scripted"])
    assert same_bytes(scripted, place / "run") == []


def exchanged(root):
    for name in ("policies/00000001/model.safetensors", "policies/00000001/config.json"):
        shutil.copyfile(root / name.replace("00000001", "00000000"), root / "x")
        (root / "x").replace(root / name)


SPOILT = {
    "a policy is exchanged": exchanged,
    "a policy goes": lambda root: shutil.rmtree(root / "policies" / "00000001"),
    "its weights are torn": lambda root: torn(next((root / "policies" / "00000001").glob("*.safetensors"))),
    "its weights go": lambda root: next((root / "policies" / "00000001").glob("*.safetensors")).unlink(),
    "its tokenizer goes": lambda root: (root / "policies" / "00000001" / "tokenizer.json").unlink(),
    "the optimizer's state is torn": lambda root: torn(next((root / "step-000000/train/state").iterdir())),
    "the optimizer's state goes": lambda root: shutil.rmtree(root / "step-000000/train/state"),
    "the manifest of train is torn": lambda root: torn(root / "step-000000/train/_manifest.json"),
    "policy.json is torn": lambda root: torn(root / "policies/00000001/policy.json"),
}


def torn(path):
    data = path.read_bytes()
    path.unlink()  # it may be another's file, too
    path.write_bytes(data[: len(data) // 2])


@pytest.mark.slow
@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_what_is_spoilt_between_two_steps_is_one_error_and_is_not_trained_on(spoil, whole, tmp_path):
    run = Run(tmp_path / "run")
    shutil.copytree(whole, run.root)
    for gone in (run.step(1), run.policy(2), run.root / "evals" / "00000001", run.root / "evals" / "00000002"):
        shutil.rmtree(gone)
    spoil(run.root)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told = None
        try:
            loop(run, SETTINGS)
        except NanoskyrlError as error:
            told = error
    if told is None:  # what could be made again was, or was not needed
        assert same_bytes(whole, run.root) == []
    else:
        assert told.hint
        assert not is_finished(run.stage(1, "train"))


@pytest.mark.parametrize("years", [-30, 70])
def test_a_clock_that_jumps_changes_nothing(years, scripted, tmp_path, monkeypatch):
    real, calls = time.time, [0]

    def jumps():
        calls[0] += 1
        return real() + (years * 31_557_600 if calls[0] % 2 else 0)

    monkeypatch.setattr(time, "time", jumps)
    work("scripted", str(tmp_path / "run"), KINDS["scripted"])
    assert same_bytes(scripted, tmp_path / "run") == []


def _writes(root, results):
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            Session(Run(root), KINDS["scripted"]).rollout(0)
        results.put("done")
    except OutputError as error:
        results.put(str(error))


def test_of_writers_at_once_one_writes_and_the_others_are_told(scripted, tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    each = [context.Process(target=_writes, args=(tmp_path / "run", results)) for _ in range(4)]
    for process in each:
        process.start()
    for process in each:
        process.join()
    said = [results.get() for _ in each]
    assert "done" in said
    assert all(word == "done" or "another process is writing" in word for word in said)
    output = Run(tmp_path / "run").stage(0, "rollout")
    assert read_manifest(output).digest == read_manifest(Run(scripted).stage(0, "rollout")).digest
    assert not lock_of(output).exists()


def test_a_reader_beside_a_writer_sees_what_is_whole_or_nothing(scripted, tmp_path):
    run, over, wrong = Run(tmp_path / "run"), threading.Event(), []

    def reads():
        looks = 0
        while not over.is_set() or looks == 0:
            looks += 1
            for look in (lambda: show(run.root, file=io.StringIO()), lambda: verify(run.root)):
                try:
                    look()
                except NanoskyrlError:
                    pass
                except Exception as error:
                    wrong.append(error)

    reader = threading.Thread(target=reads)
    reader.start()
    try:
        work("scripted", str(run.root), KINDS["scripted"])
    finally:
        over.set()
        reader.join()
    assert wrong == []
    assert same_bytes(scripted, run.root) == []


@pytest.mark.parametrize("content", ["", "12345", "not a number\n", "\0" * 4096])
def test_a_stale_lock_holds_nobody(content, tmp_path):
    lock_of(tmp_path / "place").write_text(content)
    with locked(tmp_path / "place"), pytest.raises(OutputError), locked(tmp_path / "place"):
        pass
    assert not lock_of(tmp_path / "place").exists()


def test_a_link_in_place_of_a_lock_is_not_followed(tmp_path):
    (tmp_path / "other").write_text("x")
    lock_of(tmp_path / "place").symlink_to(tmp_path / "other")
    try:
        with pytest.raises(OutputError), locked(tmp_path / "place"):
            pass
        assert (tmp_path / "other").read_text() == "x"
    finally:
        lock_of(tmp_path / "place").unlink()


@pytest.mark.parametrize("name", ["part-00000.parquet", "_manifest.json"])
@pytest.mark.parametrize("target", ["/dev/null", "/dev/zero", "/dev/full", "/proc/self/mem", "/", "/nowhere", "a pipe"])
def test_what_is_no_file_in_place_of_one_is_one_error(target, name, scripted, tmp_path):
    run = Run(tmp_path / "run")
    place = run.stage(0, "rollout")
    shutil.copytree(Run(scripted).stage(0, "rollout"), place)
    (place / name).unlink()
    if target == "a pipe":
        os.mkfifo(place / name)
    else:
        (place / name).symlink_to(target)
    for words in (("show", place), ("verify", run.root), ("score", "--run", run.root), ("show", place / name)):
        done = skyrl_here(*words)  # which would raise what is no error of ours
        # To `verify` a manifest that is no file is none: the stage is unfinished.
        assert done.returncode == 2 or (words[0] == "verify" and (done.returncode == 1 or name == "_manifest.json"))
        assert str(place) in done.stdout + done.stderr or words[0] == "score"
