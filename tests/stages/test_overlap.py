"""Training in a process of its own: followed by hand, overlapped by the loop, stopped and killed."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from running import GUARD_SECONDS, SMALL, as_flags, same_bytes, skyrl
from tolerances import LOGITS, PASS, assert_close

from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.errors import EngineError, OutputError, SettingsError
from nanoskyrl.stages.core.manifest import is_finished, read_manifest
from nanoskyrl.stages.core.rows import row_arrays
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.core.storage import locked
from nanoskyrl.stages.running.loop import LoopConfig, loop
from nanoskyrl.stages.running.placement import gpus_of, placement_of
from nanoskyrl.stages.running.run_settings import begin_run, settings_for
from nanoskyrl.stages.running.session import Session
from nanoskyrl.stages.running.standing_trainer import LOOP_PID, STOP_FILE, follow
from nanoskyrl.stages.running.trainer_process import TrainerProcess

LAGGED = merge(SMALL, {"run": {"lag": 1}, "loop": {"steps": 3}})
APART = {"loop": {"gpus_generate": "cpu", "gpus_train": "cpu"}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Three steps one after the other, with lag 1."""
    root = tmp_path_factory.mktemp("runs") / "whole"
    loop(Run(root), LAGGED)
    return root


def test_an_overlapped_loop_gives_the_bytes_of_one_that_goes_in_turns(whole, tmp_path, monkeypatch):
    seen, order = [], []
    for owner, name in ((Session, "rollout"), (TrainerProcess, "wait_for")):
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda of, step, name=name, real=real: (order.append((name, step)), real(of, step))[1]
        )
    assert loop(Run(tmp_path / "run"), merge(LAGGED, APART), report=lambda step, _: seen.append(step)) == 3
    assert same_bytes(whole, tmp_path / "run") == []
    assert seen == [0, 1, 2]
    # Rollout k + 1 needs policy k alone, which train k starts from: it does not wait for it.
    wanted = [("rollout", 0), ("rollout", 1), ("wait_for", 0), ("rollout", 2), ("wait_for", 1), ("wait_for", 2)]
    assert order == wanted


def follower(run, settings, **options):
    """Return a thread that follows a run, and what it comes to."""
    found = {}

    def work():
        try:
            found["done"] = follow(Session(run, settings, keep_up=True, ahead=True), **options)
        except Exception as error:
            found["error"] = error

    thread = threading.Thread(target=work)
    thread.start()
    return thread, found


def test_a_trainer_that_follows_leaves_the_bytes_of_the_commands(whole, tmp_path):
    run = Run(tmp_path / "run")
    begin_run(run, LAGGED)
    thread, found = follower(run, LAGGED, steps=3)
    for step in range(3):
        session = Session(run, LAGGED)
        session.rollout(step)
        session.score(step)
        while thread.is_alive() and not is_finished(run.stage(step, "train")):
            time.sleep(0.05)
        session.sync(step)
    thread.join()
    assert found == {"done": 3}
    assert same_bytes(whole, run.root) == []


def test_a_trainer_stops_where_it_is_told_to_and_takes_the_word_away(tmp_path):
    run = Run(tmp_path / "run")
    session = Session(run, LAGGED)
    session.rollout(0)
    session.score(0)
    thread, found = follower(run, LAGGED)
    while not is_finished(run.stage(0, "train")):
        time.sleep(0.05)
        assert thread.is_alive()
    (run.root / STOP_FILE).touch()
    thread.join(GUARD_SECONDS)
    assert found == {"done": 1}
    assert not (run.root / STOP_FILE).exists()


def test_a_second_trainer_of_a_run_is_refused(tmp_path):
    run = Run(tmp_path / "run")
    run.root.mkdir()
    with locked(run.root / STOP_FILE):  # as the first one holds it
        second, found = follower(run, LAGGED)
        second.join(GUARD_SECONDS)
    assert isinstance(found["error"], OutputError)
    assert "another trainer follows" in str(found["error"])


@pytest.mark.parametrize(
    ("loop_pid", "remembered"), [(None, {"lr": 1e-3}), (os.getpid(), {})], ids=["by hand", "of a loop"]
)
def test_a_run_remembers_the_settings_of_a_trainer_that_no_loop_keeps(loop_pid, remembered, tmp_path, monkeypatch):
    run, given = Run(tmp_path / "run"), {"train": {"lr": 1e-3}}
    begin_run(run, LAGGED)
    if loop_pid is not None:
        monkeypatch.setenv(LOOP_PID, str(loop_pid))
    follow(Session(run, merge(LAGGED, given), given=given, keep_up=True, ahead=True), steps=0)
    assert settings_for(run).get("train", {}) == remembered


def test_a_run_remembers_nothing_of_a_trainer_that_was_refused(tmp_path):
    run, given = Run(tmp_path / "run"), {"train": {"lr": 1e-3}}
    begin_run(run, LAGGED)
    with locked(run.root / STOP_FILE), pytest.raises(OutputError, match="another trainer follows"):
        follow(Session(run, merge(LAGGED, given), given=given, keep_up=True, ahead=True), steps=0)
    assert "train" not in settings_for(run)


def holds_a_lock(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(file.path.endswith(".lock") for file in process.open_files())
    return False


@pytest.mark.slow
def test_the_command_ends_at_a_signal_and_with_whoever_keeps_it(tmp_path):
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-m", "nanoskyrl_cli.main", "train", "--follow", str(tmp_path / "run")]
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, LOOP_PID: str(gone.pid)}, check=False
    )
    first, last = left.stderr.splitlines()
    assert (left.returncode, last) == (0, "Stopped after 0 steps.")
    assert first.startswith(f"Following {tmp_path / 'run'}")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        # It holds the run's lock by then, and hears signals.
        while process.poll() is None and not holds_a_lock(psutil.Process(process.pid)):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(GUARD_SECONDS) == 0


def test_a_trainer_that_fails_ends_the_loop_with_its_words(tmp_path):
    run = Run(tmp_path / "run")
    told = r"the trainer ended with 1 before step 0 was trained: error: another trainer follows the run"
    with locked(run.root / STOP_FILE), pytest.raises(EngineError, match=told):
        loop(run, merge(LAGGED, APART))


@pytest.mark.slow
def test_an_overlapped_loop_killed_anywhere_ends_with_the_same_bytes(whole, tmp_path):
    command = ["loop", "--run", tmp_path / "run", "--steps", 3, "--lag", 1, "--gpus-generate", "cpu",
               "--gpus-train", "cpu", *as_flags({"rollout": SMALL["rollout"]})]  # fmt: skip
    program = [sys.executable, "-m", "nanoskyrl_cli.main", *map(str, command)]
    places = [("step-000000", "rollout"), ("step-000000", "train"), ("step-000001", "score"), ("step-000001", "train")]
    for step, stage in places:
        with subprocess.Popen(program, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and not (tmp_path / "run" / step / stage).exists():
                time.sleep(0.01)
            trainers = psutil.Process(process.pid).children()
            process.kill()
        psutil.wait_procs(trainers, timeout=GUARD_SECONDS)  # they see that their loop is gone
    done = skyrl(*command)
    assert done.returncode == 0, done.stderr
    assert same_bytes(whole, tmp_path / "run") == []


def runs(process):
    """Say whether a process is there and has not ended: in a container, nobody may take note of an orphan's end."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.slow
def test_a_loop_that_is_terminated_stops_its_trainer_and_ends_with_the_same_bytes(whole, tmp_path):
    command = ["loop", "--run", tmp_path / "run", "--steps", 3, "--lag", 1, "--gpus-generate", "cpu",
               "--gpus-train", "cpu", *as_flags({"rollout": SMALL["rollout"]})]  # fmt: skip
    program = [sys.executable, "-m", "nanoskyrl_cli.main", *map(str, command)]
    for step, stage in (("step-000000", "train"), ("step-000002", "rollout")):
        with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as process:
            while process.poll() is None and not (tmp_path / "run" / step / stage).exists():
                time.sleep(0.01)
            started = psutil.Process(process.pid).children(recursive=True)
            assert any("--follow" in child.cmdline() for child in started)
            process.terminate()
            _, said = process.communicate(timeout=GUARD_SECONDS)
        assert [child for child in started if runs(child)] == []
        assert (process.returncode, said.splitlines()[-1]) == (130, "interrupted")
    done = skyrl(*command)
    assert done.returncode == 0, done.stderr
    assert same_bytes(whole, tmp_path / "run") == []


def test_on_shared_gpus_both_halves_take_turns(whole, tmp_path, monkeypatch):
    # There is no GPU here: the CPU stands for it.
    monkeypatch.setattr("nanoskyrl.stages.running.loop.placement_of", lambda *_: placement_of("0", "0"))
    monkeypatch.setattr("nanoskyrl.stages.running.loop.placed", lambda settings, place: settings)
    assert not placement_of("0", "0").apart
    loop(Run(tmp_path / "run"), LAGGED)
    assert same_bytes(whole, tmp_path / "run") == []


@pytest.mark.slow
def test_a_trainer_in_two_processes_follows_with_passes_of_models(tmp_path):
    settings = merge(LAGGED, {"advantage": {"old_logprobs": "recompute"}, "loop": {"steps": 1}})
    run = Run(tmp_path / "run")
    session = Session(run, settings)
    begin_run(run, settings)
    session.rollout(0)
    session.score(0)
    done = skyrl("train", "--follow", run.root, "--steps", 1, "--num-processes", 2)
    assert done.returncode == 0, done.stderr
    assert json.loads((run.stage(0, "train") / "_manifest.json").read_text())["settings"]["processes"] == 2
    alone = tmp_path / "alone"
    shutil.copytree(run.root, alone)
    for stage in ("advantage", "train"):
        shutil.rmtree(Run(alone).stage(0, stage))
    one = Session(Run(alone), settings)
    one.advantage(0)
    one.train(0)
    found, wanted = (
        [
            row
            for table in read_parts(of.stage(0, "advantage"), read_manifest(of.stage(0, "advantage")))
            for row in row_arrays(table.column("old_logprobs"))
        ]
        for of in (run, Run(alone))
    )
    assert any(row is not None and (row < 0).any() for row in wanted)
    for a, b in zip(found, wanted, strict=True):
        if b is not None:
            assert_close(a, b, PASS, scale=LOGITS)


# Where the halves run


def test_gpus_are_read_as_ranges_and_lists():
    assert gpus_of("x", "0-2,5") == (0, 1, 2, 5)
    assert gpus_of("x", "cpu") == ()
    for text in ("", "0-", "2-1", "1,1", "gpu"):
        with pytest.raises(SettingsError):
            gpus_of("x", text)


def test_one_half_alone_is_refused():
    with pytest.raises(SettingsError, match=r"`loop.gpus_train` is not set"):
        LoopConfig(gpus_generate="0")
    assert placement_of("0-3", "4-7").apart
    assert not placement_of("0-3", "3").apart
    assert LoopConfig().placement is None
