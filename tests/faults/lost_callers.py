"""Callers that are killed once what they start is at work: `python tests/faults/lost_callers.py` tries each signal, prints a table.

Nothing is killed here but a caller that was started here, and what it started, should that be left.
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
from faults.killed_runs import with_environment
from faults.ways import BRIEF_THREADS, IN_A_THREAD, MCP, PROGRAMS, STARTED, VLLM, WORKER, command, sandboxed
from running import GUARD_SECONDS, ROOT, SMALL, as_flags, as_from_a_terminal
from vllm_servers import missing as vllm_missing

from nanoskyrl.envs.sandbox import base as sandbox
from nanoskyrl.stages.core.children import GRACE_SECONDS
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.models.policy import STARTER_DIRECTORY
from nanoskyrl.stages.running.session import Session

SIGNALS = (
    signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGABRT, signal.SIGSEGV,
    signal.SIGALRM, signal.SIGUSR1,
)  # fmt: skip
"""Each ends a process that does nothing about it."""
SERVER = str(ROOT / "tests" / "mcp_server.py")
NOHUP = "trap '' HUP TERM INT; sleep {mark} & wait"

WAYS = {
    **{f"bwrap: {name}": sandboxed("bwrap", name) for name in PROGRAMS},
    "bwrap in a thread": sandboxed("bwrap", "loops", IN_A_THREAD),
    "bwrap, its starter's thread gone": sandboxed("bwrap", "sleeps", BRIEF_THREADS),
    "bwrap, a command": command(),
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


SERVED = "a vLLM server"
WAYS[SERVED] = VLLM.format(policy=str(STARTER_DIRECTORY))
TRAINERS = ("a trainer beside the loop", "two processes that train", "a trainer of two processes that follows")
WORDS = {
    TRAINERS[0]: ["loop", "--steps", "40", "--lag", "1", "--gpus-generate", "cpu", "--gpus-train", "cpu"],
    TRAINERS[1]: ["train", "--num-processes", "2"],
    TRAINERS[2]: ["train", "--follow", "--num-processes", "2"],
}


def missing(way):
    if way == SERVED:
        return vllm_missing()
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


def is_guard(process):
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
        own = [p for p in found if not is_guard(p)]
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
        caller = subprocess.Popen(
            [sys.executable, "-c", program], stdout=said, stderr=said, cwd=folder, preexec_fn=_as_from_a_terminal
        )
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


def trainers_left_after(way, name, folder):
    """Kill a command once what it starts trains; return what is left of that, processes and temporary files."""
    run, scratch = Run(folder / "run"), folder / "tmp"
    session = Session(run, SMALL)
    for stage in ("rollout", "score", "advantage") if WORDS[way][0] == "train" else ():
        getattr(session, stage)(0)
    scratch.mkdir()
    flags = as_flags({"rollout": SMALL["rollout"]})
    with (folder / "said").open("wb") as said:
        caller = subprocess.Popen(
            [sys.executable, "-m", "nanoskyrl_cli.main", *WORDS[way], "--run", str(run.root), *flags], stdout=said,
            stderr=said, env={**os.environ, "TMPDIR": str(scratch)}, preexec_fn=_as_from_a_terminal,
        )  # fmt: skip
    mark = "RANK" if "--num-processes" in WORDS[way] else "NANOSKYRL_LOOP_PID"
    end = time.monotonic() + GUARD_SECONDS
    while not [p for p in with_environment(scratch) if p.pid != caller.pid and mark in p.environ()]:
        assert caller.poll() is None, (folder / "said").read_text()
        assert time.monotonic() < end
        time.sleep(0.1)
    time.sleep(0.5)
    caller.send_signal(name)
    caller.wait(GUARD_SECONDS)
    end = time.monotonic() + GRACE_SECONDS + 20
    while (left := with_environment(scratch)) and time.monotonic() < end:
        time.sleep(0.05)
    words = [" ".join(p.cmdline())[:200] for p in left]
    for process in left:
        process.kill()
    while (files := [f for f in scratch.iterdir() if f.suffix != ".lock"]) and time.monotonic() < end:
        time.sleep(0.05)
    return words + [str(path) for path in files]


def _as_from_a_terminal():
    as_from_a_terminal()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # some signals leave the memory in a file


def main() -> int:
    """Try every way with every signal; print how many processes were left of each, and return how many in all."""
    total = 0
    print("| What is started | " + " | ".join(name.name for name in SIGNALS) + " |")
    print("| --- |" + " ---: |" * len(SIGNALS))
    for way in (*WAYS, *TRAINERS):
        found = []
        for name in SIGNALS:
            if why := missing(way):
                found.append(f"not here: {why}")
                break
            with tempfile.TemporaryDirectory(prefix="nanoskyrl-callers-") as folder:
                left = (trainers_left_after if way in TRAINERS else left_after)(way, name, Path(folder))
            print("".join(f"{way}, {name.name}: {words}\n" for words in left), end="", file=sys.stderr)
            found.append(str(len(left)))
            total += len(left)
        print(f"| {way} | " + " | ".join(found) + " |", flush=True)
    return total


if __name__ == "__main__":
    sys.exit(min(main(), 1))
