"""Programs that try to get out, use all there is, or never end; and those that only want to run."""

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import pytest
from attacks import ATTACKS, CONTROL, EXHAUSTION, MAY_LACK, SIGNALS

from nanoskyrl.envs.sandbox import base as sandbox
from nanoskyrl.envs.sandbox.base import Limits, PythonSession, Ran, available, run_command, run_python
from nanoskyrl.stages.core.errors import SandboxError, SettingsError

LIMITS = Limits(seconds=0.5, memory_mb=256)
ROOMY = Limits(seconds=120.0, memory_mb=256)
SLACK = 120.0
"""Seconds past a program's own that starting and ending it may take on a busy machine; attacks go on for longer."""


def backends(*names: str):
    return [
        pytest.param(
            name, marks=pytest.mark.skipif(available()[name] is not None, reason=f"{name}: {available()[name]}")
        )
        for name in names
    ]


ALL, FULL = backends("monty", "bwrap"), backends("bwrap")


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """Return what the attacks are after: a file, a variable, listeners, and the caller's own process."""
    folder = tmp_path_factory.mktemp("caller")
    folder.chmod(0o755)
    secret = folder / "secret.txt"
    secret.write_text("secret")
    os.environ["SKYRL_SECRET"] = "secret"
    tcp, udp, unix, abstract, free = (
        socket.socket(), socket.socket(type=socket.SOCK_DGRAM), socket.socket(socket.AF_UNIX),
        socket.socket(socket.AF_UNIX), socket.socket(),
    )  # fmt: skip
    name = f"skyrl-test-{os.getpid()}-{folder.name}"
    tcp.bind(("127.0.0.1", 0))
    udp.bind(("127.0.0.1", 0))
    unix.bind(str(folder / "socket"))
    (folder / "socket").chmod(0o777)
    abstract.bind(f"\0{name}")
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    try:
        tcp6 = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:  # the machine has none
        tcp6 = socket.socket()
        tcp6.bind(("127.0.0.1", 0))
    ended = threading.Event()

    def knock() -> None:
        while not ended.wait(0.05):
            with socket.socket() as visitor:
                visitor.bind(("127.0.0.1", 0))
                if visitor.getsockname()[1] != port:  # or it would reach itself
                    visitor.connect_ex(("127.0.0.1", port))

    def answer(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\nhello")
                connection.close()
            except OSError:
                return

    def echo() -> None:
        while True:
            try:
                data, address = udp.recvfrom(99)
                udp.sendto(data, address)
            except OSError:
                return

    for listener in (tcp, tcp6, unix, abstract):
        listener.listen(16)
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
    threading.Thread(target=echo, daemon=True).start()
    threading.Thread(target=knock, daemon=True).start()
    handle = os.open(secret, os.O_RDONLY)
    os.set_inheritable(handle, True)
    yield {
        "secret": secret, "tcp": tcp.getsockname()[1], "tcp6": tcp6.getsockname()[1],
        "udp": udp.getsockname()[1], "unix": folder / "socket",
        "abstract": name, "free": port, "pid": os.getpid(), "out": folder / "out.txt",
        "address": ctypes.addressof(ctypes.create_string_buffer(b"secret!!")),
        "variable": max(re.findall(r"([A-Z_]+)=", Path("/proc/self/environ").read_text()), key=len),
        "packages": sysconfig.get_paths()["purelib"], "interface": _interface(),
    }  # fmt: skip
    ended.set()
    os.close(handle)
    for listener in (tcp, tcp6, udp, unix, abstract):
        listener.close()
    del os.environ["SKYRL_SECRET"]


def _interface() -> str:
    """Return the name of a network that is up, besides the machine's own; a new namespace has some that are not."""
    for _, name in socket.if_nameindex():
        flags = Path(f"/sys/class/net/{name}/flags")
        if name != "lo" and flags.is_file() and int(flags.read_text(), 16) & 1:
            return name
    return "there is none"


def attacks_on_backends():
    """Return every attack on every backend; those on bwrap that take all their time are slow."""
    for attack in ATTACKS:
        for name, why in available().items():
            marks = [pytest.mark.skipif(why is not None, reason=f"{name}: {why}")]
            slow = [pytest.mark.slow] if name == "bwrap" and attack in EXHAUSTION else []
            yield pytest.param(attack, name, marks=[*marks, *slow], id=f"{attack}-{name}")


@pytest.mark.parametrize(("attack", "backend"), list(attacks_on_backends()))
def test_no_attack_succeeds_and_each_ends_in_time(attack, backend, caller):
    begun = time.monotonic()
    ran = run_python(ATTACKS[attack].format(**caller), limits=LIMITS, backend=backend)
    assert "BREACH" not in ran.stdout
    assert time.monotonic() - begun < LIMITS.seconds + SLACK
    assert len(ran.stdout) + len(ran.stderr) <= LIMITS.output_bytes + 2000  # monty's own words come on top
    assert caller["secret"].read_text() == "secret"
    assert not caller["out"].exists()
    assert not Path("/tmp/skyrl-breach").exists()


@pytest.fixture
def bait():
    """A process that attacks may end or hold."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("attack", CONTROL)
def test_the_attacks_succeed_where_nothing_holds_them(attack, caller, bait, tmp_path):
    secret = tmp_path / "secret.txt"  # one that may be removed
    secret.write_text("secret")
    home = tmp_path / "home"
    home.mkdir()
    told = {**caller, "secret": secret, "out": tmp_path / "out.txt"}
    if attack == "ptrace":
        told["pid"] = bait.pid
    code = ATTACKS[attack].format(**told)
    if attack == "frames":  # what a backend that ran the program in its own process would show
        code = f"import nanoskyrl\n{code}"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=home, capture_output=True, text=True, timeout=SLACK, check=False,
        close_fds=False,
    )  # fmt: skip
    for what, attacks in MAY_LACK.items():
        if attack in attacks and "BREACH" not in ran.stdout:
            pytest.skip(f"{what}: not here ({ran.stdout.strip() or ran.stderr.strip().rpartition(chr(10))[2]})")
    assert "BREACH" in ran.stdout, ran.stderr


@pytest.mark.parametrize("attack", SIGNALS)
def test_the_signals_arrive_where_nothing_holds_them(attack, bait):
    code = ATTACKS[attack].format(pid=bait.pid)
    shell = ["sh", "-c", '"$@"; exit 0', "sh", sys.executable, "-c", code]
    ran = subprocess.run(shell, capture_output=True, timeout=SLACK, check=False)
    if attack == "signal the parent":
        assert ran.returncode == -signal.SIGKILL
    else:
        assert bait.wait(timeout=SLACK) == -signal.SIGTERM


def test_there_are_forty_attacks():
    assert len(ATTACKS) >= 40


@pytest.mark.parametrize("backend", FULL)
def test_nothing_outlives_its_program(backend):
    mark = f"77{os.getpid()}"
    code = f"import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.execv('/bin/sleep', ['sleep', '{mark}'])"
    run_python(f"{code}\ntime.sleep(0.2)", limits=LIMITS, backend=backend)
    end = time.monotonic() + SLACK
    while alive := [p for p in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in _bytes(p)]:
        assert time.monotonic() < end, f"still there: {alive}"
        time.sleep(0.1)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it ended while we looked
        return b""


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
        ("for _ in range(10**5): print('x' * 100)", "output"),
    ],
)
def test_a_program_that_fails_says_how(code, reason, backend):
    ran = run_python(code, limits=LIMITS if reason == "timeout" else ROOMY, backend=backend)
    assert (ran.ok, ran.reason) == (False, reason), ran


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
    ran = run_command(["sh", "-c", "echo hello > a.txt; cat a.txt; touch ../b.txt"], directory=home, backend=backend)
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


def test_wrong_words_are_refused(tmp_path):
    with pytest.raises(SettingsError, match="unknown sandbox `docker`"):
        run_python("1", backend="docker")
    with pytest.raises(SettingsError, match="no plain file name"):
        run_python("1", files={"../x": b""})
    with pytest.raises(SettingsError, match="runs no commands"):
        run_command(["true"], directory=tmp_path, backend="monty")
    with pytest.raises(SettingsError, match="above 0"):
        Limits(seconds=0)
