"""Several processes and one word: the error of those that train together is reported once."""

import contextlib
import signal
import subprocess
import sys
import time

import psutil
import pytest
from running import GUARD_SECONDS, SMALL, as_from_a_terminal

from nanoskyrl.stages.core.errors import NanoskyrlError
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.learning.process_group import launch
from nanoskyrl.stages.running.session import Session
from nanoskyrl_cli.main import run as run_command

SCRIPT = """
import atexit, os, signal, time
from pathlib import Path
from nanoskyrl_cli import main
rank = int(os.environ["RANK"])
place = Path(os.environ["NANOSKYRL_ERRORS"])
left = [place / "00000.json", place / "00001.json"]
def until(path):
    while not path.exists():
        time.sleep(0.01)
def until_later_than(path):
    until(path)
    while (place / "clock").touch() or (place / "clock").stat().st_mtime_ns <= path.stat().st_mtime_ns:
        time.sleep(0.01)
def run():
{body}
main.run = run
main.main()
"""


@pytest.fixture(autouse=True)
def no_threads_named(monkeypatch):
    """Leave the number of threads to `launch`, as a user does."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def failure(body, processes=2):
    """Return the error of processes that run this."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    with pytest.raises(NanoskyrlError) as caught:
        launch(["-c", SCRIPT.format(body=lines)], processes)
    return caught.value


def test_a_process_killed_by_a_signal_is_named(capfd):
    error = failure("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nsignal.pause()")
    assert str(error) == "process 1 of 2 was killed by signal 9"
    assert "memory" in str(error.hint)
    assert error.exit_code == 1
    assert capfd.readouterr().err == ""


def test_of_two_tracebacks_the_first_is_told(capfd):
    body = (
        "if rank == 0: until_later_than(left[1])\n"
        "else: atexit.register(until, left[0])\n"  # the end of one ends the other
        "raise RuntimeError(f'connection closed in {rank}')"
    )
    error = failure(body)
    assert str(error).startswith("process 1 of 2 failed:\nTraceback")
    assert str(error).endswith("RuntimeError: connection closed in 1")
    assert capfd.readouterr().err == ""


def test_a_reason_is_told_before_an_earlier_traceback():
    body = (
        "if rank == 0:\n"
        "    until(place / 'stays')\n"
        "    raise RuntimeError('connection closed')\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "(place / 'stays').touch()\n"
        "until(left[0])\n"
        "return main._tell('the disk is full', 'Make room', 3)"
    )
    error = failure(body)
    assert (str(error), error.hint, error.exit_code) == ("the disk is full", "Make room", 3)


def test_an_exit_code_without_a_word_is_passed_on(capfd):
    error = failure("return 7 * rank")
    assert str(error) == "process 1 of 2 ended with exit code 7"
    assert error.exit_code == 7


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with advantages of one step."""
    run = Run(tmp_path_factory.mktemp("runs") / "run")
    session = Session(run, SMALL)
    for stage in ("rollout", "score", "advantage"):
        getattr(session, stage)()
    return run


@pytest.mark.slow
def test_an_error_of_all_processes_is_printed_once(run, tmp_path, capfd, monkeypatch):
    words = ("train", "--run", run.root, "--num-processes", "2", "--algo", "ppo", "--out", tmp_path / "out")
    monkeypatch.setattr(sys, "argv", ["skyrl", *map(str, words)])  # which the processes are given
    assert run_command() == 2
    said = capfd.readouterr().err
    assert said.startswith("error: `ppo` takes advantages of `gae`")
    assert said.count("error:") == said.count("hint:") == 1
    assert len(said.splitlines()) == 3


def ranks_of(launcher):
    """Return which of the processes that train are there: those that have begun as Python."""
    found = set()
    for child in launcher.children():
        with contextlib.suppress(psutil.Error):
            found.add(child.environ().get("RANK"))
    return found - {None}


@pytest.mark.parametrize(
    ("number", "started"),
    [
        (signal.SIGINT, 1), (signal.SIGTERM, 2),
        *(pytest.param(*both, marks=pytest.mark.slow) for both in ((signal.SIGINT, 2), (signal.SIGTERM, 1))),
    ],
)  # fmt: skip
def test_processes_that_are_interrupted_say_so_once_and_end(run, tmp_path, number, started):
    command = [
        sys.executable, "-m", "nanoskyrl_cli.main", "train", "--run", str(run.root), "--num-processes", "2",
        "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=as_from_a_terminal
    ) as launcher:
        while launcher.poll() is None and len(ranks_of(psutil.Process(launcher.pid))) < started:
            time.sleep(0.01)
        launcher.send_signal(number)
        _, said = launcher.communicate(timeout=GUARD_SECONDS)  # whoever is left over would hold the pipe
    assert said == "interrupted\n"
    assert launcher.returncode == 130
