"""Every way in which we start a process, each as a program that does so, says how far it is, and waits.

`{mark}` is a number that the command line of what is started by untrusted code holds: `sleep {mark}`.
"""

SANDBOXED = """
import sys
from nanoskyrl.envs.sandbox.base import Limits, {call}
from pathlib import Path
import tempfile, threading
def work():
    {call}({what!r}, limits=Limits(seconds={seconds}, processes=16), {more})
{run}
"""
IN_MAIN, IN_A_THREAD = "work()", "threading.Thread(target=work).start()"
BRIEF_THREADS = (
    "def starts():\n    import time\n    threading.Thread(target=work, daemon=True).start()\n"
    "first = threading.Thread(target=starts)\nfirst.start()\nfirst.join()\nthreading.Event().wait()"
)
"""The thread that started the one that works is gone when the caller is killed."""

PROGRAMS = {
    "loops": "while True: pass",
    "sleeps": "import os\nos.execv('/bin/sleep', ['sleep', '{mark}'])",
    "ignores signals": (
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "while True: pass"
    ),
    "a child of its own session": (
        "import os, time\nif os.fork() == 0:\n    try: os.setsid()\n    except OSError: pass\n"
        "    os.execv('/bin/sleep', ['sleep', '{mark}'])\nos.wait()\ntime.sleep(600)"
    ),
    "an orphan without an environment": (
        "import os, time\nif os.fork() == 0:\n    try: os.setsid()\n    except OSError: pass\n    if os.fork() == 0:\n"
        "        os.execve('/bin/sleep', ['sleep', '{mark}'], {})\n    os._exit(0)\nos.wait()\ntime.sleep(600)"
    ),
    "a group of its own": (
        "import os, time\nif os.fork() == 0:\n    try: os.setpgid(0, 0)\n    except OSError: pass\n    if os.fork() == 0:\n"
        "        os.execve('/bin/sleep', ['sleep', '{mark}'], {})\n    os._exit(0)\nos.wait()\nwhile True: pass"
    ),
    "closes all it has": (
        "import os\nfor fd in range(3, 256):\n    try: os.close(fd)\n    except OSError: pass\nwhile True: pass"
    ),
}


def sandboxed(backend: str, program: str, run: str = IN_MAIN) -> str:
    """Return a caller whose program runs in a sandbox."""
    # Ctrl-C is heard once monty returns: at the program's limit.
    seconds = 20 if backend == "monty" else 600
    return SANDBOXED.format(
        call="run_python", what=PROGRAMS[program], more=f"backend={backend!r}", run=run, seconds=seconds
    )  # fmt: skip


def command() -> str:
    """Return a caller whose command runs in a sandbox."""
    return SANDBOXED.format(
        call="run_command",
        what=["sh", "-c", "sleep {mark} & sleep {mark}"],
        more="directory=Path(tempfile.mkdtemp())",
        run=IN_MAIN,
        seconds=600,
    )


WORKER = """
from nanoskyrl.envs.graders.workers import Workers
Workers().call({target!r}, {argument!r}, seconds=600)
"""
MCP = """
from nanoskyrl.envs.outside.mcp_session import McpSession
import threading
session = McpSession(command=["sh", "-c", "sleep {mark} & exec $0 $1", {python!r}, {server!r}])
threading.Event().wait()
"""
STARTED = """
import subprocess, threading
from nanoskyrl.stages.core.children import ending_with_us
subprocess.Popen({argv!r}, env=ending_with_us(), start_new_session=True)
threading.Event().wait()
"""
VLLM = """
from pathlib import Path
from nanoskyrl.stages.engines.vllm.config import VllmConfig
from nanoskyrl.stages.engines.vllm.engine import VllmEngine
import tempfile, threading
engine = VllmEngine(VllmConfig(gpus="cpu", kv_cache_gib=0.25))
engine.place = Path(tempfile.mkdtemp())
engine.load(Path({policy!r}))
threading.Event().wait()
"""
