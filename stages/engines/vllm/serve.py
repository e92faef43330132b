"""Generation servers of a run: started, watched, started again when they die, stopped cleanly.

`servers.json` in the run says where they are; the engine `vllm` of any command in the run
finds them there. They begin with the run's newest policy; commands bring them to theirs.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from nanoskyrl.stages.core.errors import OutputError
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.stopping import told_to_stop
from nanoskyrl.stages.core.storage import make_directory
from nanoskyrl.stages.engines.vllm.config import VllmConfig
from nanoskyrl.stages.engines.vllm.keeper import ServerKeeper
from nanoskyrl.stages.engines.vllm.servers import SERVERS, Servers, described, read_servers, write_servers

LOOK_SECONDS = 0.5
SILENT_SECONDS = 60.0
"""A server that runs and does not answer for so long is started again."""

Say = Callable[[str], None]


def serve(
    run: Run, policy: Path, config: VllmConfig, *, say: Say = lambda text: None, stop: threading.Event | None = None
) -> None:
    """Keep servers up until stopped: by `stop`, SIGINT or SIGTERM.

    Args:
        run: The run whose `servers.json` is written.
        policy: What they begin with.
        config: The engine's settings.
        say: Called with what happens.
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
    stop, keeper = stop or threading.Event(), ServerKeeper(config)
    keeper.plan(policy, run.root / "logs")
    with told_to_stop(stop):
        try:
            asyncio.run(_until(stop, _keep_up(keeper, file, policy, say)))
        finally:
            file.unlink(missing_ok=True)  # before they are gone, so that nobody comes any more
            keeper.stop()


async def _until(stop: threading.Event, work: Coroutine[Any, Any, None]) -> None:
    """Let something work until it ends or the event is set."""
    task = asyncio.ensure_future(work)
    while not task.done() and not stop.is_set():
        await asyncio.wait({task}, timeout=LOOK_SECONDS)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _keep_up(keeper: ServerKeeper, file: Path, policy: Path, say: Say) -> None:
    """Start the servers, and start again what dies or falls silent."""
    try:
        await keeper.start()
        for server in keeper.servers:
            await keeper.ready(server)
        say(_summary(_write(file, keeper), policy))
        silent: dict[int, float] = {}
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for server in keeper.servers:
                runs, now = server.process is not None and server.process.running, time.monotonic()
                if runs and await server.client.healthy():
                    silent.pop(server.index, None)
                    continue
                if runs and now - silent.setdefault(server.index, now) < SILENT_SECONDS:
                    continue
                silent.pop(server.index, None)
                say(f"Server {server.index} is started again: {keeper.replace(server, 'does not answer')}")
                await keeper.ready(server)
                _write(file, keeper)
                say(f"Server {server.index} is up again: {server.client.url}")
    finally:
        await keeper.disconnect()


def _write(file: Path, keeper: ServerKeeper) -> Servers:
    servers = described(keeper.processes, keeper=os.getpid())
    write_servers(file, servers)
    return servers


def _summary(servers: Servers, policy: Path) -> str:
    places = ", ".join(
        f"{a.url} ({'CPU' if servers.cpu else 'GPU ' + '+'.join(map(str, a.gpus))})" for a in servers.addresses
    )
    return f"Serving `{policy}` with vLLM {servers.version}: {places}"
