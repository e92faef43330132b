"""What commands say of how far they are: on a terminal alone."""

import os
import pty
import threading

import pytest
from running import SMALL, skyrl_here

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


@pytest.fixture
def on_a_terminal(monkeypatch):
    """Return a runner of commands with a terminal as stderr; it also returns what the terminal was sent."""

    def runs(*arguments):
        monkeypatch.setenv("TERM", "xterm")
        master, slave = pty.openpty()
        sent = bytearray()
        reader = threading.Thread(target=lambda: [sent.extend(piece) for piece in iter(lambda: _read(master), b"")])
        reader.start()
        with os.fdopen(slave, "w") as terminal:
            done = skyrl_here(*arguments, stderr=terminal)
        reader.join()
        os.close(master)
        return done, sent.decode(errors="replace")

    return runs


def _read(master):
    try:
        return os.read(master, 1 << 16)
    except OSError:  # the other end is closed
        return b""


def test_compare_shows_on_a_terminal_whose_turn_it_is_and_elsewhere_nothing(run, on_a_terminal):
    command = ("compare", "--run", run.root, "--algos", "grpo,sapo", "--limit", 1)
    shown, sent = on_a_terminal(*command)
    assert shown.returncode == 0, sent
    assert sent.index("compare: grpo, 1 of 2") < sent.index("compare: sapo, 2 of 2")
    piped = skyrl_here(*command)
    assert (piped.returncode, piped.stdout, piped.stderr) == (0, shown.stdout, "")
