"""Servers found or started, waited for, and started again: for the engine and for `skyrl serve`."""

import asyncio
import tempfile
import time
from pathlib import Path

import aiohttp

from nanoskyrl.stages.core.errors import EngineError
from nanoskyrl.stages.engines.vllm.client import Client, new_session
from nanoskyrl.stages.engines.vllm.config import VllmConfig
from nanoskyrl.stages.engines.vllm.delivery import Server
from nanoskyrl.stages.engines.vllm.process import ServerProcess
from nanoskyrl.stages.engines.vllm.servers import SERVERS, Servers, described, foreign, plan_servers, read_servers


class ServerKeeper:
    """Knows the servers, and starts those of our own."""

    setup: Servers
    """What clients have to know; set by `find`."""

    def __init__(self, config: VllmConfig) -> None:
        """Know no server until `find`."""
        self.config = config
        self.servers: list[Server] = []
        self._place: Path | None = None
        self.processes: list[ServerProcess] = []
        """Servers of our own."""
        self._session: aiohttp.ClientSession | None = None

    def find(self, policy: Path, place: Path | None) -> None:
        """Find out which servers there are, or decide on some of our own; nothing is started.

        Args:
            policy: What servers of our own begin with.
            place: The run's directory, where `servers.json` may lie and logs are written.
        """
        self._place, found = place, None
        if self.config.urls:
            found = foreign(self.config)
        elif place is not None:
            found = read_servers(place / SERVERS)
        if found is None:
            self.plan(policy, place / "logs" if place is not None else Path(tempfile.mkdtemp(prefix="nanoskyrl-logs-")))
        else:
            self.setup = found

    def plan(self, policy: Path, logs: Path) -> None:
        """Decide on servers of our own, which begin with a policy and write logs there; nothing is started."""
        self.processes = plan_servers(policy, self.config, logs)
        self.setup = described(self.processes)

    async def start(self) -> None:
        """Start those of our own; returns before they answer."""
        self._session = new_session()
        for process in self.processes:
            process.start()
        processes = self.processes or [None] * len(self.setup.addresses)
        for index, (address, process) in enumerate(zip(self.setup.addresses, processes, strict=True)):
            url = process.url if process else address.url
            client = Client(url, self.setup.key, self._session, self.config.request_seconds)
            self.servers.append(Server(index, client, process, self.setup.started_with))

    async def disconnect(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    def stop(self) -> None:
        """Stop those that were started here, and know none any more."""
        for process in self.processes:
            process.stop()
        self.servers, self._session, self.processes = [], None, []

    @property
    def living(self) -> list[Server]:
        """Those that were not given up."""
        return [server for server in self.servers if server.lost is None]

    def replace(self, server: Server, why: str) -> str:
        """Start a server of ours again, and return why; another's is waited for.

        Args:
            server: One that is not fit to be asked.
            why: What is said of one that runs; of another its last words are.

        Raises:
            EngineError: it died too often.
        """
        server.era += 1
        server.sums = None
        if server.process is not None:
            why = why if server.process.running else server.process.last_words()
            server.process.restart(why)
            server.client.url = server.process.url
        return why

    async def ready(self, server: Server) -> None:
        """Wait until the server answers.

        Raises:
            EngineError: it ended, or took too long; with the last words of its log.
        """
        deadline = time.monotonic() + self.config.start_seconds
        while not await server.client.healthy():
            if server.process is not None and not server.process.running:
                raise EngineError(
                    f"the vLLM server ended while starting: {server.process.last_words()}", hint=hint_of(server)
                )
            if time.monotonic() > deadline:
                raise EngineError(
                    f"server {server.client.url} does not answer after {self.config.start_seconds:g} seconds",
                    hint=f"{hint_of(server)}; `vllm.start_seconds` allows more",
                )
            await asyncio.sleep(0.25)
            self._reread(server)

    def _reread(self, server: Server) -> None:
        """Look where a server of `skyrl serve` is now: it may have been restarted on another port."""
        if self.processes or self.config.urls or self._place is None:
            return
        found = read_servers(self._place / SERVERS)
        if found is None:
            raise EngineError(
                f"the servers of run `{self._place}` are no longer kept up",
                hint="Start `skyrl serve` again, and continue",
            )
        if server.index < len(found.addresses):
            server.client.url, server.client.key = found.addresses[server.index].url, found.key


def hint_of(server: Server) -> str:
    """Return where to look for what is wrong with a server."""
    log = server.process.log if server.process is not None else None
    return f"The whole log is `{log}`" if log else "Look at the server's log"
