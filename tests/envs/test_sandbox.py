"""Programs that only want to run, and how those end that fail; what tries to get out is in test_promises.py."""

import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from nanoskyrl.envs.sandbox import base as sandbox
from nanoskyrl.envs.sandbox.base import Limits, PythonSession, Ran, available, run_command, run_python
from nanoskyrl.stages.core.errors import SandboxError, SettingsError

LIMITS = Limits(seconds=0.5, memory_mb=256)
ROOMY = Limits(seconds=120.0, memory_mb=256)


def backends(*names: str):
    return [
        pytest.param(
            name, marks=pytest.mark.skipif(available()[name] is not None, reason=f"{name}: {available()[name]}")
        )
        for name in names
    ]


ALL, FULL = backends("monty", "bwrap"), backends("bwrap")


@pytest.mark.parametrize("backend", ALL)
def test_a_program_reads_its_input_and_its_files(backend):
    ran = run_python(
        "name = input()\nprint(name, int(input()) + 1, open('a.csv').read())",
        stdin="Ada\n41\n", files={"a.csv": b"x,y"}, limits=ROOMY, backend=backend,
    )  # fmt: skip
    assert (ran.ok, ran.stdout, ran.reason) == (True, "Ada 42 x,y\n", None)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("1 / 0", "error"),
        ("x = = 1", "error"),
        ("raise SystemExit(3)", "error"),
        ("a\0b", "error"),
        ("x = '\ud800'", "error"),
        ("(" * 1000, "error"),
        ("while True: pass", "timeout"),
        ("x = 'a' * (1 << 32)", "memory"),
        ("x = [[i] for i in range(8_000_000)]", "memory"),
        ("for _ in range(10**5): print('x' * 100)", "output"),
    ],
)
def test_a_program_that_fails_says_how(code, reason, backend):
    ran = run_python(code, limits=LIMITS if reason == "timeout" else ROOMY, backend=backend)
    assert (ran.ok, ran.reason) == (False, reason), ran


@pytest.mark.parametrize("backend", FULL)
def test_output_is_counted_over_both_streams(backend):
    code = "import sys\nprint('x' * 60000)\nprint('y' * 60000, file=sys.stderr)"
    ran = run_python(code, limits=ROOMY, backend=backend)
    assert ran.reason == "output"
    assert len(ran.stdout) + len(ran.stderr) <= ROOMY.output_bytes


@pytest.mark.parametrize("backend", FULL)
def test_a_command_under_root_runs_as_nobody_and_its_processes_are_counted(backend, tmp_path):
    many = "id -u\nfor i in 1 2 3 4 5 6 7 8 9; do sleep 60 & done"
    ran = run_command(["sh", "-c", many], directory=tmp_path, limits=replace(ROOMY, processes=8))
    assert int(ran.stdout) == os.stat(tmp_path).st_uid != 0
    assert "fork" in ran.stderr


@pytest.mark.parametrize("backend", FULL)
def test_what_programs_need_is_not_refused(backend):
    code = (
        "import asyncio, multiprocessing, os, subprocess, tempfile, threading\n"
        "async def one(): return await asyncio.to_thread(abs, -1)\nprint(asyncio.run(one()))\n"
        "print(subprocess.run(['sh', '-c', 'echo 2'], capture_output=True, text=True).stdout.strip())\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool: print(sum(pool.map(abs, [-1, -2])))\n"
        "with tempfile.NamedTemporaryFile() as f: os.chmod(f.name, 0o600); print(4)\n"
        "t = threading.Thread(target=print, args=(5,)); t.start(); t.join()"
    )
    ran = run_python(code, limits=ROOMY, backend=backend)
    assert (ran.ok, ran.stdout.split()) == (True, ["1", "2", "3", "4", "5"]), ran


@pytest.mark.parametrize("backend", ALL)
def test_random_numbers_repeat(backend):
    code = "import random\nprint(random.random())"
    assert run_python(code, backend=backend) == run_python(code, backend=backend)


@pytest.mark.parametrize("backend", FULL)
def test_full_python_has_generators_and_the_library(backend):
    code = (
        "import statistics, heapq, fractions, decimal\nprint(sum(x for x in (1, 2)), statistics.mean([1, 3]))\nexit(0)"
    )
    ran = run_python(code, backend=backend)
    assert (ran.ok, ran.stdout) == (True, "3 2\n")


@pytest.mark.parametrize("backend", FULL)
def test_a_command_writes_to_its_directory_and_nowhere_else(backend, tmp_path):
    home = tmp_path / "work"
    home.mkdir()
    ran = run_command(["sh", "-c", "echo hello > a.txt; cat a.txt; touch ../b.txt"], directory=home)
    assert ran.stdout == "hello\n"
    assert (home / "a.txt").read_text() == "hello\n"
    assert not (tmp_path / "b.txt").exists()


def test_a_session_keeps_its_names_until_a_limit_is_met():
    session = PythonSession(ROOMY)
    assert session.run("x = [1]\ndef f(): return x").ok
    assert session.run("x.append(2)\n1 / 0").reason == "error"
    assert session.run("print(f())").stdout == "[1, 2]\n"
    session.limits = LIMITS
    assert session.run("while True: pass").reason == "timeout"
    session.limits = ROOMY
    assert session.run("print(x)").reason == "error"


def test_sessions_do_not_see_each_other():
    one, other = PythonSession(), PythonSession()
    one.run("x = 1")
    assert "NameError" in other.run("print(x)").stderr


@pytest.mark.parametrize("backend", ALL)
def test_programs_run_from_many_threads_at_once(backend):
    found: dict[int, Ran] = {}

    def run(i: int) -> None:
        for j in range(i, 24, 12):
            found[j] = run_python(f"print({j})", backend=backend, limits=ROOMY)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: Ran(True, f"{i}\n", "", None) for i in range(24)}


def test_a_sandbox_that_does_not_work_is_an_error_and_no_verdict(monkeypatch):
    reasons = {"monty": None, "bwrap": "no bwrap"}
    monkeypatch.setattr(sandbox, "why_not", reasons.get)
    with pytest.raises(SandboxError, match="no bwrap"):
        run_python("1", backend="bwrap")
    with pytest.raises(SandboxError, match="full Python"):
        sandbox.full_python()


def test_wrong_words_are_refused():
    with pytest.raises(SettingsError, match="unknown sandbox `docker`"):
        run_python("1", backend="docker")
    with pytest.raises(SettingsError, match="no plain file name"):
        run_python("1", files={"../x": b""})
    with pytest.raises(SettingsError, match="above 0"):
        Limits(seconds=0)


def test_a_caller_under_lower_limits_of_its_own_has_a_sandbox_all_the_same():
    program = (
        "import resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))\n"
        "resource.setrlimit(resource.RLIMIT_SIGPENDING, (64, 64))\n"
        "from nanoskyrl.envs.sandbox.base import run_python\nprint(run_python('print(6 * 7)', backend='bwrap').stdout)"
    )
    if why := sandbox.why_not("bwrap"):
        pytest.skip(why)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "42", ran.stderr
