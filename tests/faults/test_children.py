"""Nothing that we started is there soon after we are gone, by whatever signal."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from faults.lost_callers import (
    SERVED,
    SIGNALS,
    TRAINERS,
    WAYS,
    left_after,
    missing,
    started,
    trainers_left_after,
    with_mark,
)
from faults.ways import STARTED
from running import GUARD_SECONDS, ROOT

from nanoskyrl.stages.core.children import start_of

CHEAP = ("bwrap: an orphan without an environment", "bwrap: loops", "a worker that loops")


def marks_of(way, name):
    if way == SERVED:
        return (pytest.mark.vllm, *([] if name == signal.SIGKILL else [pytest.mark.slow]))
    return () if way in CHEAP and name == signal.SIGKILL else pytest.mark.slow


@pytest.mark.parametrize(
    ("way", "name"),
    [
        pytest.param(way, name, marks=marks_of(way, name))
        # The guard sees that a caller is gone, and not by what; `lost_callers.py` tries each way with each signal.
        for number, way in enumerate(WAYS)
        for name in dict.fromkeys((signal.SIGKILL, SIGNALS[number % len(SIGNALS)]))
    ],
)
def test_nothing_outlives_its_caller(way, name, tmp_path):
    if why := missing(way):
        pytest.skip(why)
    assert left_after(way, name, tmp_path) == []


def test_what_children_left_is_gone_where_somebody_ended_caller_and_children(tmp_path):
    """As Ray ends an actor: the processes that it started first, then itself; theirs are nobody's then."""
    mark = f"77{os.getpid()}001"
    program = STARTED.format(argv=["sh", "-c", f"setsid sleep {mark} & wait"])
    with (tmp_path / "said").open("wb") as said:
        caller = subprocess.Popen([sys.executable, "-c", program], stdout=said, stderr=said)
    started(caller, mark, expected=True)
    for process in (*psutil.Process(caller.pid).children(), caller):
        process.kill()
    caller.wait()
    deadline = time.monotonic() + GUARD_SECONDS
    while with_mark(mark):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "name"),
    [*((way, signal.SIGKILL) for way in TRAINERS), *((TRAINERS[0], name) for name in (signal.SIGTERM, signal.SIGHUP))],
)
def test_no_trainer_outlives_its_caller(way, name, tmp_path):
    assert trainers_left_after(way, name, tmp_path) == []


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
    trial = (
        ROOT / "envs" / "sandbox" / "trial.py"
    )  # a process of its own, with the mark; what it is hurt by inherits that
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
                    inherits = path == trial and env is None and node.func.attr == "Popen"
                    assert inherits or "ending_with_us" in (ast.dump(env) if env else ""), f"{path}:{node.lineno}"
