"""A loop on a terminal: what is shown while it runs, and that elsewhere nothing but lines is."""

import io
import os
import pty
import shutil
import subprocess
import sys
import threading
import time

import pytest
from looked_at import told_run
from rich.console import Console
from running import GUARD_SECONDS, ROOT, SMALL, as_flags, skyrl_here

from nanoskyrl.stages.core.safe_text import STEERS
from nanoskyrl.stages.looking.live import LoopView, extreme_attempt, sparkline

ONE_STEP = {**SMALL, "rollout": {**SMALL["rollout"], "env": "tool_use", "max_turns": 3}, "loop": {"steps": 1}}


def text_of(renderable):
    console = Console(file=io.StringIO(), width=120)
    console.print(renderable)
    return console.file.getvalue()


def test_a_curve_has_a_block_a_step_and_a_gap_where_nothing_is_known():
    assert sparkline([0.0, 0.5, None, 1.0], share=True) == "▁▅ █"
    assert sparkline([5.0, 5.0], share=False) == "▅▅"
    assert len(sparkline([0.1] * 100, share=True)) == 40


def test_stage_numbers_and_time_left_are_shown(tmp_path):
    run = told_run(tmp_path, success=[0.1, 0.4], kl=[0.001, 0.002])
    view = LoopView(run, 12)
    view.reported()
    view.numbers["seconds"] = [90.0, 30.0]
    view.begins(2, "train")
    shown = text_of(view)
    assert "step 2 of 12, train" in shown
    assert "about 10 minutes left" in shown
    assert "success 0.4" in " ".join(shown.split())


def test_the_best_and_the_worst_attempt_are_shown_when_asked_for_and_once_more_not(small):
    view = LoopView(small, 2)
    view.reported()
    for key, word in (("w", "worst"), ("b", "best")):
        view.pressed(key)
        assert f"the {word} attempt of step 1" in text_of(view)
    view.pressed("b")
    assert "attempt of step" not in text_of(view)
    assert "tokens sampled a second" in text_of(view)


def test_an_attempt_of_a_hostile_policy_steers_nothing(hostile):
    shown = "".join(map(text_of, extreme_attempt(hostile, "w")))
    assert "script" in shown
    assert not STEERS.search(shown)


def test_before_anything_is_scored_there_is_no_attempt(tmp_path):
    assert "no attempt" in text_of(extreme_attempt(told_run(tmp_path, success=[0.5]), "b")[0])


def test_a_loop_shows_the_view_on_a_terminal_and_lines_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()
    sent = bytearray()
    reader = threading.Thread(target=lambda: [sent.extend(piece) for piece in iter(lambda: _read(master), b"")])
    reader.start()
    command = ("loop", *as_flags(ONE_STEP), "--run")
    with os.fdopen(slave, "w") as terminal:
        assert skyrl_here(*command, tmp_path / "a", stderr=terminal).returncode == 0
    reader.join()
    os.close(master)
    shown = sent.decode(errors="replace")
    assert "step 0 of 1, " in shown
    assert "b: newest best attempt" in shown
    piped = skyrl_here(*command, tmp_path / "b")
    assert "newest best attempt" not in piped.stderr
    line = next(line for line in piped.stderr.splitlines() if line.startswith("step    0  success"))
    assert line.partition("  grad")[0] in shown


def _read(master):
    try:
        return os.read(master, 1 << 16)
    except OSError:  # the other end is closed
        return b""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux here")
def test_keys_in_a_real_terminal(tmp_path):
    def tmux(*words):
        command = ["tmux", "-L", tmp_path.name, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def until(holds):
        began = time.monotonic()
        while not holds():
            assert time.monotonic() - began < GUARD_SECONDS, tmux("capture-pane", "-p")
            time.sleep(0.2)

    flags = " ".join(as_flags({**ONE_STEP, "loop": {"steps": 200}}))
    program = f"{sys.executable} -c 'from nanoskyrl_cli.main import main; main()' loop {flags} --run {tmp_path / 'run'}"
    tmux(
        "new-session",
        "-d",
        "-x",
        "120",
        "-y",
        "60",
        f"unset COLUMNS LINES; cd {ROOT} && {program}; echo ended with $?; sleep 60",
    )
    try:
        until(lambda: "success " in tmux("capture-pane", "-p") and "left" in tmux("capture-pane", "-p"))
        tmux("send-keys", "w")
        until(lambda: "the worst attempt of step" in tmux("capture-pane", "-p"))
        tmux("send-keys", "w")
        until(lambda: "the worst attempt of step" not in tmux("capture-pane", "-p"))
        tmux("send-keys", "C-c")
        until(lambda: "ended with 130" in tmux("capture-pane", "-p"))
    finally:
        subprocess.run(["tmux", "-L", tmp_path.name, "kill-server"], capture_output=True, check=False)
