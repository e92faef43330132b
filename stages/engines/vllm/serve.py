"""Generation servers of a run: started, watched, started again when they die, stopped cleanly.

`servers.json` in the run says where they are; the engine `vllm` of any command in the run
finds them there. They begin with the run's newest policy; commands bring them to theirs.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from nanoskyrl.stages.core.errors import EngineError, OutputError
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.stopping import told_to_stop
from nanoskyrl.stages.core.storage import make_directory
from nanoskyrl.stages.engines.vllm.config import VllmConfig
from nanoskyrl.stages.engines.vllm.process import ServerProcess, answers
from nanoskyrl.stages.engines.vllm.servers import SERVERS, ServerFleet, Servers, read_servers, write_servers

LOOK_SECONDS = 0.5
SILENT_SECONDS = 60.0
"""A server that runs and does not answer for so long is started again."""

Say = Callable[[str], None]


def serve(
    run: Run, policy: Path, config: VllmConfig, *, say: Say = lambda text: None, stop: threading.Event | None = None
) -> None:
    """Keep servers up until told to stop: by `stop`, SIGINT or SIGTERM.

    Args:
        run: The run whose `servers.json` is written.
        policy: What they begin with.
        config: The engine's settings.
        say: Told what happens.
        stop: Ends the serving when it is set.

    Raises:
        OutputError: the run is served already.
        EngineError: a server does not start, or dies again and again.
    """
    file = run.root / SERVERS
    if (other := read_servers(file)) is not None:
        raise OutputError(
            f"run `{run.root}` is served already, by process {other.keeper}", hint="Stop that one first, with Ctrl-C"
        )
    make_directory(run.root)
    fleet = ServerFleet.plan(policy, config, run.root / "logs")
    stop = stop or threading.Event()
    with told_to_stop(stop):
        try:
            for process in fleet.processes:
                process.start()
            for process in fleet.processes:
                _await(process, stop)
            if not stop.is_set():
                say(_summary(_write(file, fleet), policy))
            _watch(fleet, file, stop, say)
        finally:
            file.unlink(missing_ok=True)  # before they are gone, so that nobody comes any more
            fleet.stop()


def _watch(fleet: ServerFleet, file: Path, stop: threading.Event, say: Say) -> None:
    """Start again what dies or falls silent."""
    silent: dict[int, float] = {}
    while not stop.wait(LOOK_SECONDS):
        for index, process in enumerate(fleet.processes):
            now = time.monotonic()
            if process.running and answers(process.url, seconds=10):
                silent.pop(index, None)
                continue
            if process.running and now - silent.setdefault(index, now) < SILENT_SECONDS:
                continue
            why = "does not answer" if process.running else process.last_words()
            process.restart(why)
            say(f"Server {index} is started again: {why}")
            silent.pop(index, None)
            _await(process, stop)
            if stop.is_set():
                return
            _write(file, fleet)
            say(f"Server {index} is up again: {process.url}")


def _await(process: ServerProcess, stop: threading.Event) -> None:
    """Wait until a server answers.

    Raises:
        EngineError: it ended, or took too long.
    """
    while not answers(process.url, seconds=5):
        if not process.running:
            raise EngineError(
                f"the vLLM server ended while starting: {process.last_words()}", hint=f"The log is `{process.log}`"
            )
        if time.monotonic() - process.began > process.config.start_seconds:
            raise EngineError(
                f"the vLLM server does not answer after {process.config.start_seconds:g} seconds",
                hint=f"The log is `{process.log}`; `vllm.start_seconds` allows more",
            )
        if stop.wait(LOOK_SECONDS):
            return


def _write(file: Path, fleet: ServerFleet) -> Servers:
    servers = fleet.servers(keeper=os.getpid())
    write_servers(file, servers)
    return servers


def _summary(servers: Servers, policy: Path) -> str:
    places = ", ".join(
        f"{a.url} ({'CPU' if servers.cpu else 'GPU ' + '+'.join(map(str, a.gpus))})" for a in servers.addresses
    )
    return f"Serving `{policy}` with vLLM {servers.version}: {places}"
