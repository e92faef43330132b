"""Several processes and one word: the error of those that train together is told once."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from running import SMALL, skyrl

from nanoskyrl.stages.core.errors import NanoskyrlError
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.learning.process_group import launch
from nanoskyrl.stages.running.session import Session

SCRIPT = """
import os, signal, sys, time
from nanoskyrl.stages.core.errors import InputError
from nanoskyrl_cli import main
rank = int(os.environ["RANK"])
def run():
{body}
main.run = run
main.main()
"""


def failure(body, processes=2):
    """Return the error of processes that run this."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    with pytest.raises(NanoskyrlError) as caught:
        launch(["-c", SCRIPT.format(body=lines)], processes)
    return caught.value


def test_a_process_killed_by_a_signal_is_named(capfd):
    error = failure("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)")
    assert str(error) == "process 1 of 2 was killed by signal 9"
    assert "memory" in str(error.hint)
    assert error.exit_code == 1
    assert capfd.readouterr().err == ""


def test_of_two_tracebacks_the_first_is_told(capfd):
    error = failure("time.sleep(0 if rank else 0.05)\nraise RuntimeError(f'connection closed in {rank}')")
    assert str(error).startswith("process 1 of 2 failed:\nTraceback")
    assert str(error).endswith("RuntimeError: connection closed in 1")
    assert capfd.readouterr().err == ""


def test_a_reason_is_told_before_an_earlier_traceback():
    body = (
        "if rank == 0: raise RuntimeError('connection closed')\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "time.sleep(0.5)\n"
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


def test_an_error_of_all_processes_is_printed_once(run, tmp_path):
    done = skyrl("train", "--run", run.root, "--num-processes", "2", "--algo", "ppo", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.startswith("error: `ppo` takes advantages of `gae`")
    assert done.stderr.count("error:") == done.stderr.count("hint:") == 1
    assert len(done.stderr.splitlines()) == 3


@pytest.mark.parametrize("started", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_processes_that_are_interrupted_say_so_once_and_end(run, tmp_path, number, started):
    command = [
        sys.executable, "-m", "nanoskyrl_cli.main", "train", "--run", str(run.root), "--num-processes", "2",
        "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        while len(psutil.Process(launcher.pid).children()) < started and launcher.poll() is None:
            time.sleep(0.05)
        os.kill(launcher.pid, number)
        _, said = launcher.communicate(timeout=60)  # whoever is left over would hold the pipe
    assert said == "interrupted\n"
    assert launcher.returncode == 130
