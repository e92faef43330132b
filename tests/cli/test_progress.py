"""What commands say of how far they are: on a terminal alone."""

import os
import pty
import subprocess
import sys

import pytest
from running import SMALL

from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.running.session import Session


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run whose first step is ready to be trained."""
    run = Run(tmp_path_factory.mktemp("run"))
    session = Session(run, SMALL)
    for stage in ("rollout", "score", "advantage"):
        getattr(session, stage)(0)
    return run


def on_a_terminal(*arguments):
    """Run the command with a terminal as stderr; return its exit code, stdout, and what the terminal was sent."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "nanoskyrl_cli.main", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=slave, env={**os.environ, "TERM": "xterm"}) as child:
        os.close(slave)
        sent = b""
        while piece := _read(master):
            sent += piece
        assert child.stdout is not None
        printed = child.stdout.read()
    os.close(master)
    return child.returncode, printed.decode(), sent.decode(errors="replace")


def _read(master):
    try:
        return os.read(master, 1 << 16)
    except OSError:  # the other end is closed
        return b""


def test_compare_shows_on_a_terminal_whose_turn_it_is_and_elsewhere_nothing(run):
    command = ("compare", "--run", run.root, "--algos", "grpo,sapo", "--limit", 1)
    code, printed, sent = on_a_terminal(*command)
    assert code == 0, sent
    assert sent.index("compare: grpo, 1 of 2") < sent.index("compare: sapo, 2 of 2")
    piped = subprocess.run(
        [sys.executable, "-m", "nanoskyrl_cli.main", *map(str, command)], capture_output=True, text=True, check=True
    )
    assert (piped.stdout, piped.stderr) == (printed, "")
