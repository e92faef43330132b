"""`skyrl browse`: what is at the cursor is shown, conditions choose, and nothing steers the terminal."""

import asyncio
import io
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from looked_at import TASKS
from rich.console import Console
from running import GUARD_SECONDS, ROOT, skyrl_here

from nanoskyrl.stages.core.manifest import read_manifest
from nanoskyrl.stages.core.safe_text import STEERS
from nanoskyrl.stages.core.shards import read_parts

pytest.importorskip("textual", reason="`skyrl browse` is drawn by textual: pip install 'nanoskyrl[looking]'")


def browsed(run, *keys):
    """Return what the browser shows after some keys: the parts of its screen as text."""
    from textual.widgets import DataTable, Static

    from nanoskyrl.stages.looking.browse.app import Browser

    def text_of(renderable):
        console = Console(file=io.StringIO(), width=100)
        console.print(renderable)
        return console.file.getvalue()

    async def runs():
        app = Browser(run)
        async with app.run_test(size=(170, 50)) as pilot:
            await pilot.pause()
            for key in keys:
                await pilot.press(key)
                await pilot.pause()
            rows = app.query_one("#rows", DataTable)
            statics = {name: text_of(app.query_one(f"#{name}", Static).content) for name in ("one", "found", "says")}
            listed = [str(rows.get_row_at(index)[0]) for index in range(rows.row_count)]
            steps = app.query_one("#steps", DataTable)
            return SimpleNamespace(**statics, listed=listed, step=app.steps[steps.cursor_row])

    return asyncio.run(runs())


def ids(run, step, holds=lambda row: True):
    place = run.stage(step, "advantage" if run.stage(step, "advantage").is_dir() else "score")
    rows = [row for table in read_parts(place, read_manifest(place)) for row in table.to_pylist()]
    return [row["trajectory_id"][:8] for row in rows if holds(row)]


def test_it_begins_at_the_newest_step_and_its_first_trajectory(small):
    found = browsed(small)
    assert found.step == 1
    assert found.listed == ids(small, 1)
    assert f"trajectory     {found.listed[0]}" in found.one


def test_keys_walk_through_steps_and_trajectories(small):
    found = browsed(small, "p", "down", "down")
    assert (found.step, found.listed) == (0, ids(small, 0))
    assert f"trajectory     {found.listed[2]}" in found.one


def test_a_condition_and_a_text_choose_and_escape_takes_them_back(small):
    def typed(text):
        return ["slash", *("space" if sign == " " else sign for sign in text), "enter"]

    chosen = browsed(small, *typed("reward less 1".replace("less", "<")))
    assert chosen.listed == ids(small, 1, lambda row: row["reward"] is not None and row["reward"] < 1)
    text = browsed(small, *typed("answer"))
    assert text.listed == ids(small, 1, lambda row: "answer" in row["response"])
    assert browsed(small, *typed("answer"), "escape").listed == ids(small, 1)
    wrong = browsed(small, *typed("rewad < 1"))
    assert wrong.listed == ids(small, 1)


def test_tokens_are_coloured_and_listed(small):
    assert "tokens by advantage" in browsed(small, "c").one
    assert "tokens by logprob" in browsed(small, "c", "c").one
    assert "logprob" in browsed(small, "t").one


def test_what_a_policy_wrote_is_shown_and_not_obeyed(hostile):
    found = browsed(hostile)
    assert len(found.listed) == 4
    assert r"\x1b]0;pwned" in found.one.replace("\n", "")
    assert not STEERS.search(found.one)
    assert TASKS[0] in found.one or TASKS[1] in found.one


def test_without_a_terminal_or_a_run_it_is_one_error(small, tmp_path):
    assert "is no run" in skyrl_here("browse", tmp_path).stderr
    done = subprocess.run(
        [sys.executable, "-c", "from nanoskyrl_cli.main import main; main()", "browse", small.root],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, "needs a terminal" in done.stderr) == (2, True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux here")
def test_in_a_real_terminal(small, tmp_path):
    def tmux(*words):
        command = ["tmux", "-L", tmp_path.name, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    # Whoever runs the tests may have said how wide a terminal is.
    program = f"{sys.executable} -c 'from nanoskyrl_cli.main import main; main()' browse {small.root}"
    program = f"unset COLUMNS LINES; cd {ROOT} && {program}"
    tmux("new-session", "-d", "-x", "170", "-y", "50", program)
    try:
        words = ("success", "signal", "16 attempts", "Condition or text", "trajectory ")
        _until(lambda: all(word in tmux("capture-pane", "-p") for word in words))
        tmux("send-keys", "t")
        _until(lambda: "<tool_call>" in tmux("capture-pane", "-p") or "mask" in tmux("capture-pane", "-p"))
    finally:
        subprocess.run(["tmux", "-L", tmp_path.name, "kill-server"], capture_output=True, check=False)


def _until(holds):
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < GUARD_SECONDS
        time.sleep(0.2)
