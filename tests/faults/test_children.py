"""Nothing that we started is there soon after we are gone, by whatever signal."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from faults.killed_runs import with_environment
from faults.ways import BRIEF_THREADS, IN_A_THREAD, MCP, PROGRAMS, STARTED, WORKER, command, sandboxed
from running import GUARD_SECONDS, ROOT, SMALL, as_flags

from nanoskyrl.envs.sandbox import base as sandbox
from nanoskyrl.stages.core.children import GRACE_SECONDS, start_of
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.running.session import Session

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
SERVER = str(ROOT / "tests" / "mcp_server.py")
NOHUP = "trap '' HUP TERM INT; sleep {mark} & wait"

WAYS = {
    **{f"bwrap: {name}": sandboxed("bwrap", name) for name in PROGRAMS},
    "bwrap in a thread": sandboxed("bwrap", "loops", IN_A_THREAD),
    "bwrap, its starter's thread gone": sandboxed("bwrap", "sleeps", BRIEF_THREADS),
    "bwrap, a command": command("bwrap"),
    "monty: loops": sandboxed("monty", "loops"),
    "a worker that loops": WORKER.format(target="builtins:exec", argument="while True: pass"),
    "a worker that sleeps": WORKER.format(target="time:sleep", argument=600),
    "a worker with a child": WORKER.format(
        target="builtins:exec",
        argument="import subprocess\nsubprocess.run(['sleep', '{mark}'], start_new_session=True)",
    ),
    "a worker in C": WORKER.format(target="builtins:eval", argument="9 ** 9 ** 9 % 7"),
    "an MCP server": MCP.format(mark="{mark}", python=sys.executable, server=SERVER),
    "a process that hears no signal": STARTED.format(argv=["sh", "-c", NOHUP]),
    "an orphan in a session of its own": STARTED.format(argv=["sh", "-c", "setsid sh -c 'sleep {mark} & sleep 600' &"]),
}
CHEAP = ("bwrap: an orphan without an environment", "bwrap: loops", "a worker that loops")


def missing(way):
    backend = way.split(":")[0].split(",")[0].split(" ")[0]
    return sandbox.why_not(backend) if backend in sandbox.BACKENDS else None


def with_mark(mark):
    """Return the processes whose command line has the mark, as its own word."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if mark in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def alive(process):
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def is_keeper(process):
    with contextlib.suppress(psutil.Error):
        return any(word.endswith("children.py") for word in process.cmdline())
    return False


def busy(process):
    """Say whether a process does what it was started for: it took some time, or it sleeps on behalf of a program."""
    with contextlib.suppress(psutil.Error):
        return sum(process.cpu_times()[:2]) > 0.5
    return False


def started(caller, mark, expected):
    """Wait until what a caller starts is at work, and return all of it."""
    end = time.monotonic() + GUARD_SECONDS
    while time.monotonic() < end:
        found = [*psutil.Process(caller.pid).children(recursive=True), *with_mark(mark)]
        own = [p for p in found if not is_keeper(p)]
        if with_mark(mark) if expected else any(busy(p) for p in own):
            return set(found)
        if not expected and own and time.monotonic() > end - GUARD_SECONDS + 3:  # it is there, and idle
            return set(found)
        assert caller.poll() is None, "the caller ended"
        time.sleep(0.1)
    raise AssertionError("nothing was started")


def left_after(way, name, folder):
    """Kill a caller once what it starts is at work; return what is still there some seconds later."""
    mark = f"77{os.getpid()}{time.monotonic_ns() % 1000:03d}"
    program = WAYS[way].replace("{mark}", mark)
    with (folder / "said").open("wb") as said:
        caller = subprocess.Popen([sys.executable, "-c", program], stdout=said, stderr=said, cwd=folder)
    try:
        children = started(caller, mark, mark in program)
        caller.send_signal(name)
        caller.wait(GUARD_SECONDS)
    except BaseException:
        caller.kill()
        raise
    end = time.monotonic() + GRACE_SECONDS + 20
    while left := [p for p in {*children, *with_mark(mark)} if alive(p)]:
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    words = [" ".join(p.cmdline())[:200] for p in left]
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return words


@pytest.mark.parametrize(
    ("way", "name"),
    [
        pytest.param(way, name, marks=() if way in CHEAP and name == signal.SIGKILL else pytest.mark.slow)
        for way in WAYS
        for name in SIGNALS
    ],
)
def test_nothing_outlives_its_caller(way, name, tmp_path):
    if why := missing(way):
        pytest.skip(why)
    assert left_after(way, name, tmp_path) == []


TRAINS = {
    "two processes that train": (["train", "--num-processes", "2"], "RANK"),
    "a trainer beside the loop": (
        ["loop", "--steps", "40", "--lag", "1", "--gpus-generate", "cpu", "--gpus-train", "cpu"], "NANOSKYRL_KEEPER",
    ),
    "a trainer of two processes that follows": (["train", "--follow", "--num-processes", "2"], "RANK"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("way", TRAINS)
def test_no_trainer_outlives_its_caller(way, name, tmp_path):
    words, mark = TRAINS[way]
    run = Run(tmp_path / "run")
    session = Session(run, SMALL)
    for stage in ("rollout", "score", "advantage") if words[0] == "train" else ():
        getattr(session, stage)(0)
    (tmp_path / "tmp").mkdir()
    command = [
        sys.executable,
        "-m",
        "nanoskyrl_cli.main",
        *words,
        "--run",
        str(run.root),
        *as_flags({"rollout": SMALL["rollout"]}),
    ]
    with (tmp_path / "said").open("wb") as said:
        caller = subprocess.Popen(
            command, stdout=said, stderr=said, env={**os.environ, "TMPDIR": str(tmp_path / "tmp")}
        )
    end = time.monotonic() + GUARD_SECONDS
    while not [p for p in with_environment(tmp_path / "tmp") if p.pid != caller.pid and mark in p.environ()]:
        assert caller.poll() is None, (tmp_path / "said").read_text()
        assert time.monotonic() < end
        time.sleep(0.1)
    time.sleep(0.5)
    caller.send_signal(name)
    caller.wait(GUARD_SECONDS)
    end = time.monotonic() + GRACE_SECONDS + 20
    while (left := with_environment(tmp_path / "tmp")) and time.monotonic() < end:
        time.sleep(0.05)
    words = [" ".join(p.cmdline())[:200] for p in left]
    for process in left:
        process.kill()
    assert words == []
    while (left := list((tmp_path / "tmp").iterdir())) and time.monotonic() < end:
        time.sleep(0.05)
    assert [path for path in left if not path.name.endswith(".lock")] == []


def test_the_start_of_a_process_tells_it_from_another_of_its_number():
    child = subprocess.Popen(["sleep", "600"])
    began = start_of(child.pid)
    assert began is not None
    assert began == start_of(child.pid) != start_of(os.getpid())
    child.kill()
    deadline = time.monotonic() + GUARD_SECONDS
    while start_of(child.pid) is not None:  # killed and not yet waited for, it is gone
        assert time.monotonic() < deadline
    child.wait()
    assert start_of(child.pid) is None


def test_every_process_that_we_start_is_given_its_end():
    """Each use of subprocess passes an environment made by `ending_with_us`."""
    import ast

    inside = ROOT / "envs" / "graders" / "two_process_tests.py"  # runs in a sandbox, which ends
    for folder in ("stages", "envs", "eval", "algos", "nanoskyrl_cli"):
        for path in Path(ROOT / folder).rglob("*.py"):
            if path in (inside, ROOT / "stages" / "core" / "children.py"):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and isinstance(node.func.value, ast.Name)
                    and node.func.value.id == "subprocess"
                    and node.func.attr in ("run", "Popen", "call", "check_call", "check_output")
                ):
                    env = next((word.value for word in node.keywords if word.arg == "env"), None)
                    assert "ending_with_us" in (ast.dump(env) if env else ""), f"{path}:{node.lineno}"
